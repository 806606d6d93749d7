"""Pseudo-labels, thresholds, mixed prototypes and the consistency loss, on cases worked out by hand."""

import math

import numpy as np
import pytest
import torch

from fedsap import losses, pseudo
from fedsap.message import PerClass
from fedsap.prototypes import mixed

# Three prototypes in the plane, at 0, 90 and 180 degrees; class 3 has none.
BANK = PerClass(
    torch.tensor([[[2.0, 0.0], [0.0, 5.0], [-1.0, 0.0], [0.0, 0.0]]], dtype=torch.float64),
    torch.tensor([[True, True, True, False]]),
)


def at(*degrees):
    angle = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angle.cos(), angle.sin()], -1)[None]


def test_distance_and_margin_are_those_of_the_angles():
    distance = pseudo.distances(at(30, 80, 150), BANK)
    label, near, margin = pseudo.nearest_two(distance)
    assert label.tolist() == [[0, 1, 2]]
    cos = {d: math.cos(math.radians(d)) for d in (30, 60, 10, 80, 100)}
    assert near[0].tolist() == pytest.approx([1 - cos[30], 1 - cos[10], 1 - cos[30]])
    assert margin[0].tolist() == pytest.approx([cos[30] - cos[60], cos[10] - cos[80], cos[30] - cos[60]])
    assert distance[0, :, 3].tolist() == [math.inf] * 3


def test_only_the_classes_asked_for_are_compared():
    own = torch.tensor([[True, False, True, True]])
    label, near, margin = pseudo.nearest_two(pseudo.distances(at(80), BANK, own))
    assert label.item() == 0
    assert near.item() == pytest.approx(1 - math.cos(math.radians(80)))
    assert margin.item() == pytest.approx(2 * math.cos(math.radians(80)))


def test_a_single_prototype_is_as_far_from_the_second_as_can_be():
    alone = torch.tensor([[False, True, False, False]])
    label, near, margin = pseudo.nearest_two(pseudo.distances(at(90, 30), BANK, alone))
    assert label.tolist() == [[1, 1]]
    assert margin[0].tolist() == pytest.approx([2.0 - near[0, 0].item(), 2.0 - near[0, 1].item()])


def test_without_a_prototype_there_is_no_label():
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    label, near, margin = pseudo.nearest_two(pseudo.distances(at(90), BANK, nothing))
    assert (label.item(), near.item(), margin.item()) == (-1, math.inf, 0.0)


def test_thresholds_are_quantiles_of_the_right_and_of_all():
    margin = torch.tensor([[0.05, 0.4, 0.2, 0.6, 0.9], [0.3, 0.1, 0.5, 0.0, 0.0]])
    right = torch.tensor([[True, True, False, True, False], [True, True, True, False, False]])
    own = torch.tensor([[0.1, 0.2, 0.9, 0.3, 7.0], [0.5, 0.25, math.inf, 0.0, 0.0]])
    valid = torch.tensor([[True, True, True, True, False], [True, True, True, False, False]])
    least, most = pseudo.calibrate(margin, right, own, valid, 0.1, 0.9)
    assert least.tolist() == pytest.approx([np.quantile([0.05, 0.4, 0.6], 0.1), np.quantile([0.3, 0.1, 0.5], 0.1)])
    assert most.tolist() == pytest.approx([np.quantile([0.1, 0.2, 0.9, 0.3], 0.9), np.quantile([0.5, 0.25], 0.9)])


def test_a_client_that_gets_nothing_right_accepts_nothing():
    values, never = torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.bool)
    least, most = pseudo.calibrate(values, never, values, never, 0.1, 0.9)
    assert (least.item(), most.item()) == (math.inf, 0.0)


def test_a_negative_quantile_of_margins_counts_as_zero():
    margin = torch.tensor([[-0.2, -0.1, 0.5]])
    every = torch.ones(1, 3, dtype=torch.bool)
    assert pseudo.calibrate(margin, every, margin, every, 0.1, 0.9)[0].item() == 0.0


