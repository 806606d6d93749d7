"""The door of a federation: nodes that come are asked who they are, whatever else is going on."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr.app import Message as Mail

from fedsap.config import Config
from fedsap.engines.flower.post import Post, opened, trouble
from fedsap.engines.flower.protocol import Bad, Hello, Introduction, Refusal, read
from fedsap.engines.flower.roster import Roster

LOOK = 5.0  # seconds between looks for new nodes


@dataclass
class Gate:
    """Asks nodes that come who they are, whatever else is going on."""

    post: Post
    roster: Roster
    config: Config
    say: Callable[[str], None]
    asked: dict[str, int] = field(default_factory=dict)  # nodes by the question that they have not answered
    looked: float = -math.inf
    names: dict[int, str] = field(default_factory=dict)  # that nodes which are there were registered under

    def look(self, every: float = LOOK) -> None:
        """Who is there now? Strangers are asked for their names."""
        if time.monotonic() < self.looked + every:
            return
        self.looked = time.monotonic()
        self.names = {info.node_id: info.name for info in self.post.grid.get_nodes()}
        self.roster.retain(self.names)
        for node in self.roster.strangers(self.names):
            if node not in self.asked.values():
                message = self.post.send(node, Hello(config=self.config), {})
                if message:
                    self.asked[message] = node

    def hear(self, question: str, mail: Mail) -> bool:
        """Whether the mail was an answer to who a node is."""
        node = self.asked.pop(question, None)
        if node is None:
            return False
        try:
            if mail.has_error():
                raise Bad(trouble(mail))
            said = read(opened(mail.content, most=0)[0], Introduction, Refusal)
            if not isinstance(said, Introduction):
                raise Bad(getattr(said, "why", "it said something else"))
            member = self.roster.enter(node, said, self.names.get(node, ""), self.names)
            where = f"part {said.part} of {said.parts}" if said.part is not None else f"{len(said.classes)} classes"
            self.say(f"node '{member.name}' is there: {where}")
        except Bad as why:
            self.roster.refused[node] = str(why)
            self.say(f"a node does not take part: {why}")
        return True

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Until enough nodes are there, or for so many seconds."""
        self.look(0)
        until = time.monotonic() + seconds

        def over() -> bool:
            self.look(0.5)
            return ready()

        for question, mail in self.post.receive(until, over):
            self.hear(question, mail)
