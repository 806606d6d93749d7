"""How good each client is on test images of its own classes, and how its embedding space is organised."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import silhouette_score
from torch import Tensor

from fedsap.losses import FAR
from fedsap.message import PerClass, rows
from fedsap.methods.method import State
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


@torch.no_grad()
def evaluate(
    stack: Stack,
    test: Images,
    clients: Sequence[int],
    state: State,
    bank: PerClass,
    *,
    chunk: int,
    classes: Literal["own", "all"] = "own",
    sample: int = 5000,
    keep: int = 0,
) -> Scores:
    """Scores of the clients `clients`; `state` and `bank` [Q, C, d] hold these, in order.

    `classes` is what nearest-prototype inference chooses among. The silhouette (cosine) is that of at most `sample`
    embeddings of all clients together, labelled with their classes; the same test images in every round. At most `keep`
    embeddings are returned.
    """
    weights = stack.method.model(state)
    device = stack.owned.device
    owned = stack.owned[torch.as_tensor(clients, device=device)]
    right = {name: torch.zeros(len(clients), device=device) for name in MEASURES}
    total = torch.zeros(len(clients), device=device)
    lengths = [len(test.lists[c]) for c in clients]
    chosen, keeping = (_chosen(lengths, n, stack.keys[0].seed) for n in (sample, keep))
    snapshot: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    column = 0
    kept: list[Tensor] = []
    labels: list[Tensor] = []
    for part, samples, valid in test.chunks(clients, chunk):
        x, y = stack.look(test.images[samples]), test.labels[samples]
        out = stack.network({k: v[part] for k, v in weights.items()}, x)
        logits = stack.method.logits(out, {n: {k: v[part] for k, v in w.items()} for n, w in state.items()})
        h = stack.method.represent(out)[stack.method.embedding]
        own = owned[part]
        among = own if classes == "own" else None
        near = rows(bank, part)
        assert isinstance(near, PerClass)
        guesses = {
            "head": logits.argmax(-1),
            "head_own": logits.masked_fill(~own[:, None, :], FAR).argmax(-1),
            "proto": nearest(scores(h, near, "l2", among)),
            "proto_cos": nearest(scores(h, near, "cosine", among)),
        }
        for name, guess in guesses.items():
            right[name][part] += ((guess == y) & valid).sum(1)
        total[part] += valid.sum(1)
        mask = torch.from_numpy(chosen[: valid.shape[0], column : column + valid.shape[1]]).to(device)
        if keep:
            held = torch.from_numpy(keeping[: valid.shape[0], column : column + valid.shape[1]]).to(device)
            row = torch.arange(valid.shape[0], device=device)[:, None].expand_as(held)
            snapshot.append((h[held], y[held], row[held], samples[held]))
        column += valid.shape[1]
        kept.append(h[mask])
        labels.append(y[mask])
    accuracy = {name: (count / total).cpu() for name, count in right.items()}
    shape = silhouette(torch.cat(kept), torch.cat(labels)) if sample else None
    if not snapshot:
        return Scores(accuracy, shape)
    h, label, client, image = (torch.cat(part) for part in zip(*snapshot, strict=True))
    return Scores(accuracy, shape, Kept(h, label, client, image))


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

    >>> silhouette(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0, 1, 1]))
    1.0
    """
    if not 1 < len(torch.unique(y)) < len(y) or not torch.isfinite(h).all():
        return None
    return float(silhouette_score(h.float().cpu().numpy(), y.cpu().numpy(), metric="cosine"))
