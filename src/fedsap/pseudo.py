"""Pseudo-labels by the nearest prototype, and which of them to believe: pure functions with a client axis."""

import torch
from torch import Tensor

from fedsap.losses import FAR
from fedsap.message import PerClass
from fedsap.prototypes import nearest, scores

FARTHEST = 2.0  # the largest cosine distance


def distances(h: Tensor, bank: PerClass, classes: Tensor | None = None) -> Tensor:
    """Cosine distances d(x, p_c) = 1 - cos(h, p_c); infinite where there is no prototype, or not in `classes`.

    h: [Q, B, d], bank: [Q, C, d], classes: bool [Q, C] -> [Q, B, C]

    >>> bank = PerClass(torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool))
    >>> distances(torch.tensor([[[3.0, 4.0]]]), bank).flatten().tolist()
    [0.3999999761581421, 0.19999998807907104]
    """
    return 1 - scores(h, bank, "cosine", classes)


def nearest_two(distance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest class (-1 where there is none), how far it is, and the margin to the second nearest.

    With a single class there is no second, and it counts as if it were at the largest distance there is.
    distance: [Q, B, C] -> [Q, B] each

    >>> label, near, margin = nearest_two(torch.tensor([[[0.5, 0.25, torch.inf], [torch.inf, 0.5, torch.inf]]]))
    >>> label.tolist(), near.tolist(), margin.tolist()
    ([[1, 1]], [[0.25, 0.5]], [[0.25, 1.5]])
    """
    two = distance.topk(min(2, distance.shape[-1]), largest=False).values
    near = two[..., 0]
    second = two[..., -1].clamp(max=FARTHEST) if two.shape[-1] > 1 else torch.full_like(near, FARTHEST)
    return nearest(-distance), near, torch.where(torch.isfinite(near), second - near, 0.0)


def guess(logits: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The head's most likely class and its probability, of all classes or of those in `classes`.

    logits: [Q, B, C], classes: bool [Q, C] -> [Q, B] each

    >>> label, p = guess(torch.tensor([[[0.0, 0.0, 9.0]]]), torch.tensor([[True, True, False]]))
    >>> label.item(), p.item()
    (0, 0.5)
    """
    among = logits if classes is None else logits.masked_fill(~classes[:, None, :], FAR)
    p, label = among.softmax(-1).max(-1)
    return label, p


def calibrate(
    margin: Tensor, right: Tensor, own: Tensor, valid: Tensor, margin_quantile: float, distance_quantile: float
) -> tuple[Tensor, Tensor]:
    """The two thresholds of each client from its labelled samples.

        M      the `margin_quantile` of the margins of samples whose nearest prototype is that of their class, from 0 on
        D_max  the `distance_quantile` of the distances of samples to the prototype of their class

    A client with no sample of the kind gets infinity for M, and 0 for D_max: it accepts nothing.
    margin, own (distance to the true class): [Q, n], right, valid: bool [Q, n] -> [Q], [Q]

    >>> margin, own = torch.tensor([[0.1, 0.3, 0.5, 0.7]]), torch.tensor([[0.2, 0.1, 0.4, 0.9]])
    >>> right, valid = torch.tensor([[True, True, True, False]]), torch.ones(1, 4, dtype=torch.bool)
    >>> [round(float(v), 3) for v in calibrate(margin, right, own, valid, 0.5, 0.5)]
    [0.3, 0.3]
    """
    least = _quantile(margin, right & valid, margin_quantile).clamp(min=0)
    most = _quantile(own, valid & torch.isfinite(own), distance_quantile)
    return torch.nan_to_num(least, nan=torch.inf), torch.nan_to_num(most, nan=0.0)


def _quantile(values: Tensor, among: Tensor, q: float) -> Tensor:
    """The quantile, along the last axis, of those that count: between two of them in proportion; NaN without any."""
    return torch.nanquantile(torch.where(among, values, torch.nan), q, dim=-1)
