"""Samples without labels: a pool for each client, beside the labelled ones that a partition gives it."""

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsap.data.partition import Partition
from fedsap.errors import UserError

Balance = Literal["even", "random"]
Indices = NDArray[np.int64]
_EVERYTHING = ("dirichlet", "pathological", "iid")  # rules that leave no sample over
_STREAM = (0, 1)  # beside the seed, so that no draw of the partition comes again


def with_pools(
    split: Partition,
    labels: ArrayLike,
    *,
    size: int,
    balance: Balance = "even",
    foreign: float = 0.0,
    seed: int | None = None,
) -> Partition:
    """The partition with a pool of `size` samples for each client; no client has a sample both with and without label.

    labels: [N] of the training set. They decide what a pool is drawn from, and are not kept with it.
    balance: `even` gives each of the client's classes the same share; `random` draws shares from Dirichlet(1, ..., 1).
    foreign: the share of the pool that comes from classes the client does not hold, each as likely as another.

    A class is handed out from client to client: first the samples that no client holds, then, when these are used up,
    those that others hold or have had. Rules that deal out every sample leave none over: there a pool is a part of the
    client's own samples that loses its labels, with at least one sample of each class kept.

    >>> from fedsap.data.partition import partition
    >>> labels = [0, 1, 2] * 5
    >>> split = partition(labels, num_classes=3, clients=2, ways=2, shots=2, spread=0, seed=1, shuffle=False)
    >>> split.classes, [own.tolist() for own in split.indices]
    (((0, 2), (0, 1)), [[0, 3, 2, 5], [6, 9, 1, 4]])
    >>> [pool.tolist() for pool in with_pools(split, labels, size=3).pools]
    [[12, 6, 8], [3, 12, 7]]
    """
    if balance not in get_args(Balance):
        raise UserError(f"unlabelled.balance: got {balance!r}; takes {', '.join(get_args(Balance))}")
    if size < 1 or not 0 <= foreign < 1:
        raise UserError(f"unlabelled: got size {size} and foreign {foreign}; takes size >= 1 and a share below 1")
    if foreign and split.rule in _EVERYTHING:
        raise UserError(f"unlabelled.foreign: rule '{split.rule}' leaves no samples of foreign classes; takes 0 there")
    array = np.asarray(labels)
    rng = np.random.RandomState([split.seed if seed is None else seed, *_STREAM])
    if split.rule in _EVERYTHING:
        return _from_own(split, size, balance, rng)
    held = np.concatenate(split.indices)
    orders = [_order(array, c, held, rng) for c in range(split.num_classes)]
    cursor = [0] * split.num_classes
    pools = []
    for client, (own, mine) in enumerate(zip(split.classes, split.indices, strict=True)):
        counts = _counts(len(own), size - round(size * foreign), balance, rng)
        wanted = dict(zip(own, counts, strict=True))
        others = [c for c in range(split.num_classes) if c not in own]
        if foreign and others:
            strange = rng.multinomial(round(size * foreign), np.full(len(others), 1 / len(others)))
            wanted |= {c: int(n) for c, n in zip(others, strange.tolist(), strict=True) if n}
        taken = [_take(orders, cursor, c, n, mine, client) for c, n in wanted.items()]
        pools.append(np.concatenate(taken))
    return replace(split, pools=tuple(pools))


def _order(labels: NDArray[np.integer], c: int, held: Indices, rng: np.random.RandomState) -> Indices:
    """The samples of a class in the order in which they are handed out: those without a holder first."""
    every = np.flatnonzero(labels == c).astype(np.int64)
    free = np.isin(every, held, invert=True)
    return np.concatenate([rng.permutation(every[free]) if free.any() else every[:0], rng.permutation(every[~free])])


def _counts(classes: int, size: int, balance: Balance, rng: np.random.RandomState) -> list[int]:
    """How many samples of each class, in all `size`."""
    if balance == "random":
        return [int(n) for n in rng.multinomial(size, rng.dirichlet(np.ones(classes)))]
    return [size // classes + (i < size % classes) for i in range(classes)]


def _take(orders: list[Indices], cursor: list[int], c: int, count: int, mine: Indices, client: int) -> Indices:
    order = orders[c]
    around = np.roll(order, -cursor[c])
    there = np.flatnonzero(np.isin(around, mine, invert=True))
    if count > len(there):
        raise UserError(
            f"unlabelled.size: client {client} is to get {count} samples of class {c} beside its labelled ones, and "
            f"the class has {len(there)}; takes a smaller pool"
        )
    if count:
        cursor[c] = (cursor[c] + int(there[count - 1]) + 1) % len(order)
    return around[there[:count]]


def _from_own(split: Partition, size: int, balance: Balance, rng: np.random.RandomState) -> Partition:
    pools, kept, shots = [], [], []
    for client, (have, mine) in enumerate(zip(split.shots, split.indices, strict=True)):
        room = np.array(have) - 1
        if size > room.sum():
            raise UserError(
                f"unlabelled.size: rule '{split.rule}' deals out every sample, so a pool is part of the client's own; "
                f"client {client} has {sum(have)} of {len(have)} classes; takes at most {room.sum()}"
            )
        counts = np.minimum(_counts(len(have), size, balance, rng), room)
        while counts.sum() < size:  # what a class cannot give comes from the one with most left
            counts[int(np.argmax(room - counts))] += 1
        parts = [rng.permutation(part) for part in np.split(mine, np.cumsum(have)[:-1])]
        pools.append(np.concatenate([part[:n] for part, n in zip(parts, counts, strict=True)]))
        kept.append(np.concatenate([part[n:] for part, n in zip(parts, counts, strict=True)]))
        shots.append(tuple(int(n) for n in np.array(have) - counts))
    return replace(split, pools=tuple(pools), indices=tuple(kept), shots=tuple(shots))
