"""Class means on the client, their combination on the server, and classification by the nearest one."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsap.message import Message, PerClass, table
from fedsap.robust import UNWEIGHTED, Rule, centre, limited

Distance = Literal["l2", "cosine"]


def class_sums(values: Tensor, y: Tensor, classes: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum of the vectors of each class and how many there are.

    values: [Q, B, d], y: [Q, B], valid: bool [Q, B] -> [Q, C, d], [Q, C]

    >>> sums, counts = class_sums(torch.tensor([[[1.0], [2.0], [4.0]]]), torch.tensor([[0, 0, 1]]), classes=3)
    >>> sums.flatten().tolist(), counts.flatten().tolist()
    ([3.0, 4.0, 0.0], [2.0, 1.0, 0.0])
    """
    member = F.one_hot(y, classes).to(values.dtype)
    if valid is not None:
        member = member * valid[..., None]
        values = torch.where(valid[..., None], values, 0.0)
    return member.mT @ values, member.sum(1)


def means(sums: Tensor, counts: Tensor) -> PerClass:
    """Local prototypes p_{q,c}: the mean vector of each class that has samples. sums: [Q, C, d], counts: [Q, C]"""
    return PerClass(sums / counts.clamp(min=1)[..., None], counts > 0)


def combine(local: PerClass, counts: Tensor | None = None, rule: Rule = "mean", trim: float = 0.2) -> PerClass:
    """The global bank: for each class the mean of the local prototypes of the clients that have it.

        p_c = 1/|Q_c| sum_{q in Q_c} p_{q,c}        or, with counts,   sum_q n_{q,c} p_{q,c} / sum_q n_{q,c}

    Some rules of `robust` put another centre in its place. local: [Q, C, d], counts: [Q, C] -> [C, d]

    >>> local = PerClass(torch.tensor([[[1.0], [5.0]], [[3.0], [0.0]]]), torch.tensor([[True, True], [True, False]]))
    >>> combine(local).values.flatten().tolist()
    [2.0, 5.0]
    """
    if rule in UNWEIGHTED:
        return centre(local, rule, trim)
    weight = local.mask.to(local.values.dtype) if counts is None else counts * local.mask
    total = weight.sum(0)
    mean = (local.values * weight[..., None]).sum(0) / torch.where(total > 0, total, 1.0)[:, None]
    return PerClass(mean, total > 0)


def mixed(local: PerClass, counts: Tensor, pool: PerClass, pool_counts: Tensor, share: float, unit: bool) -> PerClass:
    """Local prototypes of labelled and of accepted unlabelled samples together.

        p_c = (n_c p_c + share m_c u_c) / (n_c + share m_c), divided by its length if `unit`

    with p_c the mean of n_c labelled, and u_c that of m_c accepted ones. local, pool: [Q, C, d]; counts: [Q, C].

    >>> local, pool = (PerClass(torch.tensor([[v]]), torch.tensor([[True]])) for v in ([4.0, 0.0], [0.0, 6.0]))
    >>> mixed(local, torch.tensor([[3]]), pool, torch.tensor([[2]]), share=0.5, unit=False).values.tolist()
    [[[3.0, 1.5]]]
    """
    n, m = (torch.where(t.mask, c, 0).to(local.values)[..., None] for t, c in ((local, counts), (pool, pool_counts)))
    values = (n * local.values + share * m * pool.values) / (n + share * m).clamp(min=1e-12)
    there = local.mask | (pool.mask & (share > 0))
    return PerClass(torch.where(there[..., None], F.normalize(values, dim=-1) if unit else values, 0.0), there)


def nearest(score: Tensor) -> Tensor:
    """The class with the largest score, [..., C] -> [...]; -1, which is no class, where all are minus infinity.

    >>> nearest(torch.tensor([[0.0, 2.0], [-torch.inf, -torch.inf]])).tolist()
    [1, -1]
    """
    best, index = score.max(-1)
    return index.masked_fill(best == -torch.inf, -1)


def send(local: PerClass, counts: Tensor | None = None, probability: PerClass | None = None) -> Message:
    """A reply of prototypes. If they are to be weighed: with the number of samples behind each, and with the client's
    confidence in each, from the class means of its `probability`."""
    message: Message = {"proto": local}
    if counts is not None:
        message["count"] = PerClass(counts.to(local.values)[..., None], local.mask)
    return message if probability is None else message | confidence(probability)


def confidence(probability: PerClass) -> Message:
    """How sure a client's own head is of each of its classes, one number each, as it is sent:

        a_{q,c} = 1/n_{q,c} sum_{i of c} softmax(logits_i)_c

    probability: class means of softmax(logits), [Q, C, C] -> [Q, C, 1]

    >>> means = PerClass(torch.tensor([[[0.8, 0.2], [0.3, 0.7]]]), torch.ones(1, 2, dtype=torch.bool))
    >>> table(confidence(means), "confidence").values.flatten().tolist()
    [0.800000011920929, 0.699999988079071]
    """
    return {"confidence": PerClass(probability.values.diagonal(dim1=-2, dim2=-1)[..., None], probability.mask)}


