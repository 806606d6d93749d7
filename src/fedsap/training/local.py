"""Local training of a stack of clients: batches, gradients and SGD for all of them at once."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from fedsap.message import Message, PerClass, select
from fedsap.methods.method import Method, Phase, State, Step, Unlabelled, View, When
from fedsap.models import layers
from fedsap.models.network import Features, Network, Weights
from fedsap.privacy import Privacy, clipped
from fedsap.prototypes import class_sums, means
from fedsap.training.feed import Batch, Block, Fed, Images, Key, Look, Pool, Rows, epoch


@dataclass(frozen=True)
class Hyper:
    """How a client trains."""

    batch: int = 8
    lr: float = 0.01
    momentum: float = 0.5
    weight_decay: float = 0.0
    epochs: int = 1
    drop_last: bool = True
    precision: layers.Precision = "fp32"


@dataclass
class Sums:
    """Class sums of some vectors, growing batch by batch. sums: [Q, C, d] by name, counts: [Q, C] by name."""

    clients: int
    classes: int
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)

    def add(self, rows: Rows, vectors: Mapping[str, Tensor], y: Tensor, valid: Tensor | None = None) -> None:
        for name, value in vectors.items():
            some, count = class_sums(value.detach(), y, self.classes, valid)
            if name not in self.sums:
                self.sums[name] = some.new_zeros(self.clients, *some.shape[1:])
                self.counts[name] = count.new_zeros(self.clients, self.classes)
            self.sums[name][rows] += some
            self.counts[name][rows] += count

    def means(self) -> dict[str, PerClass]:
        return {name: means(self.sums[name], self.counts[name]) for name in self.sums}


@dataclass(frozen=True)
class Stack:
    """Q clients on one device. Everything with a client axis has it in this order."""

    network: Network
    method: Method
    train: Images
    keys: tuple[Key, ...]
    owned: Tensor  # bool [Q, C]
    look: Look
    hyper: Hyper
    pool: Pool | None = None
    privacy: Privacy | None = None

    @property
    def classes(self) -> int:
        return self.owned.shape[1]

    def live(self, weights: Weights) -> Weights:
        """Views of the weights without those that no pixel reaches, if these are weights of the network."""
        return self.network.live(weights) if self.network.head_names[0] in weights else weights


@dataclass(frozen=True)
class Trained:
    """What local training leaves beside the weights, which it changes in place."""

    running: dict[str, PerClass]  # class means taken along with the last epoch
    terms: dict[str, Tensor]  # [R] mean of each loss term over the steps of the phases that have it


@dataclass(frozen=True)
class Work:
    """All that local training of R clients reads and changes, on the device."""

    state: State  # without the weights that never meet data
    momentum: Mapping[str, Weights]
    down: Message
    owned: Tensor
    weight: Mapping[str, Tensor]  # the schedule of the round, tensors without axes
    totals: dict[tuple[int, str], Tensor]  # [R] sums of each phase's loss terms; a term enters with its first step
    running: Sums


class Recorder(Protocol):
    """Keeps a `Work` in one place and plays blocks of steps on it faster than one operation after another."""

    def load(
        self, state: State, momentum: Mapping[str, Weights], down: Message, owned: Tensor, schedule: Mapping[str, float]
    ) -> Work: ...

    def play(self, work: Work, phase: int, block: Block, collect: Sequence[str]) -> None: ...

    def store(self, state: State, momentum: Mapping[str, Weights]) -> None: ...


def train(
    stack: Stack,
    rows: Sequence[int],
    state: State,
    momentum: Mapping[str, Weights],
    down: Message,
    schedule: Mapping[str, float],
    t: int,
    recorder: Recorder | None = None,
    fed: Sequence[Fed] = (),
) -> Trained:
    """One round of local training of the clients `rows`; `state`, `momentum` and `down` hold these R clients, in order.
    So does `fed`, in rounds with unlabelled samples.

    `state` and `momentum` change in place. The host is not waited for from the first batch to the last.
    """
    device = stack.train.images.device
    if not stack.hyper.weight_decay:  # with it, weights that never meet data shrink all the same
        state = {n: stack.live(w) for n, w in state.items()}
        momentum = {n: stack.live(w) for n, w in momentum.items()}
    owned = stack.owned[torch.as_tensor(rows, device=device)]
    if recorder is None:
        weight = {k: torch.tensor(v, dtype=stack.look.dtype, device=device) for k, v in schedule.items()}
        work = Work(state, momentum, down, owned, weight, {}, Sums(len(rows), stack.classes))
    else:
        work = recorder.load(state, momentum, down, owned, schedule)
    names = [name for name, when in stack.method.passes().items() if when == "running"]
    phases = stack.method.phases()
    steps = torch.zeros(len(phases), len(rows), device=device)
    epochs_of: Counter[tuple[str, ...]] = Counter()  # batches are numbered by what they train: a second, personal
    # model meets the same ones as the first
    with layers.precision(stack.hyper.precision):
        for which, phase in enumerate(phases):
            if phase.pool and not fed:
                continue
            epochs = stack.hyper.epochs if phase.epochs is None else phase.epochs
            for e in range(epochs):
                collect = names if which == len(phases) - 1 and e == epochs - 1 else []
                for block in plan(stack, rows, t, epochs_of[phase.trains], fed):
                    if recorder is not None and isinstance(block.rows, slice):
                        recorder.play(work, which, block, collect)
                    else:
                        for s in range(block.steps):
                            advance(stack, work, which, block.rows, block.batch(s), collect)
                    steps[which, block.rows] += block.steps
                epochs_of[phase.trains] += 1
    if recorder is not None:
        recorder.store(state, momentum)
    means = {k: PerClass(v.values[: len(rows)], v.mask[: len(rows)]) for k, v in work.running.means().items()}
    terms = {}
    for name in dict.fromkeys(name for _, name in work.totals):
        of = [which for which in range(len(phases)) if (which, name) in work.totals]
        total = [work.totals[which, name][: len(rows)] for which in of]
        terms[name] = sum(total[1:], total[0]) / steps[of].sum(0).clamp(min=1)
    return Trained(means, terms)


def plan(stack: Stack, rows: Sequence[int], t: int, number: int, fed: Sequence[Fed] = ()) -> list[Block]:
    """The batches of one epoch of training."""
    return epoch(
        stack.train,
        rows,
        stack.keys,
        t,
        number,
        batch=stack.hyper.batch,
        drop_last=stack.hyper.drop_last,
        look=stack.look,
        noise=stack.network.noise,
        pool=stack.pool if fed else None,
        fed=fed,
        draw=stack.method.draw,
    )


class Slice:
    """Some rows of a state and its momentum: views where the rows are a slice, copies that are written back where
    not."""

    def __init__(self, state: State, momentum: Mapping[str, Weights], rows: Rows) -> None:
        self._whole, self._rows = (state, momentum), rows
        self.state = {n: {k: v[rows] for k, v in w.items()} for n, w in state.items()}
        self.momentum = {n: {k: v[rows] for k, v in w.items()} for n, w in momentum.items()}

    def __enter__(self) -> "Slice":
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._rows, slice):
            return
        for whole, part in zip(self._whole, (self.state, self.momentum), strict=True):
            for name, weights in whole.items():
                for k, v in weights.items():
                    v[self._rows] = part[name][k]


def moving(network: Network, phase: Phase, weights: Weights) -> list[str]:
    """The names that a phase trains."""
    names = [k for k in weights if k not in network.buffers]
    if phase.part == "all":
        return names
    return [k for k in names if (k in network.head_names) == (phase.part == "head")]


def advance(stack: Stack, work: Work, phase: int, rows: Rows, batch: Batch, collect: Sequence[str]) -> None:
    """Forward, loss, gradient and SGD on one batch of each of the rows; each client's gradient is of its own loss only.

    `collect` names what the method represents that goes into the running class sums.
    """
    with Slice(work.state, work.momentum, rows) as part:
        terms, step = _step(stack, stack.method.phases()[phase], part, work, rows, batch)
        vectors = stack.method.represent(step.out) if collect else {}
    for name, value in terms.items():
        if (phase, name) not in work.totals:
            work.totals[phase, name] = value.new_zeros(len(work.owned))
        work.totals[phase, name][rows] += value
    if collect:
        work.running.add(rows, {n: vectors[n] for n in collect}, step.y)


def _step(
    stack: Stack, phase: Phase, at: Slice, work: Work, rows: Rows, batch: Batch
) -> tuple[dict[str, Tensor], Step]:
    with torch.enable_grad():
        step, which = pose(stack, phase, at.state, select(work.down, rows), work.owned[rows], work.weight, batch)
        terms, leaves = phase.loss(step), [step.state[n][k] for n, k in which]
        grads = torch.autograd.grad(torch.stack(list(terms.values())).sum(), leaves, materialize_grads=True)
    values, moments = [at.state[n][k] for n, k in which], [at.momentum[n][k] for n, k in which]
    _descend(values, list(grads), moments, stack.hyper.lr if phase.lr is None else phase.lr, stack.hyper)
    return {k: v.detach() for k, v in terms.items()}, step


def pose(
    stack: Stack, phase: Phase, state: State, down: Message, owned: Tensor, weight: Mapping[str, Tensor], batch: Batch
) -> tuple[Step, list[tuple[str, str]]]:
    """A batch, and the weights that the phase trains, by set and name: leaves of the graph of its forward pass."""
    which = [(n, k) for n in phase.trains for k in moving(stack.network, phase, state[n])]
    posed = {n: dict(w) for n, w in state.items()}
    for n, k in which:
        posed[n][k] = state[n][k].detach().requires_grad_()

    @cache
    def labelled() -> View:
        x = stack.look(stack.train.images[batch.samples], batch.draws)
        return View(x, {k: v.to(x) for k, v in batch.noise.items()})

    def forward(weights: Weights, view: View | None = None, *, train: bool = True) -> Features:
        view = labelled() if view is None else view
        return stack.network(weights, view.x, train=train, noise=view.noise)

    y, pool = stack.train.labels[batch.samples], _unlabelled(stack, batch.pool)
    return Step(y, down, owned, weight, posed, forward, stack.live, pool, phase.trains[0]), which


def _unlabelled(stack: Stack, beside: Mapping[str, Tensor]) -> Unlabelled | None:
    """What of the pool goes with a batch, as `feed` names it."""
    pool = stack.pool
    if pool is None or not beside:
        return None

    def under(kind: str) -> dict[str, Tensor]:
        return {k.removeprefix(kind): v for k, v in beside.items() if k.startswith(kind)}

    def view(name: str, look: Look) -> View:
        x = look(pool.images[beside["samples"]], under(f"{name} draw "))
        return View(x, {k: v.to(x) for k, v in under(f"{name} noise ").items()})

    weak, strong = (partial(view, name, look) for name, look in (("weak", pool.weak), ("strong", pool.strong)))
    drawn = {k: v.to(stack.look.dtype) for k, v in under("drawn ").items()}
    return Unlabelled(beside["labels"], beside["valid"], weak, strong, _unlabelled(stack, under("other ")), drawn)


LARGE = 2**16  # from this size on a tensor is worth a pass of its own


@torch.no_grad()
def _descend(values: list[Tensor], grads: list[Tensor], moments: list[Tensor], lr: float, hyper: Hyper) -> None:
    """m <- momentum m + g + decay w;  w <- w - lr m, as torch.optim.SGD has it."""
    small = list(range(len(values)))
    if layers.has_kernels(values[0].device, values[0].dtype):
        large = [i for i in small if values[i].numel() >= LARGE and values[i].is_contiguous()]
        for i in large:
            layers.descend(values[i], grads[i].contiguous(), moments[i], lr, hyper.momentum, hyper.weight_decay)
        small = [i for i in small if i not in large]
        values, grads, moments = ([some[i] for i in small] for some in (values, grads, moments))
        if not values:
            return
    if hyper.weight_decay:
        grads = list(torch._foreach_add(grads, values, alpha=hyper.weight_decay))
    torch._foreach_mul_(moments, hyper.momentum)
    torch._foreach_add_(moments, grads)
    torch._foreach_add_(values, moments, alpha=-lr)


@torch.no_grad()
def class_means(
    stack: Stack,
    rows: Sequence[int],
    weights: Weights,
    wanted: Mapping[str, When],
    t: int,
    chunk: int,
    clip: float | None = None,
) -> dict[str, PerClass]:
    """Class means of what the method represents, over all local samples, for the clients `rows` and their weights.

    `train`: layers in training mode on augmented batches of the training size; running statistics are left alone.
    Otherwise: layers in evaluation mode, images as they are; with `clip`, no vector is longer than that.
    """
    sums = Sums(len(rows), stack.classes)
    with layers.precision(stack.hyper.precision):
        _add_means(stack, rows, weights, wanted, t, chunk, sums, clip)
    return sums.means()


def _add_means(
    stack: Stack,
    rows: Sequence[int],
    weights: Weights,
    wanted: Mapping[str, When],
    t: int,
    chunk: int,
    sums: Sums,
    clip: float | None,
) -> None:
    still = [n for n, when in wanted.items() if when != "train"]
    if still:
        for part, samples, valid in stack.train.chunks(rows, chunk):
            x, y = stack.look(stack.train.images[samples]), stack.train.labels[samples]
            vectors = stack.method.represent(stack.network({k: v[part] for k, v in weights.items()}, x))
            some = {n: vectors[n] if clip is None else clipped(vectors[n], clip) for n in still}
            sums.add(part, some, y, valid)
    moved = [n for n, when in wanted.items() if when == "train"]
    if moved:
        scratch = {k: v.clone() if k in stack.network.buffers else v for k, v in weights.items()}
        for block in epoch(
            stack.train,
            rows,
            stack.keys,
            t,
            0,
            batch=stack.hyper.batch,
            drop_last=False,
            look=stack.look,
            noise=stack.network.noise,
            purpose="passes",
        ):
            part_weights = {k: v[block.rows] for k, v in scratch.items()}
            for s in range(block.steps):
                batch = block.batch(s)
                x = stack.look(stack.train.images[batch.samples], batch.draws)
                noise = {k: v.to(x) for k, v in batch.noise.items()}
                vectors = stack.method.represent(stack.network(part_weights, x, train=True, noise=noise))
                sums.add(block.rows, {n: vectors[n] for n in moved}, stack.train.labels[batch.samples])
