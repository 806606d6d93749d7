"""Steps of local training as CUDA graphs: recorded once for each shape, replayed without the host.

Whatever the method and the network compute in a step is recorded as it is: batch, augmentation, losses, gradients, SGD
and running class sums. What changes from step to step or from round to round (weights, the server's message, the
schedule, which batch it is) lies in tensors that stay where they are.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsap.message import Entry, Message, PerClass
from fedsap.methods.method import State
from fedsap.models import layers
from fedsap.models.network import Features, Weights
from fedsap.training.feed import Batch, Block
from fedsap.training.local import Stack, Sums, Work, advance

Key = tuple[object, ...]


@dataclass
class Recording:
    """A recorded step and the places it reads its batches from. Shapes as in `Block`, with room for more steps."""

    samples: Tensor
    draws: dict[str, Tensor]
    noise: dict[str, Tensor]
    pool: dict[str, Tensor]
    step: Tensor  # [1] which batch comes next
    graph: torch.cuda.CUDAGraph | None = None

    @classmethod
    def like(cls, block: Block, steps: int) -> "Recording":
        def room(value: Tensor) -> Tensor:
            return value.new_zeros(value.shape[0], steps, *value.shape[2:])

        return cls(
            room(block.samples),
            {k: room(v) for k, v in block.draws.items()},
            {k: room(v) for k, v in block.noise.items()},
            {k: room(v) for k, v in block.pool.items()},
            torch.zeros(1, dtype=torch.long, device=block.samples.device),
        )

    def fill(self, block: Block) -> None:
        self.samples[:, : block.steps].copy_(block.samples)
        for name, value in block.draws.items():
            self.draws[name][:, : block.steps].copy_(value)
        for name, value in block.noise.items():
            self.noise[name][:, : block.steps].copy_(value)
        for name, value in block.pool.items():
            self.pool[name][:, : block.steps].copy_(value)
        self.step.zero_()

    def next(self) -> Batch:
        """The batch that `step` points at; `step` moves on, on the device."""

        def now(value: Tensor) -> Tensor:
            return value.index_select(1, self.step).squeeze(1)

        batch = Batch(
            now(self.samples),
            {k: now(v) for k, v in self.draws.items()},
            {k: now(v) for k, v in self.noise.items()},
            {k: now(v) for k, v in self.pool.items()},
        )
        self.step += 1
        return batch


class Graphs:
    """A `local.Recorder` for a CUDA device."""

    def __init__(self, stack: Stack, most_rows: int) -> None:
        self._stack, self._most = stack, most_rows
        self._longest = max((len(one) for one in stack.train.lists), default=0) // stack.hyper.batch
        self._state: State = {}
        self._momentum: dict[str, Weights] = {}
        self._down: Message = {}
        self._owned = torch.zeros_like(stack.owned[:most_rows])
        self._weight: dict[str, Tensor] = {}
        self._totals: dict[tuple[int, str], Tensor] = {}
        self._running = Sums(most_rows, stack.classes)
        self._recordings: dict[Key, Recording] = {}
        self._stream = torch.cuda.Stream(stack.owned.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._records = True
        self._prepared: set[int] = set()
        self._rows = 0

    @property
    def recordings(self) -> int:
        """How many shapes of a step are recorded."""
        return sum(one.graph is not None for one in self._recordings.values())

    def load(
        self, state: State, momentum: Mapping[str, Weights], down: Message, owned: Tensor, schedule: Mapping[str, float]
    ) -> Work:
        """The work of a round, in the places that the recordings know."""
        self._rows = len(owned)
        self._take(self._state, state)
        self._take(self._momentum, momentum)
        for name, entry in down.items():
            self._down[name] = self._placed(self._down.get(name), entry)
        self._owned[: self._rows].copy_(owned)
        for name, value in schedule.items():
            if name not in self._weight:
                self._weight[name] = torch.zeros((), dtype=self._stack.look.dtype, device=owned.device)
            self._weight[name].fill_(value)
        for kept in (self._totals, self._running.sums, self._running.counts):
            for total in kept.values():
                total.zero_()
        return self._work(list(down))

    def _work(self, sent: Sequence[str]) -> Work:
        return Work(
            self._state, self._momentum, {n: self._down[n] for n in sent}, self._owned, self._weight,
            self._totals, self._running,
        )  # fmt: skip

    def store(self, state: State, momentum: Mapping[str, Weights]) -> None:
        """Copies the weights back to where the clients keep them."""
        for kept, own in ((self._state, state), (self._momentum, momentum)):
            for name, weights in own.items():
                for key, value in weights.items():
                    value.copy_(kept[name][key][: self._rows])

    def play(self, work: Work, phase: int, block: Block, collect: Sequence[str]) -> None:
        """All steps of a block; a shape that is new is recorded on the way."""
        assert isinstance(block.rows, slice)
        shapes = (block.samples.shape[2], *sorted(block.draws), *sorted(block.pool), *sorted(work.down), *collect)
        key: Key = (phase, block.rows.stop, *shapes)
        recording = self._recordings.get(key)
        if recording is None or recording.samples.shape[1] < block.steps:
            recording = Recording.like(block, max(block.steps, self._longest))
            self._recordings[key] = recording
        recording.fill(block)
        done = 0
        if recording.graph is None:
            self._prepare(block.rows, block.samples.shape[2])
            # The first step runs as it is: it fills caches, compiles kernels and brings in the names of the loss terms.
            advance(self._stack, work, phase, block.rows, recording.next(), collect)
            done = 1
            if self._records and block.steps > 1:
                recording.graph = self._record(work, phase, block.rows, recording, collect)
        for _ in range(done, block.steps):
            if recording.graph is None:
                advance(self._stack, work, phase, block.rows, recording.next(), collect)
            else:
                recording.graph.replay()

    def _prepare(self, rows: slice, batch: int) -> None:
        """Compiles the kernels of a step of this shape, and of an evaluation, all at once: one by one takes long."""
        stack = self._stack
        if rows.stop in self._prepared or not layers.has_kernels(stack.owned.device, stack.look.dtype):
            return
        self._prepared.add(rows.stop)
        fixed = {k: self._state["model"][k][rows].clone() for k in stack.network.buffers}
        trained = {
            k: v[rows].detach().requires_grad_()
            for k, v in self._state["model"].items()
            if k not in stack.network.buffers
        }

        def look(size: int, train: bool) -> Features:
            images = stack.train.images.new_zeros(rows.stop, size, *stack.train.images.shape[1:])
            noise = {k: images.new_zeros(*images.shape[:2], *s).float() for k, s in stack.network.noise.items()}
            return stack.network(trained | fixed, stack.look(images), train=train, noise=noise)

        def work() -> None:
            with torch.enable_grad():
                out = look(batch, train=True)
                torch.autograd.grad(out.logits.sum() + out.h.sum(), list(trained.values()), allow_unused=True)
            look(64, train=False)

        layers.compile_all(work)

    def _record(
        self, work: Work, phase: int, rows: slice, recording: Recording, collect: Sequence[str]
    ) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    advance(self._stack, work, phase, rows, recording.next(), collect)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self._records = False
            name = type(self._stack.method).__name__
            reason = str(error).partition("\n")[0]
            warnings.warn(f"a step of {name} cannot be recorded and runs slower: {reason}", stacklevel=2)
            torch.cuda.synchronize()
            return None
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def _take(self, kept: dict[str, Weights], given: Mapping[str, Weights]) -> None:
        for name, weights in given.items():
            places = kept.setdefault(name, {})
            for key, value in weights.items():
                if key not in places:
                    places[key] = value.new_zeros(self._most, *value.shape[1:])
                places[key][: self._rows].copy_(value)

    def _placed(self, kept: Entry | None, given: Entry) -> Entry:
        if isinstance(given, PerClass):
            assert kept is None or isinstance(kept, PerClass)
            values, mask = (None, None) if kept is None else (kept.values, kept.mask)
            return PerClass(self._put(values, given.values), self._put(mask, given.mask))
        assert not isinstance(kept, PerClass)
        return self._put(kept, given)

    def _put(self, place: Tensor | None, value: Tensor) -> Tensor:
        """Copies rows to their place; what is the same for all rows takes the room of one."""
        same = value.stride(0) == 0
        if place is None or place.shape[1:] != value.shape[1:] or (place.stride(0) == 0) != same:
            if place is not None:  # the recordings know the old one
                self._recordings.clear()
                self._pool = torch.cuda.graph_pool_handle()
            one = value.new_zeros(1 if same else self._most, *value.shape[1:])
            place = one.expand(self._most, *value.shape[1:]) if same else one
        (place[:1] if same else place[: self._rows]).copy_(value[:1] if same else value)
        return place
