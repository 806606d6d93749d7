"""The stack's data on the device, and the order in which each client's samples are visited."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsap.data import Augment, Split, augment
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
    """One batch of R rows. samples: [R, B] into the images. draws: [R, B] each. noise: [R, B, *] each."""

    samples: Tensor
    draws: dict[str, Tensor]
    noise: dict[str, Tensor]


@dataclass(frozen=True)
class Block:
    """Consecutive batches of one size for the same rows of the stack.

    rows: R of them. samples: [R, S, B] into the images. draws: [R, S, B] each. noise: [R, S, B, *] each.
    """

    rows: Rows
    samples: Tensor
    draws: dict[str, Tensor]
    noise: dict[str, Tensor]

    @property
    def steps(self) -> int:
        return self.samples.shape[1]

    def batch(self, step: int) -> Batch:
        return Batch(
            self.samples[:, step],
            {k: v[:, step] for k, v in self.draws.items()},
            {k: v[:, step] for k, v in self.noise.items()},
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

    def __call__(self, images: Tensor, draws: Mapping[str, Tensor] | None = None) -> Tensor:
        """uint8 [..., H, W, C] -> normalised floats; augmented if there are draws."""
        if draws:
            images = augment.apply(images, draws, self.augment, self.pad)
        return augment.normalise(images, self.mean, self.std, self.dtype)


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
) -> list[Block]:
    """One shuffled pass of every row over its samples, as blocks whose rows are positions in `rows`.

    Full batches come first: rows that still have some go on together, so a block ends whenever a row is through.
    What is
    left of each row, less than a batch, follows in blocks of equal size unless `drop_last`; a row with less than one
    full batch in all always trains on it. No row waits for, or is padded to, another.
    """
    plans = [_visit(data.lists[r], keys[r], t, number, batch, drop_last, look, noise, purpose) for r in rows]
    blocks = []
    full = np.array([p.full for p in plans])
    done = 0
    for until in np.unique(full[full > 0]):
        active = np.flatnonzero(full > done)
        blocks.append(_block(plans, active, slice(done * batch, until * batch), batch, data))
        done = int(until)
    rest = np.array([p.rest for p in plans])
    for size in np.unique(rest[rest > 0])[::-1]:
        active = np.flatnonzero(rest == size)
        blocks.append(_block(plans, active, slice(-int(size), None), int(size), data))
    return blocks


@dataclass(frozen=True)
class _Visit:
    full: int  # full batches
    rest: int  # samples in the short batch after them
    arrays: dict[str, NDArray[np.generic]]  # [n, *] each: samples, draws and noise, in order of use


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
) -> _Visit:
    rng = numbers(key.seed, purpose, key.client, t * 1000 + number)
    full, rest = divmod(len(mine), batch)
    if drop_last and full:
        rest = 0
    n = full * batch + rest
    arrays: dict[str, NDArray[np.generic]] = {"samples": mine[rng.permutation(len(mine))[:n]]}
    arrays |= {f"draw {k}": v for k, v in augment.draw(rng, n, look.augment, look.pad).items()}
    arrays |= {f"noise {k}": rng.random((n, *shape), np.float32) for k, shape in noise.items()}
    return _Visit(full, rest, arrays)


def _block(plans: list[_Visit], active: Index, part: slice, size: int, data: Images) -> Block:
    device = data.images.device
    stacked: dict[str, Tensor] = {}
    for name in plans[0].arrays:
        joined = np.stack([plans[i].arrays[name][part] for i in active])
        host = torch.from_numpy(joined.reshape(len(active), -1, size, *joined.shape[2:]))
        # From pinned memory the host goes on while the device still works on what came before.
        stacked[name] = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
    prefix = bool((active == np.arange(len(active))).all())
    return Block(
        slice(0, len(active)) if prefix else torch.from_numpy(active).to(device),
        stacked["samples"],
        {k[5:]: v for k, v in stacked.items() if k.startswith("draw ")},
        {k[6:]: v for k, v in stacked.items() if k.startswith("noise ")},
    )