def test_mixed_prototype_is_the_printed_fraction():
    h, u = torch.randn(1, 5, 3, dtype=torch.float64), torch.randn(1, 4, 3, dtype=torch.float64)
    local = PerClass(torch.stack([h[:, :2].mean(1), h[:, 2:].mean(1), torch.zeros(1, 3).double()], 1), MASK)
    pool = PerClass(torch.stack([torch.zeros(1, 3).double(), u.mean(1), torch.zeros(1, 3).double()], 1), ONE)
    made = mixed(local, torch.tensor([[2, 3, 0]]), pool, torch.tensor([[0, 4, 0]]), share=0.25, unit=False)
    second = (h[0, 2:].sum(0) + 0.25 * u[0].sum(0)) / (3 + 0.25 * 4)
    torch.testing.assert_close(made.values[0, 0], h[0, :2].mean(0))
    torch.testing.assert_close(made.values[0, 1], second)
    assert made.mask.tolist() == [[True, True, False]]
    unit = mixed(local, torch.tensor([[2, 3, 0]]), pool, torch.tensor([[0, 4, 0]]), share=0.25, unit=True)
    torch.testing.assert_close(unit.values[0, 1], second / second.norm())
    torch.testing.assert_close(unit.values[0, 2], torch.zeros(3).double())


MASK, ONE = torch.tensor([[True, True, False]]), torch.tensor([[False, True, False]])


def test_consistency_is_a_mean_over_accepted_samples_with_a_prototype():
    h = at(0, 45, 90, 10, 20).clone().requires_grad_()
    labels, accepted = torch.tensor([[0, 0, 1, 3, -1]]), torch.tensor([[True, True, False, True, True]])
    loss = losses.consistency(h, labels, accepted, BANK)
    assert loss.item() == pytest.approx((0 + 1 - math.cos(math.radians(45))) / 2)
    loss.sum().backward()
    assert (h.grad[0, 2:] == 0).all()
    assert h.grad[0, 1].norm() > 0


def test_no_accepted_sample_is_no_loss():
    h = at(0, 45).clone().requires_grad_()
    loss = losses.consistency(h, torch.tensor([[0, 1]]), torch.zeros(1, 2, dtype=torch.bool), BANK)
    loss.sum().backward()
    assert loss.item() == 0
    assert (h.grad == 0).all()


def test_an_embedding_of_zeros_has_a_finite_gradient():
    h = torch.zeros(1, 1, 2, dtype=torch.float64, requires_grad=True)
    losses.consistency(h, torch.tensor([[0]]), torch.ones(1, 1, dtype=torch.bool), BANK).sum().backward()
    assert torch.isfinite(h.grad).all()


def test_pseudo_labels_cost_their_logarithm_over_all_or_over_those_that_count():
    z = torch.tensor([[[1.0, 2.0, 4.0], [0.0, 3.0, 1.0], [5.0, 5.0, 5.0]]], dtype=torch.float64).requires_grad_()
    labels, counted = torch.tensor([[2, 0, -1]]), torch.tensor([[True, True, True]])
    each = [math.log(sum(math.exp(v) for v in row)) - row[c] for row, c in (((1, 2, 4), 2), ((0, 3, 1), 0))]
    assert losses.pseudo(z, labels, counted, None, "all").item() == pytest.approx(sum(each) / 3)
    assert losses.pseudo(z, labels, counted, None, "counted").item() == pytest.approx(sum(each) / 2)
    few = losses.pseudo(z, labels, counted, torch.tensor([[False, True, True]]), "counted")  # class 0 is not among them
    assert few.item() == pytest.approx(math.log(math.exp(2) + math.exp(4)) - 4)
    few.sum().backward()
    assert (z.grad[0, 1:] == 0).all()
    assert losses.pseudo(z, labels, ~counted, None, "counted").item() == 0


def test_divergence_is_a_mean_over_the_samples_that_count():
    target = torch.tensor([[[0.0, 2.0], [3.0, 0.0], [1.0, 1.0]]], dtype=torch.float64).requires_grad_()
    z = torch.zeros_like(target).requires_grad_()
    some = torch.tensor([[True, False, True]])
    p = 1 / (1 + math.exp(-2))
    by_hand = p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))
    found = losses.divergence(target, z, some)
    assert found.item() == pytest.approx(by_hand / 2)
    found.sum().backward()
    assert target.grad is None
    assert (z.grad[0, 1] == 0).all()
    assert losses.divergence(target, z, ~some & some).item() == 0
