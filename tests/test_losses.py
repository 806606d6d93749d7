"""Loss terms against the equations written out sample by sample."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning import losses as library
from pytorch_metric_learning import reducers

import oracle
from fedsap import losses
from fedsap.message import PerClass

shapes = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(2, 5), st.integers(1, 7), st.integers(0, 10**6))


def drawn(q, b, c, d, seed, relu=False):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(q, b, d, generator=g, dtype=torch.float64)
    h = (h.relu() + 0.01 if relu else h).requires_grad_()
    y = torch.randint(c, (q, b), generator=g)
    mask = torch.rand(q, c, generator=g) < 0.6
    bank = torch.randn(q, c, d, generator=g, dtype=torch.float64) * mask[..., None]
    return h, y, PerClass(bank, mask)


def as_dicts(bank):
    return [{c: v[c] for c in m.nonzero().flatten().tolist()} for v, m in zip(bank.values, bank.mask, strict=True)]


def same_with_gradient(fast, slow, h):
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    one, other = (torch.autograd.grad(v.sum(), h, retain_graph=True, materialize_grads=True)[0] for v in (fast, slow))
    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@settings(deadline=None, max_examples=25)
@given(shapes, st.sampled_from(["mean", "sum"]))
def test_align(shape, reduction):
    h, y, bank = drawn(*shape)
    slow = torch.stack([oracle.align(*a) for a in zip(h, y, as_dicts(bank), strict=True)])
    fast = losses.align(h, y, bank, reduction)
    same_with_gradient(fast, slow * (h.shape[-1] if reduction == "sum" else 1), h)


@settings(deadline=None, max_examples=25)
@given(shapes, st.sampled_from([1.0, 8.0, 32.0]))
def test_proxy(shape, scale):
    h, y, bank = drawn(*shape, relu=True)
    slow = torch.stack([oracle.proxy(*a, scale) for a in zip(h, y, as_dicts(bank), strict=True)])
    same_with_gradient(losses.proxy(h, y, bank, scale), slow, h)


@settings(deadline=None, max_examples=15)
@given(shapes)
def test_contrast(shape):
    h, y, bank = drawn(*shape)
    slow = torch.stack([oracle.contrast(*a) for a in zip(h, y, as_dicts(bank), strict=True)])
    same_with_gradient(losses.contrast(h, y, bank), slow, h)


@settings(deadline=None, max_examples=15)
@given(shapes)
def test_soften(shape):
    q, b, c, _, seed = shape
    logits, y, soft = drawn(q, b, c, c, seed)
    slow = torch.stack([oracle.soften(*a, 5.0) for a in zip(logits, y, as_dicts(soft), strict=True)])
    same_with_gradient(losses.soften(logits, y, soft, 5.0), slow, logits)


def test_soften_is_torch_kl_div():
    logits, y, soft = drawn(1, 4, 3, 3, 5)
    soft = PerClass(soft.values, torch.ones_like(soft.mask))
    expected = torch.nn.functional.kl_div(
        (logits[0] / 5).log_softmax(-1), (soft.values[0][y[0]] / 5).softmax(-1), reduction="batchmean"
    )
    torch.testing.assert_close(losses.soften(logits, y, soft, 5.0)[0], expected)


def test_cross_entropy_over_own_classes_only():
    logits = torch.tensor([[[2.0, 1.0, 9.0]]])
    own = torch.tensor([[True, True, False]])
    found = losses.cross_entropy(logits, torch.tensor([[0]]), own)
    assert float(found) == pytest.approx(math.log(1 + math.exp(-1)))


def test_proxy_over_own_classes_only():
    """Worked out by hand: at 45 degrees to both own prototypes, the softmax over two equal logits gives log 2."""
    bank = PerClass(torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool))
    h, own = torch.tensor([[[1.0, 1.0, 5.0]]]), torch.tensor([[True, True, False]])
    assert float(losses.proxy(h, torch.tensor([[0]]), bank, 32.0, own)) == pytest.approx(math.log(2))


@pytest.mark.parametrize("loss", [losses.align, lambda *a: losses.proxy(*a, scale=32.0)])
def test_an_empty_bank_gives_zero_with_zero_gradient(loss):
    h, y, bank = drawn(2, 4, 3, 5, 1)
    value = loss(h, y, PerClass(bank.values * 0, bank.mask & False))
    assert torch.equal(value, torch.zeros_like(value))
    assert torch.equal(torch.autograd.grad(value.sum(), h)[0], torch.zeros_like(h))


def test_an_embedding_of_length_zero_gives_finite_gradients():
    h = torch.zeros(1, 1, 3, requires_grad=True)
    bank = PerClass(torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool))
    value = losses.proxy(h, torch.tensor([[0]]), bank, 32.0)
    assert torch.isfinite(torch.autograd.grad(value.sum(), h)[0]).all()


def test_classes_without_prototype_never_enter_the_softmax():
    h, y, bank = drawn(1, 3, 4, 5, 2)
    known = PerClass(bank.values, torch.tensor([[True, True, False, False]]))
    y = torch.tensor([[0, 1, 0]])
    wild = PerClass(torch.where(known.mask[..., None], bank.values, 1e6), known.mask)
    torch.testing.assert_close(losses.proxy(h, y, known, 32.0), losses.proxy(h, y, wild, 32.0))


def by_library(kind, h, y, bank, scale):
    """Per-sample losses of pytorch-metric-learning with the prototypes of each client as its proxies, [Q, B]; with its
    own mean where it has no losses of samples (Proxy Anchor)."""
    found = []
    for one, labels, rows in zip(h, y, bank.values, strict=True):
        classes, d = rows.shape
        if kind == "anchor":
            loss = library.ProxyAnchorLoss(classes, d, margin=0.1, alpha=scale)
            loss.proxies = torch.nn.Parameter(rows)
        elif kind == "softmax":
            loss = library.NormalizedSoftmaxLoss(classes, d, temperature=1 / scale, reducer=reducers.DoNothingReducer())
            loss.W = torch.nn.Parameter(rows.T)
        else:
            loss = library.ProxyNCALoss(classes, d, softmax_scale=scale, reducer=reducers.DoNothingReducer())
            loss.proxies = torch.nn.Parameter(rows)
        said = loss(one, labels)
        found.append(said if kind == "anchor" else said["loss"]["losses"])
    return torch.stack(found)


def whole(q, b, c, d, seed):
    """Samples, labels and a bank that has all classes."""
    h, y, bank = drawn(q, b, c, d, seed)
    g = torch.Generator().manual_seed(seed + 1)
    rows = torch.randn(q, c, d, generator=g, dtype=torch.float64).requires_grad_()
    return h, y, PerClass(rows, torch.ones_like(bank.mask))


@settings(deadline=None, max_examples=20)
@given(shapes, st.sampled_from([1.0, 9.0, 32.0]))
def test_proxy_losses_are_those_of_pytorch_metric_learning(shape, scale):
    h, y, bank = whole(*shape)
    softmax, nca = (by_library(kind, h, y, bank, scale) for kind in ("softmax", "nca"))
    anchor = by_library("anchor", h, y, bank, scale)
    same_with_gradient(losses.proxy(h, y, bank, scale), softmax.mean(1), h)
    same_with_gradient(losses.proxy(h, y, bank, 2 * scale), nca.mean(1), h)  # ProxyNCA++: the own class below the line
    same_with_gradient(losses.proxy_anchor(h, y, bank, scale), anchor, h)


@settings(deadline=None, max_examples=20)
@given(shapes)
def test_proxy_nca_is_the_librarys_without_the_own_class_below_the_line(shape):
    """From its probability p of the own class: -log( p / (1 - p) ). With scale 1, so that 1 - p is not lost."""
    h, y, bank = whole(*shape)
    log_p = -by_library("nca", h, y, bank, 1.0)
    same_with_gradient(losses.proxy_nca(h, y, bank, 1.0), (torch.log1p(-log_p.exp()) - log_p).mean(1), h)


@settings(deadline=None, max_examples=25)
@given(shapes, st.sampled_from([1.0, 9.0]))
def test_proxy_nca_and_anchor_with_missing_prototypes(shape, scale):
    h, y, bank = drawn(*shape, relu=True)
    nca = torch.stack([oracle.proxy_nca(*a, scale) for a in zip(h, y, as_dicts(bank), strict=True)])
    same_with_gradient(losses.proxy_nca(h, y, bank, scale), nca, h)
    anchor = torch.stack([oracle.proxy_anchor(*a, scale) for a in zip(h, y, as_dicts(bank), strict=True)])
    same_with_gradient(losses.proxy_anchor(h, y, bank, scale), anchor, h)


@pytest.mark.parametrize("loss", [losses.proxy, losses.proxy_nca, losses.proxy_anchor])
def test_prototypes_of_other_classes_than_the_given_do_not_count(loss):
    h, y, bank = whole(2, 6, 5, 4, 0)
    own = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]]).bool()
    fewer = PerClass(bank.values * own[..., None], own)
    torch.testing.assert_close(loss(h, y, bank, 4.0, own), loss(h, y, fewer, 4.0))
