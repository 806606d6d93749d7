"""A federation's clients in this process, trained together as one stack."""

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedsap import memory, prototypes
from fedsap.evaluate import SNAPSHOT, Scores, evaluate
from fedsap.message import Message, PerClass, expand, joined, moved, select, table
from fedsap.methods.method import Choice, Local, State, Task, When
from fedsap.models.network import Weights
from fedsap.privacy import released
from fedsap.training import pool as unlabelled
from fedsap.training.feed import Images, Key, Pool
from fedsap.training.gradients import gradient_norms
from fedsap.training.local import Stack, class_means, train
from fedsap.training.record import Graphs
from fedsap.training.rounds import Ask, Judge, Replies
from fedsap.training.streams import generator

CLIENTS = "clients"  # in `Simulation.kept`: the client of each row


@dataclass
class Simulation:
    """The clients of one federation, or of several with different seeds. Rows of the stack are clients in any order;
    messages are in the order of client ids.

    Rows are best sorted by number of batches, longest first: then the rows that still train are a slice of the stack.
    `together` rows train at once; 0: as many as the device has memory for.
    """

    stack: Stack
    test: Images
    task: Task
    chunk: int = 0  # images of each client at once in evaluation; 0: as many as there is memory for
    reset_momentum: bool = True
    together: int = 0
    state: State = field(default_factory=dict)
    momentum: dict[str, Weights] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)  # seconds by what they went into

    def __post_init__(self) -> None:
        self._row = {key: row for row, key in enumerate(self.stack.keys)}
        self._device = self.stack.owned.device
        if not self.state:
            self.state = self._initial()
        trained = {name for phase in self.stack.method.phases() for name in phase.trains}
        buffers = self.stack.network.buffers
        for name in trained - set(self.momentum):
            some = self.state[name].items()
            self.momentum[name] = {k: torch.zeros_like(v) for k, v in some if k not in buffers}
        rows = len(self.stack.keys)
        self._few = rows if self._device.type == "cuda" else min(rows, memory.SOME)
        self._chunk = self.chunk or memory.images_at_once(self.stack, self.state, self._few)
        self.chunk = self.chunk or memory.images_at_once(self.stack, self.state, rows)
        self._together = min(rows, self.together or memory.rows_at_once(self.stack, self.state, trained))
        self.recorder = Graphs(self.stack, self._together) if self._device.type == "cuda" else None

    def rows_of(self, seed: int) -> Tensor:
        """Where the clients of a federation stand in the stack."""
        return torch.tensor([r for r, key in enumerate(self.stack.keys) if key.seed == seed], device=self._device)

    def _initial(self) -> State:
        """What clients begin with: one draw for all clients of a federation, or one for each."""
        method, rows = self.stack.method, len(self.stack.keys)
        common = method.start == "common"
        state: State = {}
        made: dict[int, State] = {}
        for row, key in enumerate(self.stack.keys):
            if key.seed not in made or not common:
                made[key.seed] = method.init(self.task, generator(key.seed, "weights", 0 if common else key.client))
            for name, weights in made[key.seed].items():
                places = state.setdefault(name, {})
                for k, v in weights.items():
                    if k not in places:
                        places[k] = torch.empty(rows, *v.shape, device=self._device, dtype=self.stack.look.dtype)
                    places[k][row] = v.to(self._device)
        return state

    def train(self, t: int, down: Message, own: Message, clients: Sequence[int]) -> Replies:
        """`train_all` where all clients are of one federation."""
        seed = self.stack.keys[0].seed
        return self.train_all(t, {seed: Ask(down, own, clients)})[seed]

    def train_all(self, t: int, asks: Mapping[int, Ask]) -> dict[int, Replies]:
        """Round t of the clients that are asked, by the seed of their federation."""
        if not asks:
            return {}
        rows = sorted(self._row[Key(seed, c)] for seed, ask in asks.items() for c in ask.clients)
        message = self._message(asks, rows)
        everyone = len(rows) == len(self.stack.keys)
        index = torch.tensor(rows, device=self._device)
        state = self.state if everyone else _take(self.state, index)
        momentum = self.momentum if everyone else _take(self.momentum, index)
        _adopt(state, self.stack.method.receive(state, message))
        if self.reset_momentum:
            torch._foreach_zero_([v for weights in momentum.values() for v in weights.values()])
        schedule = self.stack.method.schedule(t, self.task.rounds)
        began = time.perf_counter()
        early = {n: when for n, when in self.stack.method.passes().items() if when == "before"}
        means = self._means(rows, state, early, t)
        began = self._note("prototypes", began)
        pool, choice = self._pool(t), None
        if pool is not None:
            choice = unlabelled.choose(self.stack, pool, rows, state, message, t, self.chunk)
            _adopt(state, choice.state)
            began = self._note("pseudo-labels", began)
        fed = [] if pool is None or choice is None else unlabelled.feed(pool, rows, choice)
        parts = []
        for start in range(0, len(rows), self._together):
            some = slice(start, start + self._together)
            parts.append(
                train(
                    self.stack, rows[some], _cut(state, some), _cut(momentum, some), select(message, some), schedule, t,
                    self.recorder, fed[some],
                )
            )  # fmt: skip
        running = joined([p.running for p in parts])
        means |= {k: table(running, k) for k in running}
        terms = {k: torch.cat([p.terms[k] for p in parts]).cpu() for k in parts[0].terms}
        began = self._note("training", began)
        reply = self._reply(rows, state, message, t, means, choice)
        self._note("prototypes", began)
        if not everyone:
            _put(self.state, state, index)
            _put(self.momentum, momentum, index)
        shown = {} if pool is None or choice is None else unlabelled.figures(self.stack, pool, rows, choice)
        replies = {}
        for seed, ask in asks.items():
            at = torch.tensor([bisect_left(rows, self._row[Key(seed, c)]) for c in ask.clients])
            mine = slice(None) if torch.equal(at, torch.arange(len(rows))) else at
            message = select(reply, mine if isinstance(mine, slice) else mine.to(self._device))
            own, figures = ({k: v[mine] for k, v in some.items()} for some in (terms, shown))
            replies[seed] = Replies(list(ask.clients), message, own, figures)
        return replies

    def _pool(self, t: int) -> Pool | None:
        """The unlabelled samples, in rounds in which the method uses them."""
        pool = self.stack.pool
        return pool if pool is not None and self.stack.method.uses_pool and t in pool.rounds else None

    def _message(self, asks: Mapping[int, Ask], rows: Sequence[int]) -> Message:
        """What the clients of `rows` are sent, in this order."""
        parts, places = [], []
        for seed, ask in asks.items():
            down, own = moved(ask.down, self._device), moved(ask.own, self._device)
            parts.append((down, own, len(ask.clients)))
            places += [bisect_left(rows, self._row[Key(seed, c)]) for c in ask.clients]
        back = torch.argsort(torch.tensor(places)).to(self._device)
        if len(parts) == 1:  # what all are told stays a view
            down, own, clients = parts[0]
            return expand(down, clients) | select(own, back)
        return select(joined([expand(down, clients) | own for down, own, clients in parts]), back)

    def _reply(
        self,
        rows: Sequence[int],
        state: State,
        message: Message,
        t: int,
        taken: dict[str, PerClass],
        choice: Choice | None = None,
    ) -> Message:
        """`taken` are the class means that are there already, from before and during training."""
        method = self.stack.method
        later = {n: when for n, when in method.passes().items() if n not in taken}
        means, counts = taken | self._means(rows, state, later, t), self._counts(rows)
        if self.stack.privacy is not None:
            keys = [self.stack.keys[r] for r in rows]
            means, state = released(means, counts, self.stack.privacy, keys, t), {}
        local = Local(self.task, state, message, means, counts)
        wanted, pool = method.pool_passes(), self._pool(t)
        if choice is not None and pool is not None and wanted:
            found = unlabelled.measured(self.stack, pool, rows, state["model"], choice, wanted, t, self.chunk)
            local = replace(local, pool_means=found[0], pool_counts=found[1])
        return method.reply(local)

    def _means(self, rows: Sequence[int], state: State, wanted: Mapping[str, When], t: int) -> dict[str, PerClass]:
        if not wanted:
            return {}
        clip = None if self.stack.privacy is None else self.stack.privacy.clip
        parts: list[Message] = []
        for start in range(0, len(rows), self._few):
            some = slice(start, start + self._few)
            weights = {k: v[some] for k, v in state["model"].items()}
            parts.append({**class_means(self.stack, rows[some], weights, wanted, t, self._chunk, clip)})
        found = joined(parts)
        return {name: table(found, name) for name in found}

    def greet_all(self, clients: Mapping[int, Sequence[int]]) -> dict[int, Replies]:
        """What clients reply before any training, by the seed of their federation."""
        replies = {}
        for seed, some in clients.items():
            rows = [self._row[Key(seed, c)] for c in some]
            index = torch.tensor(rows, device=self._device)
            replies[seed] = Replies(list(some), self._reply(rows, _take(self.state, index), {}, 0, {}), {})
        return replies

    def evaluate_all(self, t: int, asks: Mapping[int, Ask], judge: Judge) -> dict[int, Scores]:
        """Every client after it has received what the server would send it next; nothing is kept of that."""
        method = self.stack.method
        began = time.perf_counter()
        rows = range(len(self.stack.keys))
        state = method.receive(self.state, self._message(asks, rows))
        measured: PerClass | None = None
        if any(ask.bank is None for ask in asks.values()):
            wanted = method.embedding
            measured = class_means(self.stack, rows, method.model(state), {wanted: "eval"}, t, self.chunk)[wanted]
        banks = {}
        for seed, ask in asks.items():
            own = self.rows_of(seed)
            banks[seed] = ask.bank
            if measured is not None and ask.bank is None:
                banks[seed] = prototypes.combine(PerClass(measured.values[own], measured.mask[own]))
        per_row = [banks[key.seed] for key in self.stack.keys]
        found = evaluate(
            self.stack,
            self.test,
            state,
            PerClass(
                torch.stack([b.values.to(self._device) for b in per_row if b is not None]),
                torch.stack([b.mask.to(self._device) for b in per_row if b is not None]),
            ),
            chunk=self.chunk,
            classes=judge.proto_classes,
            sample=judge.silhouette,
            keep=SNAPSHOT if t in judge.snapshots else 0,
            statistics=judge.batch_statistics,
            distances=judge.gradients,
        )
        norms = self._gradients(t + 1, state, self._message(asks, rows)) if judge.gradients else {}
        self._note("evaluation", began)
        return {seed: self._in_order(seed, one, asks[seed].bank, norms) for seed, one in found.items()}

    def _gradients(self, t: int, state: State, message: Message) -> dict[str, Tensor]:
        """Norms of the terms' gradients as round t would begin."""
        schedule = self.stack.method.schedule(t, self.task.rounds)
        parts = []
        for start in range(0, len(self.stack.keys), self._together):
            some = range(len(self.stack.keys))[start : start + self._together]
            own = slice(some.start, some.stop)
            parts.append(gradient_norms(self.stack, some, _cut(state, own), select(message, own), schedule, t))
        return {f"gradient {k}": torch.cat([p[k] for p in parts]).cpu() for k in parts[0]}

    def kept(self, seed: int) -> dict[str, Tensor]:
        """The state of a federation's clients, in the order of their rows, and who they are."""
        rows = self.rows_of(seed)
        sets = [(f"{kind}/{name}", weights) for kind, some in self._held().items() for name, weights in some.items()]
        found = {f"{prefix}/{k}": v[rows] for prefix, weights in sets for k, v in weights.items()}
        return found | {CLIENTS: self._clients(seed)}

    def _clients(self, seed: int) -> Tensor:
        return torch.tensor([key.client for key in self.stack.keys if key.seed == seed])

    def take_back(self, seed: int, name: str, value: Tensor) -> None:
        """Puts one of the tensors of `kept` where it belongs."""
        if name == CLIENTS:
            if not torch.equal(value, self._clients(seed)):
                raise ValueError("its clients are in another order")
            return
        kind, which, weight = name.split("/", 2)
        place, rows = self._held()[kind][which][weight], self.rows_of(seed)
        if value.shape != place[rows].shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}")
        place[rows] = value.to(place)

    def _held(self) -> dict[str, dict[str, Weights]]:
        return {"state": self.state} if self.reset_momentum else {"state": self.state, "momentum": self.momentum}

    def _note(self, what: str, began: float) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.spent[what] = self.spent.get(what, 0.0) + now - began
        return now

    def _in_order(self, seed: int, found: Scores, bank: PerClass | None, norms: Mapping[str, Tensor]) -> Scores:
        """Scores of a federation in the order of its clients' ids, not of the stack's rows."""
        clients = self._clients(seed)
        kept = found.kept and replace(found.kept, client=clients.to(self._device)[found.kept.client], bank=bank)
        back = torch.argsort(clients)
        noted = found.noted | {k: v[self.rows_of(seed).cpu()] for k, v in norms.items()}
        accuracy, noted = ({k: v[back] for k, v in some.items()} for some in (found.accuracy, noted))
        return Scores(accuracy, found.silhouette, kept, noted)

    def _counts(self, rows: Sequence[int]) -> Tensor:
        labels, classes = self.stack.train.labels, self.stack.classes
        lists = self.stack.train.lists
        return torch.stack([torch.bincount(labels[torch.from_numpy(lists[r])], minlength=classes) for r in rows])


def _cut(sets: Mapping[str, Weights], rows: slice) -> dict[str, Weights]:
    return {name: {k: v[rows] for k, v in weights.items()} for name, weights in sets.items()}


def _take(state: Mapping[str, Weights], rows: Tensor) -> dict[str, Weights]:
    return {name: {k: v[rows] for k, v in weights.items()} for name, weights in state.items()}


def _put(state: Mapping[str, Weights], some: Mapping[str, Weights], rows: Tensor) -> None:
    for name, weights in state.items():
        for k, v in weights.items():
            v[rows] = some[name][k]


def _adopt(state: State, new: State) -> None:
    """Copies what `new` says into the tensors of `state`; a value may be a view of another one's old content."""
    pairs = [(state[n][k], v) for n, w in new.items() for k, v in w.items() if v is not state[n][k]]
    written = {old.untyped_storage().data_ptr() for old, _ in pairs}
    sources = [v.clone() if v.untyped_storage().data_ptr() in written else v for _, v in pairs]
    for (old, _), source in zip(pairs, sources, strict=True):
        old.copy_(source)
