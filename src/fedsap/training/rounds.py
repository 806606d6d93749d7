"""The round loop: the only place where server and clients meet, whatever executes the clients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from fedsap.evaluate import Scores
from fedsap.message import Cost, Message, PerClass, cost, select
from fedsap.methods.method import Method, Round, Task
from fedsap.training.streams import generator, numbers


@dataclass(frozen=True)
class Replies:
    """What came back from those that answered, ascending: messages with client axis and mean loss terms, [R] each.

    Whoever did not answer stands under `failed`, with the reason.
    """

    clients: list[int]
    message: Message
    terms: dict[str, torch.Tensor]
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Judge:
    """How clients are evaluated."""

    every: int = 5
    proto_classes: Literal["own", "all"] = "own"
    silhouette: int = 5000
    snapshots: Sequence[int] = ()  # rounds after which embeddings are kept, whether their turn to be evaluated or not


class Clients(Protocol):
    """Whatever runs the clients."""

    def train(self, t: int, down: Message, own: Message, clients: Sequence[int]) -> Replies: ...

    def greet(self, clients: Sequence[int]) -> Replies: ...

    def evaluate(self, t: int, down: Message, own: Message, bank: PerClass | None, judge: Judge) -> Scores: ...


@dataclass(frozen=True)
class Presence:
    """Who takes part: a fixed share of the clients is asked in each round, and some of those are made to fail."""

    share: float = 1.0
    failures: float = 0.0

    def draw(self, seed: int, t: int, clients: int) -> tuple[list[int], list[int]]:
        """The clients that are asked in round t, and those of them that will not answer; both ascending.

        >>> Presence(share=0.5).draw(seed=0, t=1, clients=4) == Presence(share=0.5).draw(seed=0, t=1, clients=4)
        True
        """
        rng = numbers(seed, "participation", t=t)
        asked = rng.permutation(clients)[: max(1, round(self.share * clients))]
        lost = asked[rng.random(len(asked)) < self.failures]
        return sorted(asked.tolist()), sorted(lost.tolist())


@dataclass(frozen=True)
class Outcome:
    """One finished round."""

    t: int
    server: Message
    clients: list[int]  # that answered
    failed: dict[int, str]  # that did not, and why
    terms: dict[str, torch.Tensor]
    up: list[Cost]  # per client that answered
    down: list[Cost]  # per client that was asked
    scores: Scores | None


def play(
    method: Method,
    task: Task,
    clients: Clients,
    *,
    seed: int,
    server: Message | None,
    done: int,
    presence: Presence,
    judge: Judge,
    warm_start: bool = False,
) -> Iterator[Outcome]:
    """Rounds done+1 .. task.rounds, each yielded when it is over. `server` is the state after round `done`."""
    everyone = list(range(task.clients))
    all_ids = torch.arange(task.clients)
    if server is None:
        server = method.begin(task, generator(seed, "server"))
        if warm_start:
            first = Round(0, generator(seed, "server", t=task.rounds + 1), all_ids)
            server = method.combine(task, server, clients.greet(everyone).message, first)
    for t in range(done + 1, task.rounds + 1):
        asked, lost = presence.draw(seed, t, task.clients)
        present = [c for c in asked if c not in lost]
        ids = torch.tensor(present, dtype=torch.long)
        shared, own = method.broadcast(server, t), method.address(server, t, ids)
        replies = clients.train(t, shared, own, present) if present else Replies([], {}, {})
        failed = replies.failed | dict.fromkeys(lost, "left out on purpose (train.failures)")
        each = cost(shared)
        down = [each + cost(select(own, torch.tensor(i))) for i in range(len(present))]
        up = [cost(select(replies.message, torch.tensor(i))) for i in range(len(replies.clients))]
        sound = all(bool(torch.isfinite(v).all()) for v in replies.terms.values())
        if sound and replies.clients:
            info = Round(t, generator(seed, "server", t=t), torch.tensor(replies.clients))
            server = method.combine(task, server, replies.message, info)
        scores = None
        if sound and (t % judge.every == 0 or t == task.rounds or t in judge.snapshots):
            next_down, next_own = method.broadcast(server, t + 1), method.address(server, t + 1, all_ids)
            scores = clients.evaluate(t, next_down, next_own, method.bank(server), judge)
        yield Outcome(t, server, replies.clients, failed, replies.terms, up, down, scores)