def weights_of(replies: Message) -> Tensor | None:
    """What the replies say that local prototypes are to be weighed by, or None, [Q, C]. A confidence is a probability:
    what lies outside of (0, 1] is taken for the nearest that is not.

    >>> sure = PerClass(torch.tensor([[[0.5]], [[900.0]]]), torch.ones(2, 1, dtype=torch.bool))
    >>> weights_of({"confidence": sure}).flatten().tolist()
    [0.5, 1.0]
    """
    found = [table(replies, "count").values[..., 0]] if "count" in replies else []
    if "confidence" in replies:
        found.append(table(replies, "confidence").values[..., 0].clamp(1e-6, 1))
    return found[0] * found[1] if len(found) == 2 else found[0] if found else None


def agreement(local: PerClass, sharpness: float) -> Tensor:
    """How much each local prototype is to count by its agreement with the others, from the prototypes alone:

        w_{q,c} = exp( sharpness * cos(p_{q,c}, 1/|Q_c| sum_{q'} p_{q',c}) )

    local: [Q, C, d] -> [Q, C]

    >>> local = PerClass(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), torch.ones(2, 1, dtype=torch.bool))
    >>> agreement(local, 2**0.5).flatten().tolist() == [agreement(local, 2**0.5)[0, 0].item()] * 2
    True
    """
    return (sharpness * F.cosine_similarity(local.values, combine(local).values[None], dim=-1)).exp()


def combine_replies(
    replies: Message,
    before: PerClass | None = None,
    sharpness: float = 0.0,
    *,
    rule: Rule = "mean",
    trim: float = 0.2,
    limit: float = 0.0,
) -> PerClass:
    """The global bank from replies made by `send`; a class that nobody sent keeps its prototype of `before`. With
    `sharpness`, local prototypes count by their `agreement`; `limit` is that of `robust.limited`."""
    local, weight = limited(table(replies, "proto"), limit), weights_of(replies)
    if sharpness:
        agreed = agreement(local, sharpness)
        weight = agreed if weight is None else weight * agreed
    return kept(combine(local, weight, rule, trim), before)


def steadied(bank: PerClass, before: PerClass | None, inertia: float) -> PerClass:
    """inertia * p_c(t - 1) + (1 - inertia) * p_c(t) for the classes that both have.

    >>> old, new = (PerClass(torch.tensor([[v]]), torch.tensor([True])) for v in (1.0, 2.0))
    >>> steadied(new, old, 0.25).values.item()
    1.75
    """
    if before is None or not inertia:
        return bank
    both = (bank.mask & before.mask)[:, None]
    return PerClass(torch.where(both, inertia * before.values + (1 - inertia) * bank.values, bank.values), bank.mask)


def kept(bank: PerClass, before: PerClass | None) -> PerClass:
    """The bank, with the rows of `before` for the classes it lacks.

    >>> old = PerClass(torch.tensor([[1.0], [2.0]]), torch.tensor([True, True]))
    >>> kept(PerClass(torch.tensor([[5.0], [0.0]]), torch.tensor([True, False])), old).values.flatten().tolist()
    [5.0, 2.0]
    """
    if before is None:
        return bank
    return PerClass(torch.where(bank.mask[:, None], bank.values, before.values), bank.mask | before.mask)


def scores(h: Tensor, bank: PerClass, distance: Distance, classes: Tensor | None = None) -> Tensor:
    """How near each embedding is to each prototype: larger is nearer, minus infinity where there is none.

        l2      2 h.p - ||p||^2   (= ||h||^2 - ||h - p||^2: the order of the squared distances)
        cosine  cos(h, p)

    h: [Q, B, d], bank: [Q, C, d], classes: bool [Q, C] -> [Q, B, C]

    >>> bank = PerClass(torch.tensor([[[1.0, 0.0], [0.0, 5.0]]]), torch.ones(1, 2, dtype=torch.bool))
    >>> h = torch.tensor([[[1.0, 2.0]]])
    >>> scores(h, bank, "l2").argmax(-1).item(), scores(h, bank, "cosine").argmax(-1).item()
    (0, 1)
    """
    if distance == "cosine":
        near = F.normalize(h, dim=-1) @ F.normalize(bank.values, dim=-1).mT
    else:
        near = 2 * h @ bank.values.mT - bank.values.square().sum(-1)[:, None, :]
    there = bank.mask if classes is None else bank.mask & classes
    return near.masked_fill(~there[:, None, :], -torch.inf)
