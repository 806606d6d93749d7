"""The loss terms of the methods: pure functions of tensors with a client axis, one number per client."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsap.message import PerClass

Reduction = Literal["mean", "sum"]
FAR = -1e9  # stands for minus infinity in a softmax; finite, so that masked terms have gradient zero and not NaN


def cross_entropy(logits: Tensor, y: Tensor, classes: Tensor | None = None) -> Tensor:
    """Mean over the batch of -log softmax(logits)[y]; with `classes`, the softmax runs over those only.

    logits: [Q, B, C], y: [Q, B], classes: bool [Q, C] -> [Q]

    >>> cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]))
    tensor([1.3863])
    """
    if classes is not None:
        logits = logits.masked_fill(~classes[:, None, :], FAR)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y).mean(1)


def of_labels(bank: PerClass, y: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's own row of a bank and whether it is there.

    bank: [Q, C, d], y: [Q, B] -> [Q, B, d], bool [Q, B]
    """
    rows = y[..., None].expand(*y.shape, bank.values.shape[-1])
    return bank.values.gather(1, rows), bank.mask.gather(1, y)


def align(h: Tensor, y: Tensor, bank: PerClass, reduction: Reduction = "mean") -> Tensor:
    """Squared distance of embeddings to the prototype of their class, L_Proto.

        mean  1 / (B d) sum_i ||h_i - p_{y_i}||^2        (nn.MSELoss)
        sum   1 / B     sum_i ||h_i - p_{y_i}||^2        (the squared norm as printed)

    A sample whose class has no prototype adds 0 and still counts in B. Prototypes are constants.
    h: [Q, B, d], y: [Q, B], bank: [Q, C, d] -> [Q]

    >>> bank = PerClass(torch.ones(1, 1, 4), torch.ones(1, 1, dtype=torch.bool))
    >>> align(torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.long), bank)
    tensor([1.])
    """
    prototype, known = of_labels(bank, y)
    squared = (h - prototype.detach()).square().sum(-1) * known
    return squared.mean(1) / (h.shape[-1] if reduction == "mean" else 1)


def proxy(h: Tensor, y: Tensor, bank: PerClass, scale: float, classes: Tensor | None = None) -> Tensor:
    """Cosine softmax over the prototype bank, L_Proxy.

        -1/B sum_i log( exp(s cos(h_i, p_{y_i})) / sum_c exp(s cos(h_i, p_c)) )

    The sum runs over the classes that have a prototype (and are in `classes`, if given); a sample whose own class
    has none adds 0. ProxyNCA++, a softmax over -s' |h^ - p^|^2 of unit vectors, is this with s = 2 s'.
    h: [Q, B, d], y: [Q, B], bank: [Q, C, d], classes: bool [Q, C] -> [Q]

    >>> bank = PerClass(torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool))
    >>> proxy(torch.tensor([[[3.0, 0.0]]]), torch.tensor([[0]]), bank, scale=1.0)
    tensor([0.3133])
    """
    cosine, there = _cosines(h, bank, classes)
    logits = (scale * cosine).masked_fill(~there[:, None, :], FAR)
    each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y)
    return torch.where(there.gather(1, y), each, 0.0).mean(1)


def proxy_nca(h: Tensor, y: Tensor, bank: PerClass, scale: float, classes: Tensor | None = None) -> Tensor:
    """ProxyNCA: squared distances of unit vectors, and only the other classes below the line.

        -1/B sum_i log( exp(-s |h^_i - p^_{y_i}|^2) / sum_{c != y_i} exp(-s |h^_i - p^_c|^2) )

    Shapes and missing prototypes as in `proxy`; a sample without another class adds 0 too. The loss may be negative.

    >>> bank = PerClass(torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool))
    >>> proxy_nca(torch.tensor([[[3.0, 0.0]]]), torch.tensor([[0]]), bank, scale=1.0)
    tensor([-2.])
    """
    cosine, there = _cosines(h, bank, classes)
    near = -scale * (2 - 2 * cosine)
    others = there[:, None, :] & ~F.one_hot(y, there.shape[1]).bool()
    each = near.masked_fill(~others, FAR).logsumexp(-1) - near.gather(2, y[..., None])[..., 0]
    return torch.where(there.gather(1, y) & others.any(-1), each, 0.0).mean(1)


def proxy_anchor(
    h: Tensor, y: Tensor, bank: PerClass, scale: float, classes: Tensor | None = None, margin: float = 0.1
) -> Tensor:
    """Proxy Anchor: every prototype looks at the samples of its class in the batch, and at the others.

        1/|P+| sum_{p in P+} log(1 + sum_{i in p} exp(-s (cos(h_i, p) - m)))
      + 1/|P|  sum_{p in P}  log(1 + sum_{i not in p} exp(s (cos(h_i, p) + m)))

    P are the prototypes there are, P+ those with samples of their class in the batch. Shapes as in `proxy`.

    >>> bank = PerClass(torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool))
    >>> proxy_anchor(torch.tensor([[[3.0, 0.0]]]), torch.tensor([[0]]), bank, scale=1.0, margin=0.0)
    tensor([0.6598])
    """
    cosine, there = _cosines(h, bank, classes)
    own = F.one_hot(y, there.shape[1]).bool()
    towards = F.pad((-scale * (cosine - margin)).masked_fill(~own, FAR), (0, 0, 0, 1)).logsumexp(1)
    away = F.pad((scale * (cosine + margin)).masked_fill(own, FAR), (0, 0, 0, 1)).logsumexp(1)
    seen = own.any(1) & there
    return (towards * seen).sum(1) / seen.sum(1).clamp(min=1) + (away * there).sum(1) / there.sum(1).clamp(min=1)


