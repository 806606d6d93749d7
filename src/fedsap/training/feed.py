"""The stack's data on the device, and the order in which each client's samples are visited."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsap.data import Augment, Split, augment, strong
from fedsap.data.strong import Strong
from fedsap.training.streams import Purpose, numbers

Rows = slice | Tensor
Index = NDArray[np.int64]


@dataclass(frozen=True)
class Key:
    """Who a row of the stack is: a client of the federation of one seed."""

    seed: int
    client: int


@dataclass(frozen=True)
class Batch:
    """One batch of R rows. samples: [R, B] into the images. draws: [R, B] each. noise: [R, B, *] each. pool: what goes
    with it from the pool, [R, *] each, as `_beside` names it."""

    samples: Tensor
    draws: dict[str, Tensor]
    noise: dict[str, Tensor]
    pool: dict[str, Tensor]


@dataclass(frozen=True)
class Block:
    """Consecutive batches of one size for the same rows of the stack.

    rows: R of them. samples: [R, S, B] into the images. draws: [R, S, B] each. noise: [R, S, B, *] each. pool: [R, S,
    *] each; empty in rounds without unlabelled samples.
    """

    rows: Rows
    samples: Tensor
    draws: dict[str, Tensor]
    noise: dict[str, Tensor]
    pool: dict[str, Tensor]

    @property
    def steps(self) -> int:
        return self.samples.shape[1]

    def batch(self, step: int) -> Batch:
        return Batch(
            self.samples[:, step],
            {k: v[:, step] for k, v in self.draws.items()},
            {k: v[:, step] for k, v in self.noise.items()},
            {k: v[:, step] for k, v in self.pool.items()},
        )


@dataclass(frozen=True)
class Images:
    """Images of one split on the device; every row of the stack has its own list of them.

    images: uint8 [N, H, W, C], labels: [N], lists: one array of indices per row
    """

    images: Tensor
    labels: Tensor
    lists: tuple[Index, ...]

    @classmethod
    def of(cls, split: Split, lists: Sequence[Index], device: torch.device) -> "Images":
        """Keeps the images that some list names."""
        used, inverse = np.unique(np.concatenate(lists), return_inverse=True)
        ends = np.cumsum([len(one) for one in lists])[:-1]
        return cls(
            torch.from_numpy(split.images[used]).to(device),
            torch.from_numpy(split.labels[used].astype(np.int64)).to(device),
            tuple(np.split(inverse.astype(np.int64), ends)),
        )

    def chunks(self, rows: Sequence[int], size: int, fill: bool = False) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """All samples of the given rows in their order: (rows that still have some, samples [R, b], bool valid [R, b]).

        The slices count positions in `rows` and shrink best when the lists do not get longer along it. With `fill`
        every chunk has `size` samples: what a row lacks in its last one is made up of its first, which are not valid.
        """
        lengths = [len(self.lists[r]) for r in rows]
        for start in range(0, max(lengths, default=0), size):
            active = 1 + max(i for i, n in enumerate(lengths) if n > start)
            width = size if fill else min(size, max(lengths) - start)
            samples = np.zeros((active, width), np.int64)
            valid = np.zeros((active, width), bool)
            for i in range(active):
                part = self.lists[rows[i]][start : start + width]
                samples[i, : len(part)], valid[i, : len(part)] = part, True
                if fill and len(part) < width:
                    samples[i, len(part) :] = np.resize(self.lists[rows[i]], width - len(part))
            device = self.images.device
            yield slice(0, active), torch.from_numpy(samples).to(device), torch.from_numpy(valid).to(device)


@dataclass(frozen=True)
class Look:
    """How pixels become the network's input."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Augment
    pad: int
    dtype: torch.dtype = torch.float32
    background: int = 0
    strong: Strong | None = None  # what follows the augmentation in a strong view

    def draw(self, rng: np.random.Generator, n: int, size: tuple[int, int]) -> dict[str, NDArray[np.generic]]:
        """The random numbers for n augmented images of `size` (height, width)."""
        draws = augment.draw(rng, n, self.augment, self.pad)
        return draws | strong.draw(rng, n, size, self.strong) if self.strong else draws

    def __call__(self, images: Tensor, draws: Mapping[str, Tensor] | None = None) -> Tensor:
        """uint8 [..., H, W, C] -> normalised floats; augmented if there are draws."""
        if draws:
            images = augment.apply(images, draws, self.augment, self.pad, self.background)
            images = strong.apply(images, draws, self.strong) if self.strong else images
        return augment.normalise(images, self.mean, self.std, self.dtype)


@dataclass(frozen=True)
class Pool:
    """Unlabelled images on the device; every row of the stack has its own list of them.

    images: uint8 [N, H, W, C]. lists: one array of indices per row. truth: their labels, for what is reported alone.
    batch: how many go with a batch of labelled ones. rounds: those in which they are used.
    """

    images: Tensor
    lists: tuple[Index, ...]
    truth: tuple[Index, ...]
    weak: Look
    strong: Look
    batch: int
    rounds: range

    @property
    def size(self) -> int:
        """U, the number of samples of the row that has most."""
        return max(len(one) for one in self.lists)


@dataclass(frozen=True)
class Fed:
    """What of its pool a row is trained on. samples: [n] into the images. labels: [n] pseudo-labels, -1 for none.
    other: the same of a second stream beside it."""

    samples: Index
    labels: Index
    other: "Fed | None" = None


