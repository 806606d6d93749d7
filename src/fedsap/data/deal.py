"""The draws behind a partition: which client holds which classes, how many samples of each, and which ones.

Every draw comes from a generator made here from the seed, numpy's legacy `RandomState` or Python's `random.Random`.
Both streams are frozen by their authors, so a seed means the same partition on every machine; no global state is read
or set.

    Q clients, C classes
    n: [Q] classes of each client        pool: indices of one class, in the order in which they are handed out
    k: [Q] samples of each of them       holdings: per client, class -> indices
"""

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedsap.errors import UserError

Indices = NDArray[np.int64]
Holdings = list[dict[int, Indices]]


def fedproto_counts(
    clients: int, num_classes: int, ways: int, shots: int, spread: int, seed: int, vary_shots: bool = True
) -> tuple[Indices, Indices]:
    """n [Q] and k [Q] as FedProto's code draws them: uniform integers, all of n before all of k.

        n ~ U{max(2, ways - spread), ..., min(C - 1, ways + spread)}
        k ~ U{shots - spread + 1, ..., shots + spread}        k = shots if not vary_shots or spread = 0

    The range of k lies one to the right of symmetric; it is the rule's own. k is at least 1.

    >>> n, k = fedproto_counts(clients=20, num_classes=62, ways=3, shots=100, spread=1, seed=1234)
    >>> n[:5].tolist(), k[:5].tolist()
    ([4, 3, 2, 2, 2], [100, 101, 101, 100, 100])
    """
    low, high = max(2, ways - spread), min(num_classes - 1, ways + spread)
    if low > high:
        raise UserError(
            f"partition.ways: got {ways} with partition.spread {spread}; rule 'fedproto' gives a client 2 to "
            f"{num_classes - 1} of {num_classes} classes (rules 'normal', 'pathological' and 'iid' have no such bounds)"
        )
    state = np.random.RandomState(seed)
    n = state.randint(low, high + 1, size=clients, dtype=np.int64)
    if not vary_shots or spread == 0:
        return n, np.full(clients, shots, dtype=np.int64)
    return n, state.randint(max(1, shots - spread + 1), shots + spread + 1, size=clients, dtype=np.int64)


def normal_counts(
    clients: int, num_classes: int, ways: int, shots: int, spread: int, seed: int, vary_shots: bool = True
) -> tuple[Indices, Indices]:
    """n [Q] and k [Q] as FedSAP's text has them, rounded and clipped.

        n ~ round(N(ways, spread^2)) in [2, C]        k ~ round(N(shots, spread^2)) >= 1

    >>> n, k = normal_counts(clients=4, num_classes=10, ways=3, shots=20, spread=0, seed=1)
    >>> n.tolist(), k.tolist()
    ([3, 3, 3, 3], [20, 20, 20, 20])
    """
    state = np.random.RandomState(seed)
    n = np.clip(np.rint(state.normal(ways, spread, size=clients)), 2, num_classes)
    k = np.rint(state.normal(shots, spread if vary_shots else 0, size=clients))
    return n.astype(np.int64), np.maximum(k, 1).astype(np.int64)


def class_lists(n: Sequence[int] | Indices, num_classes: int, seed: int) -> list[list[int]]:
    """n[i] different classes for client i, client after client, each list sorted. A class may be held by nobody.

    >>> class_lists([4, 3, 2], num_classes=62, seed=1234)
    [[7, 28, 49, 61], [0, 5, 58], [51, 60]]
    """
    rng = random.Random(seed)
    return [sorted(rng.sample(range(num_classes), int(count))) for count in n]


def class_pools(labels: NDArray[np.integer], num_classes: int, seed: int, shuffle: bool = True) -> list[Indices]:
    """The indices of each class: shuffled by a stream of the class's own, or in the order of the file.

    >>> [pool.tolist() for pool in class_pools(np.array([1, 0, 1, 1, 0]), num_classes=2, seed=0, shuffle=False)]
    [[1, 4], [0, 2, 3]]
    """
    order = np.argsort(labels, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(labels, minlength=num_classes))
    pools = np.split(order, ends[:-1])
    if not shuffle:
        return pools
    return [pool[np.random.RandomState([seed, c]).permutation(pool.size)] for c, pool in enumerate(pools)]


def by_cursor(pools: list[Indices], classes: list[list[int]], k: Indices) -> Holdings:
    """Hand out each pool from client to client, k[i] samples at a time, and start it again when it is used up.

    No two clients share a sample of a class while the class lasts; within a client no sample comes twice.

    >>> pools = [np.array([10, 11, 12])]
    >>> [held[0].tolist() for held in by_cursor(pools, [[0], [0]], np.array([2, 2]))]
    [[10, 11], [12, 10]]
    """
    cursor = [0] * len(pools)
    holdings: Holdings = []
    for client, (own, shots) in enumerate(zip(classes, k.tolist(), strict=True)):
        held: dict[int, Indices] = {}
        for c in own:
            size = pools[c].size
            if shots > size:
                raise UserError(
                    f"partition.shots: client {client} is to get {shots} samples of class {c}, which holds {size}; "
                    f"takes shots of at most {size}, the upward spread included"
                )
            held[c] = pools[c][(cursor[c] + np.arange(shots)) % size]
            cursor[c] = (cursor[c] + shots) % size
        holdings.append(held)
    return holdings