def _cosines(h: Tensor, bank: PerClass, classes: Tensor | None) -> tuple[Tensor, Tensor]:
    """cos(h_i, p_c), [Q, B, C], and which prototypes count, bool [Q, C]."""
    there = bank.mask if classes is None else bank.mask & classes
    return F.normalize(h, dim=-1) @ F.normalize(bank.values, dim=-1).mT, there


def contrast(h: Tensor, y: Tensor, bank: PerClass, tau: float = 0.5, base_tau: float = 0.07) -> Tensor:
    """Supervised contrastive loss of a batch and the prototypes of its labels, as in FedMPS.

    The 2B vectors are u = (h_1..h_B, p_{y_1}..p_{y_B}); with A(a) all others than a, and P(a) those of A(a) with a's
    label,

        tau / base_tau * 1/(2B) sum_a -1/|P(a)| sum_{p in P(a)} log( exp(u_a u_p / tau) / sum_{k in A(a)} exp(u_a u_k
        / tau) )

    Prototypes are constants and anchors too. A sample whose class has no prototype stands for it itself, as a constant.
    h: [Q, B, d], y: [Q, B], bank: [Q, C, d] -> [Q]
    """
    prototype, known = of_labels(bank, y)
    prototype = torch.where(known[..., None], prototype, h).detach()
    u = torch.cat([h, prototype], 1)
    label = torch.cat([y, y], 1)
    itself = torch.eye(u.shape[1], dtype=torch.bool, device=u.device)
    alike = (label[:, :, None] == label[:, None, :]) & ~itself
    similarity = ((u @ u.mT) / tau).masked_fill(itself, FAR)
    log_p = similarity.log_softmax(-1)
    per_anchor = -torch.where(alike, log_p, 0.0).sum(-1) / alike.sum(-1)
    return tau / base_tau * per_anchor.mean(1)


def consistency(h: Tensor, labels: Tensor, accepted: Tensor, bank: PerClass) -> Tensor:
    """Cosine distance of strong views to the prototype of their pseudo-label, L_Cons.

        1/|A| sum_{u in A} (1 - cos(h_u, p_{c_u}))

    A are the accepted samples of the batch whose class has a prototype; 0 if there are none.
    h: [Q, U, d], labels: [Q, U] (-1: none), accepted: bool [Q, U], bank: [Q, C, d] -> [Q]

    >>> bank = PerClass(torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool))
    >>> h = torch.tensor([[[2.0, 0.0], [3.0, 0.0], [1.0, 1.0]]])
    >>> consistency(h, torch.tensor([[0, 1, -1]]), torch.tensor([[True, True, False]]), bank)
    tensor([0.5000])
    """
    prototype, known = of_labels(bank, labels.clamp(min=0))
    counted = known & accepted & (labels >= 0)
    distance = 1 - F.cosine_similarity(h, prototype.detach(), dim=-1, eps=1e-12)
    return torch.where(counted, distance, 0.0).sum(1) / counted.sum(1).clamp(min=1)


def pseudo(
    logits: Tensor, labels: Tensor, counted: Tensor, classes: Tensor | None, over: Literal["all", "counted"]
) -> Tensor:
    """Cross-entropy of unlabelled samples with their pseudo-labels.

        1/N sum_{u counted} -log softmax(z_u)[c_u]

    N is the number of all samples, or of those that count; 0 if there are none. With `classes`, the softmax runs over
    those only, and a sample with another label does not count.
    logits z: [Q, U, C], labels c: [Q, U] (-1: none, and does not count), counted: bool [Q, U] -> [Q]

    >>> z, labels, counted = torch.zeros(1, 2, 4), torch.tensor([[3, 1]]), torch.tensor([[True, False]])
    >>> [round(pseudo(z, labels, counted, None, over).item(), 3) for over in ("all", "counted")]
    [0.693, 1.386]
    """
    counted = counted & (labels >= 0)
    if classes is not None:
        logits = logits.masked_fill(~classes[:, None, :], FAR)
        counted = counted & classes.gather(1, labels.clamp(min=0))
    each = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none").view(labels.shape)
    of = torch.ones_like(counted) if over == "all" else counted
    return torch.where(counted, each, 0.0).sum(1) / of.sum(1).clamp(min=1)


def divergence(target: Tensor, logits: Tensor, counted: Tensor) -> Tensor:
    """Mean over the samples that count of KL( softmax(t_u) || softmax(z_u) ); 0 if there are none. The target is a
    constant. target t, logits z: [Q, U, C], counted: bool [Q, U] -> [Q]

    >>> divergence(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), torch.ones(1, 2, dtype=torch.bool))
    tensor([0.])
    """
    log_target, log_p = target.detach().log_softmax(-1), logits.log_softmax(-1)
    each = (log_target.exp() * (log_target - log_p)).sum(-1)
    return torch.where(counted, each, 0.0).sum(1) / counted.sum(1).clamp(min=1)


def soften(logits: Tensor, y: Tensor, soft: PerClass, temperature: float) -> Tensor:
    """Divergence from the soft label of each sample's class: 1/B sum_i KL( softmax(g_{y_i}/T) || softmax(z_i/T) ).

    A class without a soft label adds 0. logits z: [Q, B, C], y: [Q, B], soft g: [Q, C, C] -> [Q]

    >>> soft = PerClass(torch.zeros(1, 2, 2), torch.ones(1, 2, dtype=torch.bool))
    >>> soften(torch.zeros(1, 3, 2), torch.tensor([[0, 1, 0]]), soft, temperature=5.0)
    tensor([0.])
    """
    target, known = of_labels(soft, y)
    log_target = (target.detach() / temperature).log_softmax(-1)
    log_p = (logits / temperature).log_softmax(-1)
    return ((log_target.exp() * (log_target - log_p)).sum(-1) * known).mean(1)
