"""A federation's clients in this process, trained together as one stack."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedsap import prototypes
from fedsap.evaluate import SNAPSHOT, Scores, evaluate
from fedsap.message import Message, PerClass, expand, select
from fedsap.methods.method import Local, State, Task
from fedsap.models import stack as stacked_weights
from fedsap.models.network import Weights
from fedsap.training.feed import Images
from fedsap.training.local import Stack, class_means, train
from fedsap.training.rounds import Judge, Replies
from fedsap.training.streams import generator


@dataclass
class Simulation:
    """The clients of one federation. Rows of the stack are clients in any order; messages are in the order of client
    ids.

    Rows are best sorted by number of batches, longest first: then the rows that still train are a slice of the stack.
    """

    stack: Stack
    test: Images
    task: Task
    chunk: int
    reset_momentum: bool = True
    state: State = field(default_factory=dict)
    momentum: dict[str, Weights] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._row = {key.client: row for row, key in enumerate(self.stack.keys)}
        self._device = self.stack.owned.device
        if not self.state:
            self.state = self.stack.method.join(self.task, {"model": self._initial()})
        trained = {name for phase in self.stack.method.phases() for name in phase.trains}
        buffers = self.stack.network.buffers
        for name in trained - set(self.momentum):
            some = self.state[name].items()
            self.momentum[name] = {k: torch.zeros_like(v) for k, v in some if k not in buffers}

    def _initial(self) -> Weights:
        """Initial weights: one draw for all clients, or one for each."""
        common = self.stack.method.start == "common"
        draws = [generator(k.seed, "weights", 0 if common else k.client) for k in self.stack.keys]
        network, dtype = self.stack.network, self.stack.look.dtype
        if common:
            one = network.init(draws[0])
            return {k: v.to(self._device, dtype).expand(len(draws), *v.shape).clone() for k, v in one.items()}
        return {k: v.to(self._device, dtype) for k, v in stacked_weights([network.init(g) for g in draws]).items()}

    def train(self, t: int, down: Message, own: Message, clients: Sequence[int]) -> Replies:
        """Round t of the given clients, which all receive `down` and each its row of `own`."""
        rows = sorted(self._row[c] for c in clients)
        here = [self.stack.keys[r].client for r in rows]
        order = torch.tensor([here.index(c) for c in clients], device=self._device)  # reply i is row order[i]
        back = torch.argsort(order)
        message = expand(down, len(rows)) | select(own, back)
        everyone = len(rows) == len(self.stack.keys)
        index = torch.tensor(rows, device=self._device)
        state = self.state if everyone else _take(self.state, index)
        momentum = self.momentum if everyone else _take(self.momentum, index)
        _adopt(state, self.stack.method.receive(state, message))
        if self.reset_momentum:
            for weights in momentum.values():
                torch._foreach_zero_(list(weights.values()))
        schedule = self.stack.method.schedule(t, self.task.rounds)
        trained = train(self.stack, rows, state, momentum, message, schedule, t)
        reply = self._reply(rows, state, message, t, trained.running)
        if not everyone:
            _put(self.state, state, index)
            _put(self.momentum, momentum, index)
        inverse = slice(None) if bool((order == torch.arange(len(order), device=self._device)).all()) else order
        return Replies(list(clients), select(reply, inverse), {k: v[order].cpu() for k, v in trained.terms.items()})

    def _reply(
        self, rows: Sequence[int], state: State, message: Message, t: int, running: dict[str, PerClass]
    ) -> Message:
        method = self.stack.method
        later = {n: when for n, when in method.passes().items() if n not in running}
        later = {n: "eval" if when == "running" else when for n, when in later.items()}  # nothing ran yet: a warm start
        measured = class_means(self.stack, rows, state["model"], later, t, self.chunk) if later else {}
        return method.reply(Local(state, message, running | measured, self._counts(rows)))

    def greet(self, clients: Sequence[int]) -> Replies:
        """What clients reply before any training."""
        rows = [self._row[c] for c in clients]
        index = torch.tensor(rows, device=self._device)
        return Replies(list(clients), self._reply(rows, _take(self.state, index), {}, 0, {}), {})

    def evaluate(self, t: int, down: Message, own: Message, bank: PerClass | None, judge: Judge) -> Scores:
        """Every client after it has received what the server would send it next; nothing is kept of that."""
        clients = [key.client for key in self.stack.keys]
        order = torch.tensor(clients, device=self._device)
        message = expand(down, len(clients)) | select(own, order)
        state = self.stack.method.receive(self.state, message)
        rows = range(len(clients))
        shared = bank
        if bank is None:
            wanted = self.stack.method.embedding
            local = class_means(self.stack, rows, self.stack.method.model(state), {wanted: "eval"}, t, self.chunk)
            bank = prototypes.combine(local[wanted])
        everywhere = expand({"bank": bank}, len(clients))["bank"]
        assert isinstance(everywhere, PerClass)
        found = evaluate(
            self.stack,
            self.test,
            rows,
            state,
            everywhere,
            chunk=self.chunk,
            classes=judge.proto_classes,
            sample=judge.silhouette,
            keep=SNAPSHOT if t in judge.snapshots else 0,
        )
        kept = found.kept and replace(found.kept, client=order[found.kept.client], bank=shared)
        return Scores({k: v[torch.argsort(order).cpu()] for k, v in found.accuracy.items()}, found.silhouette, kept)

    def _counts(self, rows: Sequence[int]) -> Tensor:
        labels, classes = self.stack.train.labels, self.stack.classes
        lists = self.stack.train.lists
        return torch.stack([torch.bincount(labels[torch.from_numpy(lists[r])], minlength=classes) for r in rows])


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