def by_stride(pools: list[Indices], classes: list[list[int]], k: Indices, stride: int) -> Holdings:
    """Client i takes the samples i*stride, ..., i*stride + k[i] - 1 of each of its classes; they overlap if stride < k.

    >>> pools = [np.arange(10)]
    >>> [held[0].tolist() for held in by_stride(pools, [[0], [0]], np.array([4, 4]), stride=3)]
    [[0, 1, 2, 3], [3, 4, 5, 6]]
    """
    holdings: Holdings = []
    for client, (own, shots) in enumerate(zip(classes, k.tolist(), strict=True)):
        start = client * stride
        for c in own:
            size = pools[c].size
            if start + shots > size:
                raise UserError(
                    f"partition.stride: got {stride}, so client {client} starts at sample {start} and asks for {shots} "
                    f"of class {c}, which holds {size}; takes a stride and shots that stay inside the class, "
                    "or partition.slices 'cursor'"
                )
        holdings.append({c: pools[c][start : start + shots] for c in own})
    return holdings


def dirichlet(pools: list[Indices], clients: int, alpha: float, min_samples: int, seed: int) -> Holdings:
    """Deal every class to the clients in proportions p ~ Dirichlet(alpha, ..., alpha) [Q], one draw per class.

    A client left with fewer than `min_samples` is given some by the client that has most, out of the class it has most
    of. Each such move carries at least one sample that was needed, so there are at most Q * min_samples of them.

    >>> held = dirichlet([np.arange(50), np.arange(50, 100)], clients=4, alpha=0.1, min_samples=10, seed=0)
    >>> sorted(np.concatenate([pool for one in held for pool in one.values()]).tolist()) == list(range(100))
    True
    """
    total = sum(pool.size for pool in pools)
    if total < clients * min_samples:
        raise UserError(
            f"partition.min_samples: got {min_samples} for each of {clients} clients and {total} samples; "
            f"takes at most {total // clients}"
        )
    state = np.random.RandomState(seed)
    holdings: Holdings = [{} for _ in range(clients)]
    for c, pool in enumerate(pools):
        # p = g / sum(g), g ~ Gamma(alpha), through log g = log Gamma(alpha + 1) + log(u) / alpha: g itself underflows
        # to zero for all clients at once when alpha is small.
        log_g = np.log(state.standard_gamma(alpha + 1, size=clients)) + np.log1p(-state.random_sample(clients)) / alpha
        g = np.exp(log_g - log_g.max())
        cuts = np.floor(np.cumsum(g)[:-1] / g.sum() * pool.size + 0.5).astype(np.int64)
        for held, part in zip(holdings, np.split(pool, cuts), strict=True):
            if part.size:
                held[c] = part
    _top_up(holdings, min_samples)
    return holdings


def _top_up(holdings: Holdings, least: int) -> None:
    """Move samples from the largest client to each client below `least`, in place."""
    sizes = [sum(part.size for part in held.values()) for held in holdings]
    for poor, held in enumerate(holdings):
        while sizes[poor] < least:
            rich = sizes.index(max(sizes))
            c = max(holdings[rich], key=lambda label: holdings[rich][label].size)
            part = holdings[rich][c]
            count = min(least - sizes[poor], sizes[rich] - least, part.size)
            held[c] = np.concatenate([held.get(c, part[:0]), part[part.size - count :]])
            holdings[rich][c] = part[: part.size - count]
            if count == part.size:
                del holdings[rich][c]
            sizes[poor] += count
            sizes[rich] -= count


def pathological(pools: list[Indices], clients: int, ways: int, seed: int) -> Holdings:
    """Give each client exactly `ways` classes and each class to as many clients as any other, or one more; then cut the
    class into equal shards, one for each client that holds it. Every sample is used once.

    >>> held = pathological([np.arange(4), np.arange(4, 8), np.arange(8, 12)], clients=3, ways=2, seed=0)
    >>> [sum(part.size for part in one.values()) for one in held], [len(one) for one in held]
    ([4, 4, 4], [2, 2, 2])
    """
    num_classes = len(pools)
    if clients * ways < num_classes:
        raise UserError(
            f"partition.ways: got {ways} for {clients} clients, so that some of {num_classes} classes go to nobody; "
            f"rule 'pathological' uses every sample and takes at least {-(-num_classes // clients)}"
        )
    state = np.random.RandomState(seed)
    holders: list[list[int]] = [[] for _ in pools]
    for client in range(clients):
        order = state.permutation(num_classes).tolist()
        for c in sorted(order, key=lambda label: len(holders[label]))[:ways]:
            holders[c].append(client)
    holdings: Holdings = [{} for _ in range(clients)]
    for c, (pool, sharing) in enumerate(zip(pools, holders, strict=True)):
        if pool.size < len(sharing):
            raise UserError(
                f"partition.clients: got {clients}, so that {len(sharing)} share class {c}, which holds {pool.size}; "
                "takes fewer clients or fewer partition.ways"
            )
        for client, shard in zip(sharing, np.array_split(pool, len(sharing)), strict=True):
            holdings[client][c] = shard
    return holdings


def iid(pools: list[Indices], clients: int, seed: int) -> Holdings:
    """Every sample to a client at random, the clients' numbers of samples equal to within one.

    >>> held = iid([np.arange(6), np.arange(6, 10)], clients=3, seed=0)
    >>> [sum(part.size for part in one.values()) for one in held]
    [4, 3, 3]
    """
    total = sum(pool.size for pool in pools)
    if total < clients:
        raise UserError(f"partition.clients: got {clients} for {total} samples; takes at most {total}")
    owner = np.random.RandomState(seed).permutation(np.arange(total) % clients)
    holdings: Holdings = [{} for _ in range(clients)]
    start = 0
    for c, pool in enumerate(pools):
        mine = owner[start : start + pool.size]
        start += pool.size
        for client in np.unique(mine).tolist():
            holdings[client][c] = pool[mine == client]
    return holdings
