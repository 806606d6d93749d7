"""How good each client is on test images of its own classes, and how its embedding space is organised."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsap.errors import UserError
from fedsap.losses import FAR, of_labels
from fedsap.message import PerClass
from fedsap.methods.method import State, View
from fedsap.models import layers
from fedsap.models.network import Features, Weights
from fedsap.prototypes import nearest, scores
from fedsap.training.feed import Images
from fedsap.training.local import Stack
from fedsap.training.streams import numbers

MEASURES = ("head", "head_own", "proto", "proto_cos")
SNAPSHOT = 2000  # embeddings that a snapshot holds at most


@dataclass(frozen=True)
class Kept:
    """Embeddings of some test images of all clients, the same in every round, and the server's bank, if it has one.

    h: [N, d], label: [N], client: [N], image: [N] indices into the test images, bank: [C, d]
    """

    h: Tensor
    label: Tensor
    client: Tensor
    image: Tensor
    bank: PerClass | None = None


@dataclass(frozen=True)
class Scores:
    """Accuracies [Q] in [0, 1] by measure (NaN for a client without test images), and the silhouette (or None).

    head       argmax of the logits over all classes
    head_own   the same over the client's classes
    proto      nearest prototype by L2
    proto_cos  nearest prototype by cosine
    """

    accuracy: dict[str, Tensor]
    silhouette: float | None
    kept: Kept | None = None
    noted: dict[str, Tensor] = field(default_factory=dict)  # [Q] more figures of each client, by name


@torch.no_grad()
def evaluate(
    stack: Stack,
    test: Images,
    state: State,
    bank: PerClass,
    *,
    chunk: int,
    classes: Literal["own", "all"] = "own",
    sample: int = 5000,
    keep: int = 0,
    statistics: int = 0,
    distances: bool = False,
) -> dict[int, Scores]:
    """Scores of the stack's clients by the seed of their federation; `state` and `bank` [Q, C, d] hold all of them.

    `classes` is what nearest-prototype inference chooses among. The silhouette (cosine) is that of at most `sample`
    embeddings of all clients of a federation together, labelled with their classes; the same test images in every
    round. At most `keep` embeddings are returned. Embeddings are computed once for all of it.

    With `statistics` = n, BatchNorm uses the statistics of batches of n images, in the order of each client's list.
    With `distances`, `noted` has the means of ||h - p_y||, as "distance", and of ||h||, as "length".
    """
    weights = stack.method.model(state)
    device = stack.owned.device
    rows = range(len(stack.keys))
    federations = {seed: [r for r in rows if stack.keys[r].seed == seed] for seed in {k.seed: 0 for k in stack.keys}}
    right = {name: torch.zeros(len(rows), device=device) for name in MEASURES}
    apart = {name: torch.zeros(len(rows), device=device) for name in (("distance", "length") if distances else ())}
    size = statistics or chunk
    if statistics and stack.network.noise:
        raise UserError("eval.batch_statistics: the network has dropout, which this would turn on; takes 0 here")
    total, placed = (torch.zeros(len(rows), device=device) for _ in range(2))
    lengths = [len(one) for one in test.lists]
    shown, keeping = (_chosen_all(lengths, federations, n) for n in (sample, keep))
    looked: list[tuple[Tensor, ...]] = []
    snapshot: list[tuple[Tensor, ...]] = []
    column = 0
    for part, samples, valid in test.chunks(rows, size, fill=statistics > 0):
        x, y = stack.look(test.images[samples]), test.labels[samples]
        forward = partial(_forward, stack, x, statistics > 0)
        out = forward({k: v[part] for k, v in weights.items()})
        logits = stack.method.logits(out, {n: {k: v[part] for k, v in w.items()} for n, w in state.items()}, forward)
        h = stack.method.represent(out)[stack.method.embedding]
        own = stack.owned[part]
        among = own if classes == "own" else None
        near = PerClass(bank.values[part], bank.mask[part])
        guesses = {
            "head": logits.argmax(-1),
            "head_own": logits.masked_fill(~own[:, None, :], FAR).argmax(-1),
            "proto": nearest(scores(h, near, "l2", among)),
            "proto_cos": nearest(scores(h, near, "cosine", among)),
        }
        for name, guess in guesses.items():
            right[name][part] += ((guess == y) & valid).sum(1)
        total[part] += valid.sum(1)
        if distances:
            prototype, known = of_labels(near, y)
            apart["distance"][part] += ((h - prototype).norm(dim=-1) * (valid & known)).sum(1)
            placed[part] += (valid & known).sum(1)
            apart["length"][part] += (h.norm(dim=-1) * valid).sum(1)
        row = torch.arange(valid.shape[0], device=device)[:, None].expand_as(valid)
        for mask, found in ((shown, looked), (keeping, snapshot)):
            wanted = np.zeros(valid.shape, bool)
            some = mask[: valid.shape[0], column : column + valid.shape[1]]
            wanted[:, : some.shape[1]] = some
            here = np.flatnonzero(wanted)
            if len(here):
                at = torch.from_numpy(here).to(device)
                found.append(tuple(v.flatten(0, 1)[at] for v in (h, y, row, samples)))
        column += valid.shape[1]
    accuracy = {name: (count / total).cpu() for name, count in right.items()}
    noted = {name: (value / (placed if name == "distance" else total)).cpu() for name, value in apart.items()}
    silhouettes = {seed: silhouette(v[0], v[1]) for seed, v in _by_federation(looked, federations).items()}
    kept = {s: Kept(v[0], v[1], v[2], v[3]) for s, v in _by_federation(snapshot, federations).items()}
    return {
        seed: Scores(
            {k: v[mine] for k, v in accuracy.items()},
            silhouettes.get(seed),
            kept.get(seed),
            {k: v[mine] for k, v in noted.items()},
        )
        for seed, mine in federations.items()
    }


def _forward(
    stack: Stack,
    x: Tensor,
    statistics: bool,
    weights: Weights,
    view: View | None = None,
    *,
    train: bool = False,  # noqa: ARG001
) -> Features:
    """The network as in `Step.forward`, but not in training mode, unless BatchNorm is to use `statistics` of the batch;
    the running ones stay."""
    if statistics:
        weights = {k: v.clone() if k in stack.network.buffers else v for k, v in weights.items()}
    with layers.precision(stack.hyper.precision):
        return stack.network(weights, x if view is None else view.x, train=statistics)


def _chosen_all(lengths: Sequence[int], federations: Mapping[int, Sequence[int]], sample: int) -> NDArray[np.bool_]:
    """`_chosen` for each federation, [Q, longest]."""
    mask = np.zeros((len(lengths), max(lengths, default=0)), bool)
    for seed, mine in federations.items():
        own = _chosen([lengths[r] for r in mine], sample, seed)
        mask[mine, : own.shape[1]] = own
    return mask


def _by_federation(
    found: list[tuple[Tensor, ...]], federations: Mapping[int, Sequence[int]]
) -> dict[int, tuple[Tensor, ...]]:
    """h, labels, positions within the federation and samples, for each seed that has some."""
    if not found:
        return {}
    h, y, row, samples = (torch.cat(part) for part in zip(*found, strict=True))
    parts: dict[int, tuple[Tensor, ...]] = {}
    for seed, mine in federations.items():
        place = torch.full((int(row.max()) + 1 + max(mine),), -1, device=row.device)
        place[torch.as_tensor(mine, device=row.device)] = torch.arange(len(mine), device=row.device)
        at = (place[row] >= 0).nonzero()[:, 0]
        if len(at):
            parts[seed] = (h[at], y[at], place[row[at]], samples[at])
    return parts


def _chosen(lengths: Sequence[int], sample: int, seed: int) -> NDArray[np.bool_]:
    """Which test samples the silhouette looks at: at most `sample` of all, [Q, longest]."""
    every = np.arange(max(lengths, default=0)) < np.asarray(lengths)[:, None]
    places = np.flatnonzero(every)
    if len(places) > sample:
        places = numbers(seed, "sample").choice(places, sample, replace=False)
    mask = np.zeros(every.size, bool)
    mask[places] = True
    return mask.reshape(every.shape)


def silhouette(h: Tensor, y: Tensor) -> float | None:
    """Mean silhouette of embeddings [N, d] under the cosine distance, with classes [N] as clusters; None if there
    are not at least two classes and fewer classes than samples, or an embedding is not finite.

    With unit vectors u and the sum S_c of those of class c, the distances of i to all of a class add up to
    n_c - u_i S_c: no N x N matrix is needed. a_i is their mean for the own class, without i, b_i the smallest mean of
    another class, and s_i = (b_i - a_i) / max(a_i, b_i), or 0 for the only one of its class.

    >>> silhouette(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0, 1, 1]))
    1.0
    """
    labels, cluster, counts = torch.unique(y, return_inverse=True, return_counts=True)
    if not 1 < len(labels) < len(y) or not torch.isfinite(h).all():
        return None
    wide = h.double()
    length = wide.norm(dim=1, keepdim=True)
    u = wide / torch.where(length > 0, length, 1.0)  # a zero vector is at distance 1 from everything, itself too
    sums = u.new_zeros(len(labels), u.shape[1]).index_add_(0, cluster, u)
    apart = counts - u @ sums.T
    own = cluster[:, None] == torch.arange(len(labels), device=y.device)
    itself = 1 - u.square().sum(1)
    n = counts[cluster]
    a = (apart.gather(1, cluster[:, None])[:, 0] - itself).clamp(min=0) / (n - 1).clamp(min=1)
    b = (apart / counts).clamp(min=0).masked_fill(own, torch.inf).min(1).values
    widest = torch.maximum(a, b)
    s = torch.where((n > 1) & (widest > 0), (b - a) / torch.where(widest > 0, widest, 1.0), 0.0)
    return float(s.mean())