def epoch(
    data: Images,
    rows: Sequence[int],
    keys: Sequence[Key],
    t: int,
    number: int,
    *,
    batch: int,
    drop_last: bool,
    look: Look,
    noise: Mapping[str, tuple[int, ...]],
    purpose: Purpose = "batches",
    pool: Pool | None = None,
    fed: Sequence[Fed] = (),
    draw: Callable[[np.random.Generator, int], Mapping[str, NDArray[np.generic]]] | None = None,
) -> list[Block]:
    """One shuffled pass of every row over its samples, as blocks whose rows are positions in `rows`.

    Full batches come first: rows that still have some go on together, so a block ends whenever a row is through.
    What is
    left of each row, less than a batch, follows in blocks of equal size unless `drop_last`; a row with less than one
    full batch in all always trains on it. No row waits for, or is padded to, another.

    With a pool, every batch has `pool.batch` samples of it beside it, of those that `fed` names for each of `rows`, and
    what `draw` makes for so many batches.
    """
    size = (int(data.images.shape[1]), int(data.images.shape[2]))
    plans = [_visit(data.lists[r], keys[r], t, number, batch, drop_last, look, noise, purpose, size) for r in rows]
    if pool is not None:
        for plan, r, own in zip(plans, rows, fed, strict=True):
            steps, rng = plan.full + (plan.rest > 0), numbers(keys[r].seed, "pool", keys[r].client, t * 1000 + number)
            plan.pool.update(_beside(pool, own, pool.lists[r][0], rng, steps, noise, size))
            plan.pool.update({f"drawn {k}": v for k, v in draw(rng, steps).items()} if draw else {})
    blocks = []
    full = np.array([p.full for p in plans])
    done = 0
    for until in np.unique(full[full > 0]):
        active = np.flatnonzero(full > done)
        blocks.append(_block(plans, active, slice(done * batch, until * batch), slice(done, until), batch, data))
        done = int(until)
    rest = np.array([p.rest for p in plans])
    for left in np.unique(rest[rest > 0])[::-1]:
        active = np.flatnonzero(rest == left)
        blocks.append(_block(plans, active, slice(-int(left), None), slice(-1, None), int(left), data))
    return blocks


@dataclass(frozen=True)
class _Visit:
    full: int  # full batches
    rest: int  # samples in the short batch after them
    arrays: dict[str, NDArray[np.generic]]  # [n, *] each: samples, draws and noise, in order of use
    pool: dict[str, NDArray[np.generic]]  # [steps, *] each


def _visit(
    mine: Index,
    key: Key,
    t: int,
    number: int,
    batch: int,
    drop_last: bool,
    look: Look,
    noise: Mapping[str, tuple[int, ...]],
    purpose: Purpose,
    size: tuple[int, int],
) -> _Visit:
    rng = numbers(key.seed, purpose, key.client, t * 1000 + number)
    full, rest = divmod(len(mine), batch)
    if drop_last and full:
        rest = 0
    n = full * batch + rest
    arrays: dict[str, NDArray[np.generic]] = {"samples": mine[rng.permutation(len(mine))[:n]]}
    arrays |= {f"draw {k}": v for k, v in look.draw(rng, n, size).items()}
    arrays |= {f"noise {k}": rng.random((n, *shape), np.float32) for k, shape in noise.items()}
    return _Visit(full, rest, arrays, {})


def _beside(
    pool: Pool,
    fed: Fed,
    blank: int,
    rng: np.random.Generator,
    steps: int,
    noise: Mapping[str, tuple[int, ...]],
    size: tuple[int, int],
) -> dict[str, NDArray[np.generic]]:
    """Unlabelled samples for `steps` batches: shuffled, and shuffled again when all have had their turn.

    samples, labels, valid (False where there is nothing to feed: then the sample is `blank`), and for either view its
    draws and its dropout noise; all of it [steps, U, *]. Once more with "other" in front, for the second stream.
    """
    n = steps * pool.batch
    there = len(fed.samples) > 0
    turns = [rng.permutation(len(fed.samples)) for _ in range(-(-n // len(fed.samples)) if there else 0)]
    chosen = np.concatenate([*turns, np.zeros(0, np.int64)])[:n].astype(np.int64)
    arrays: dict[str, NDArray[np.generic]] = {
        "samples": fed.samples[chosen] if there else np.full(n, blank),
        "labels": fed.labels[chosen] if there else np.full(n, -1),
        "valid": np.full(n, there),
    }
    for name, look in (("weak", pool.weak), ("strong", pool.strong)):
        arrays |= {f"{name} draw {k}": v for k, v in look.draw(rng, n, size).items()}
        arrays |= {f"{name} noise {k}": rng.random((n, *shape), np.float32) for k, shape in noise.items()}
    made = {k: v.reshape(steps, pool.batch, *v.shape[1:]) for k, v in arrays.items()}
    if fed.other is not None:
        made |= {f"other {k}": v for k, v in _beside(pool, fed.other, blank, rng, steps, noise, size).items()}
    return made


def _block(plans: list[_Visit], active: Index, part: slice, steps: slice, size: int, data: Images) -> Block:
    stacked: dict[str, Tensor] = {}
    for name in plans[0].arrays:
        joined = np.stack([plans[i].arrays[name][part] for i in active])
        stacked[name] = _sent(joined.reshape(len(active), -1, size, *joined.shape[2:]), data.images.device)
    beside = [plans[i].pool for i in active]
    prefix = bool((active == np.arange(len(active))).all())
    return Block(
        slice(0, len(active)) if prefix else torch.from_numpy(active).to(data.images.device),
        stacked["samples"],
        {k[5:]: v for k, v in stacked.items() if k.startswith("draw ")},
        {k[6:]: v for k, v in stacked.items() if k.startswith("noise ")},
        {k: _sent(np.stack([one[k][steps] for one in beside]), data.images.device) for k in beside[0]},
    )


def _sent(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """An array on the device; from pinned memory the host goes on while the device still works on what came before."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
