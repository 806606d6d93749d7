"""Centres of local prototypes that a minority of clients cannot move far, whatever it sends.

All of them look at one class at a time, at the n clients that have it. With n = 1 each is that client's prototype, with
n = 2 the middle between the two: nothing in a class of so few says who is right. `limited` bounds the harm there.
"""

from typing import Literal

import torch
from torch import Tensor

from fedsap.message import PerClass

Rule = Literal["mean", "confidence", "median", "trimmed", "geometric"]
UNWEIGHTED = ("median", "trimmed", "geometric")  # rules in which all clients count alike
STEPS = 64  # of Weiszfeld's iteration


def _ordered(local: PerClass) -> tuple[Tensor, Tensor]:
    """Coordinate by coordinate, what the clients of a class sent in ascending order, then plus infinity; and how many
    they are. local: [R, C, d] -> [R, C, d], [C]"""
    there = torch.where(local.mask[..., None], local.values, torch.inf)
    return there.sort(0).values, local.mask.sum(0)


def median(local: PerClass) -> PerClass:
    """The middle value of each coordinate, or the mean of the two middle ones.

        p_c[k] = median { p_{q,c}[k] : q in Q_c }

    Fewer than half of Q_c cannot move it beyond what the others sent. local: [R, C, d] -> [C, d]

    >>> local = PerClass(torch.tensor([[[1.0]], [[2.0]], [[900.0]]]), torch.ones(3, 1, dtype=torch.bool))
    >>> median(local).values.tolist()
    [[2.0]]
    """
    values, n = _ordered(local)
    middle = [
        values.gather(0, at.view(1, -1, 1).expand(1, *values.shape[1:]))[0]
        for at in ((n - 1).clamp(min=0) // 2, n // 2)
    ]
    return PerClass(torch.where((n > 0)[:, None], 0.5 * middle[0] + 0.5 * middle[1], 0.0), n > 0)


def trimmed(local: PerClass, share: float) -> PerClass:
    """The mean of each coordinate without its k smallest and its k largest values.

        k = min( ceil(share n), floor((n - 1) / 2) )

    Rounding up leaves out one at either end from three clients on. Up to k of Q_c cannot move it beyond what the others
    sent. local: [R, C, d], share: below 1/2 -> [C, d]

    >>> local = PerClass(torch.tensor([[[1.0]], [[2.0]], [[4.0]], [[900.0]]]), torch.ones(4, 1, dtype=torch.bool))
    >>> trimmed(local, 0.2).values.tolist()
    [[3.0]]
    """
    values, n = _ordered(local)
    k = torch.minimum((share * n.double() - 1e-9).ceil().long(), (n - 1).clamp(min=0) // 2)
    rank = torch.arange(len(values), device=n.device)[:, None]
    inside = (rank >= k) & (rank < n - k)
    total = torch.where(inside[..., None], values, 0.0).sum(0)
    return PerClass(total / (n - 2 * k).clamp(min=1)[:, None], n > 0)


def geometric(local: PerClass, steps: int = STEPS) -> PerClass:
    """The point with the least sum of distances to what the clients sent, by so many steps of Weiszfeld's iteration
    from the coordinate median.

        p_c = argmin_x sum_{q in Q_c} ||x - p_{q,c}||
        x  <- sum_q w_q p_{q,c} / sum_q w_q        w_q = 1 / ||x - p_{q,c}||

    A distance counts as at least a thousandth of the median one at the start, so that a step never divides by zero. A
    share a < 1/2 of Q_c cannot move it farther from any point than 2 (1 - a) / (1 - 2 a) times the largest distance of
    the others from there. local: [R, C, d] -> [C, d]

    >>> three = PerClass(torch.tensor([[[0.0, 0.0]], [[0.0, 2.0]], [[0.0, 900.0]]]), torch.ones(3, 1, dtype=torch.bool))
    >>> geometric(three).values.round(decimals=2).tolist()
    [[0.0, 2.0]]
    """
    start = median(local)
    at, member = start.values, local.mask.to(local.values.dtype)
    least = 1e-3 * median(PerClass((local.values - at).norm(dim=-1, keepdim=True), local.mask)).values[:, 0]
    for _ in range(steps):
        weight = member / torch.maximum((local.values - at).norm(dim=-1), least).clamp(min=1e-12)
        weight = weight / weight.sum(0).clamp(min=1e-12)
        at = (weight[..., None] * local.values).sum(0)
    return PerClass(torch.where(start.mask[:, None], at, 0.0), start.mask)


def limited(local: PerClass, times: float) -> PerClass:
    """Local prototypes, those that are too long shortened.

        p_{q,c} * min( 1, times * m / ||p_{q,c}|| )        m = median over q of the median over c of ||p_{q,c}||

    The scale is that of all clients, each counted once, so it holds for a class of one or two as well, and somebody who
    claims many classes has no more say in it. times = 0 leaves all as they are. local: [R, C, d]

    >>> local = PerClass(torch.tensor([[[1.0]], [[2.0]], [[900.0]]]), torch.ones(3, 1, dtype=torch.bool))
    >>> limited(local, 1.5).values.flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    if not times:
        return local
    length = local.values.norm(dim=-1)
    of_client = median(PerClass(length.T[..., None], local.mask.T))
    usual = median(PerClass(of_client.values[:, None], of_client.mask[:, None])).values
    factor = (times * usual / length.clamp(min=torch.finfo(length.dtype).tiny)).clamp(max=1)
    return PerClass(local.values * factor[..., None], local.mask)


def centre(local: PerClass, rule: Rule, trim: float) -> PerClass:
    """One of `UNWEIGHTED`."""
    if rule == "median":
        return median(local)
    if rule == "trimmed":
        return trimmed(local, trim)
    if rule == "geometric":
        return geometric(local)
    raise ValueError(f"{rule} is a mean")


def clash(rule: Rule, **weights: float) -> str | None:
    """Why these weights cannot be used with a rule, or None.

    >>> clash("median", weighted=True)
    'with rule = median all clients count alike, and weighted = True has no effect'
    """
    if rule not in UNWEIGHTED:
        return None
    for name, value in weights.items():
        if value:
            return f"with rule = {rule} all clients count alike, and {name} = {value} has no effect"
    return None
