"""The round loop: the only place where server and clients meet, whatever executes the clients."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from fedsap.evaluate import Scores
from fedsap.message import Cost, Message, PerClass, cost, select
from fedsap.methods.method import Method, Round, Task
from fedsap.training.streams import generator, numbers


@dataclass(frozen=True)
class Replies:
    """What came back from those that answered, ascending: messages with client axis, mean loss terms, [R] each.

    Whoever did not answer stands under `failed`, with the reason; those of them that nothing was sent to also under
    `absent`. `late` are the figures of an evaluation that was asked for before and took place on the way; `notes` is
    what else the engine has to say of the round, ready for JSON.
    """

    clients: list[int]
    message: Message
    terms: dict[str, torch.Tensor]
    figures: dict[str, torch.Tensor] = field(default_factory=dict)  # of unlabelled samples, [R] each
    failed: dict[int, str] = field(default_factory=dict)
    absent: frozenset[int] = frozenset()
    late: Scores | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Judge:
    """How clients are evaluated."""

    every: int = 5
    proto_classes: Literal["own", "all"] = "own"
    silhouette: int = 5000
    snapshots: Sequence[int] = ()  # rounds after which embeddings are kept, whether their turn to be evaluated or not
    batch_statistics: int = 0  # BatchNorm uses those of batches of so many images; 0: the running ones
    gradients: bool = False


@dataclass(frozen=True)
class Ask:
    """What a server wants of some of its clients: they all receive `down`, and each its row of `own`."""

    down: Message
    own: Message
    clients: Sequence[int]
    bank: PerClass | None = None  # for an evaluation: prototypes [C, d] to compare with


class Clients(Protocol):
    """Whatever runs the clients, of one federation or of several with different seeds. Everything goes by seed.

    Where a message is dear, `evaluate_all` may leave a federation out: its figures then come as `Replies.late` with the
    next `train_all`, which is called in every round, even when it asks nobody. After the last round they come at once.
    """

    def train_all(self, t: int, asks: Mapping[int, Ask]) -> dict[int, Replies]: ...

    def greet_all(self, clients: Mapping[int, Sequence[int]]) -> dict[int, Replies]: ...

    def evaluate_all(self, t: int, asks: Mapping[int, Ask], judge: Judge) -> dict[int, Scores]: ...

    def kept(self, seed: int) -> dict[str, torch.Tensor]:
        """What a checkpoint has to hold of a federation's clients, by names that `take_back` knows."""
        ...

    def take_back(self, seed: int, name: str, value: torch.Tensor) -> None:
        """One of the tensors of `kept`; raises KeyError or ValueError if it does not fit."""
        ...

    @property
    def spent(self) -> Mapping[str, float]:
        """Seconds by what they went into."""
        ...


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
    down: list[Cost]  # per client that was sent something
    notes: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, torch.Tensor] = field(default_factory=dict)  # of unlabelled samples, per client that answered
    late: Scores | None = None  # of the round that owed them
    scores: Scores | None = None
    owed: bool = False  # it was evaluated, and the figures are still to come
    asked: list[int] = field(default_factory=list)  # that something was sent to, whether they answered or not


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
    """Rounds done+1 .. task.last, each yielded when it is over. `server` is the state after round `done`."""
    servers = {seed: server}
    for outcomes in play_all(
        method, task, clients, servers=servers, done=done, presence=presence, judge=judge, warm_start=warm_start
    ):
        yield outcomes[seed]


def play_all(
    method: Method,
    task: Task,
    clients: Clients,
    *,
    servers: Mapping[int, Message | None],
    done: int,
    presence: Presence,
    judge: Judge,
    warm_start: bool = False,
    owed: bool = False,
) -> Iterator[dict[int, Outcome]]:
    """`play` for federations that differ in their seed only: they take each round together. `owed`: the figures of the
    round `done` never came."""
    everyone = list(range(task.clients))
    ids = torch.arange(task.clients)

    def evaluate(t: int) -> dict[int, Scores]:
        views = {
            seed: Ask(
                method.broadcast(server, t + 1), method.address(server, t + 1, ids), everyone, method.bank(server)
            )
            for seed, server in states.items()
        }
        return clients.evaluate_all(t, views, judge)

    started = [seed for seed, server in servers.items() if server is None]
    states = {s: method.begin(task, generator(s, "server")) if v is None else v for s, v in servers.items()}
    if warm_start and started:
        greetings = clients.greet_all(dict.fromkeys(started, everyone))
        for seed in started:
            greeted = torch.tensor(greetings[seed].clients)
            first = Round(0, generator(seed, "server", client=1), greeted)
            states[seed] = method.combine(task, states[seed], greetings[seed].message, first)
    if owed:
        evaluate(done)
    for t in range(done + 1, task.last + 1):
        drawn = {seed: presence.draw(seed, t, task.clients) for seed in states}
        asks = {seed: _ask(method, states[seed], t, asked, lost) for seed, (asked, lost) in drawn.items()}
        present = {seed: ask for seed, ask in asks.items() if ask.clients}
        replies = clients.train_all(t, present)
        outcomes = {}
        for seed, (_, lost) in drawn.items():
            reply = replies.get(seed, Replies([], {}, {}))
            if _sound(reply) and reply.clients:
                info = Round(t, generator(seed, "server", t=t), torch.tensor(reply.clients))
                states[seed] = method.combine(task, states[seed], reply.message, info)
            failed = reply.failed | dict.fromkeys(lost, "left out on purpose (train.failures)")
            outcomes[seed] = _outcome(t, states[seed], asks[seed], reply, failed)
        if all(_sound(o) for o in outcomes.values()) and (
            t % judge.every == 0 or t in (task.rounds, task.last) or t in judge.snapshots
        ):
            scores = evaluate(t)
            outcomes = {s: replace(o, scores=scores.get(s), owed=s not in scores) for s, o in outcomes.items()}
        yield outcomes


def _ask(method: Method, server: Message, t: int, asked: Sequence[int], lost: Sequence[int]) -> Ask:
    present = [c for c in asked if c not in lost]
    return Ask(method.broadcast(server, t), method.address(server, t, torch.tensor(present, dtype=torch.long)), present)


def _sound(said: Replies | Outcome) -> bool:
    return all(bool(torch.isfinite(v).all()) for v in said.terms.values())


def _outcome(t: int, server: Message, ask: Ask, reply: Replies, failed: dict[int, str]) -> Outcome:
    each = cost(ask.down)
    sent = [i for i, client in enumerate(ask.clients) if client not in reply.absent]
    down = [each + cost(select(ask.own, torch.tensor(i))) for i in sent]
    up = [cost(select(reply.message, torch.tensor(i))) for i in range(len(reply.clients))]
    return Outcome(
        t, server, reply.clients, failed, reply.terms, up, down, reply.notes, reply.figures, reply.late,
        asked=[ask.clients[i] for i in sent],
    )  # fmt: skip
