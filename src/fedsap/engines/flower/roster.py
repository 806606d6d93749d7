"""Which nodes are there, what they are called, and which clients each of them has."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import fedsap
from fedsap.engines.flower.agree import stranger
from fedsap.engines.flower.protocol import Bad, Introduction
from fedsap.errors import UserError


@dataclass(frozen=True)
class Member:
    """A node that has said who it is."""

    node: int  # Flower's number for it, another one each time it registers
    name: str
    said: Introduction
    clients: tuple[int, ...]


@dataclass
class Roster:
    """The members of a federation with `total` clients. A name is a place: whoever comes back with it has the same
    clients. A name that Flower has registered with a node's key is that node's; other nodes may only say theirs.

    places: the client of each name, where nodes bring their own data.
    """

    total: int
    own: bool
    places: dict[str, int] = field(default_factory=dict)
    classes: tuple[str, ...] = ()  # once they are agreed
    members: dict[int, Member] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    def enter(self, node: int, said: Introduction, registered: str, online: Iterable[int]) -> Member:
        """Takes a node in, or raises `Bad` with the reason why not."""
        try:
            member = self._admit(node, said, registered, set(online))
        except (Bad, UserError) as error:
            self.refused[node] = str(error)
            raise Bad(str(error)) from None
        for other in [m.node for m in self.members.values() if m.name == member.name]:
            del self.members[other]
        self.members[node] = member
        return member

    def _admit(self, node: int, said: Introduction, registered: str, online: set[int]) -> Member:
        name = said.name
        if said.version != fedsap.__version__:
            raise Bad(f"node '{name}' has fedsap {said.version}; the server's is {fedsap.__version__}, takes the same")
        if registered and name != registered:
            raise Bad(f"node '{registered}' calls itself '{name}'; takes its registered name")
        twin = next((m for m in self.members.values() if m.name == name and m.node != node), None)
        if twin is not None and twin.node in online:
            raise Bad(f"there is a node '{name}' already; takes another name")
        if self.classes:
            stranger(name, said.classes, self.classes)
        if (said.part is None) != self.own:
            has, takes = ("its own data", "partition") if self.own is False else ("a part of a known data set", "own")
            raise Bad(f"node '{name}' has {has}, and flower.data is {takes}")
        if said.part is not None:
            return Member(node, name, said, self._share(name, said.part, said.parts or 1))
        if name not in self.places:
            free = sorted(set(range(self.total)) - set(self.places.values()))
            if self.classes and not free:
                raise Bad(f"node '{name}' comes when all {self.total} places are taken (partition.clients)")
            if self.classes:  # the federation has begun: the next place; before, places go by name
                self.places[name] = free[0]
        return Member(node, name, said, (self.places[name],) if name in self.places else ())

    def _share(self, name: str, part: int, parts: int) -> tuple[int, ...]:
        clients = tuple(range(self.total))[part::parts]
        taken = {c: m.name for m in self.members.values() for c in m.clients if m.name != name}
        twice = next((c for c in clients if c in taken), None)
        if part >= parts or twice is not None:
            raise Bad(f"node '{name}' is part {part} of {parts}; client {twice} is '{taken.get(twice or 0, '?')}'s")
        return clients

    def begin(self, classes: Sequence[str]) -> None:
        """Fixes the classes, and who of those that are there has which place: by name."""
        self.classes = tuple(classes)
        for name in sorted(m.name for m in self.members.values()):
            if self.own and name not in self.places:
                free = sorted(set(range(self.total)) - set(self.places.values()))
                if not free:
                    raise UserError(
                        f"partition.clients: got {self.total}, and node '{name}' is one more; takes a larger one"
                    )
                self.places[name] = free[0]
        for node, member in list(self.members.items()):
            if self.own:
                self.members[node] = Member(node, member.name, member.said, (self.places[member.name],))

    def retain(self, online: Iterable[int]) -> None:
        """Lets go of nodes that are not there any more."""
        there = set(online)
        self.members = {n: m for n, m in self.members.items() if n in there}
        self.refused = {n: why for n, why in self.refused.items() if n in there}

    def strangers(self, online: Iterable[int]) -> list[int]:
        """Nodes that have not been asked who they are."""
        return sorted(set(online) - set(self.members) - set(self.refused))

    @property
    def owner(self) -> Mapping[int, Member]:
        """The member that has each client."""
        return {c: m for m in self.members.values() for c in m.clients}
