"""Centres of prototypes: against slow loops and scipy, and what a minority can do to them."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from federations import pair
from federations import weights_of as weights_of_client
from fedsap.message import PerClass, cost, select, table
from fedsap.methods import METHODS, FedMPS, FedProto, FedSAP
from fedsap.prototypes import combine, combine_replies, send, weights_of
from fedsap.robust import geometric, limited, median, trimmed

RULES = {
    "median": median,
    "trimmed": lambda local: trimmed(local, 0.2),
    "geometric": geometric,
}
rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
often = settings(derandomize=True, deadline=None, max_examples=60)


def federation(seed, clients=7, classes=4, d=5, holders=None):
    """Prototypes of which each client has some; with `holders`, class c is held by so many."""
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.normal(size=(clients, classes, d)) * 10 ** rng.uniform(-2, 2))
    mask = torch.from_numpy(rng.random((clients, classes)) < 0.6)
    for c, n in enumerate(holders or ()):
        mask[:, c] = torch.from_numpy(rng.permutation(clients) < n)
    return PerClass(values * mask[..., None], mask)


def sent(local, c):
    return local.values[local.mask[:, c], c].numpy()


def slow_median(points):
    return [sorted(k)[len(k) // 2] if len(k) % 2 else sum(sorted(k)[len(k) // 2 - 1 :][:2]) / 2 for k in points.T]


def slow_trimmed(points, share=0.2):
    n = len(points)
    k = min(math.ceil(round(share * n, 6)), (n - 1) // 2)
    return [sum(sorted(column)[k : n - k]) / (n - 2 * k) for column in points.T]


def total(x, points):
    return np.linalg.norm(points - x, axis=1).sum()


@often
@given(st.integers(0, 10_000), st.integers(1, 9))
def test_median_and_trimmed_mean_are_those_of_a_loop_over_classes_and_coordinates(seed, clients):
    local = federation(seed, clients)
    for made, slow in ((median(local), slow_median), (trimmed(local, 0.2), slow_trimmed)):
        assert torch.equal(made.mask, local.mask.any(0))
        for c in range(local.mask.shape[1]):
            expected = slow(sent(local, c)) if made.mask[c] else np.zeros(5)
            np.testing.assert_allclose(made.values[c], expected, rtol=1e-12, atol=1e-12)


@often
@given(st.integers(0, 10_000), st.integers(1, 9))
def test_no_point_has_a_smaller_sum_of_distances_than_the_geometric_median(seed, clients):
    local = federation(seed, clients, classes=2)
    made = geometric(local)
    for c in made.mask.nonzero().flatten().tolist():
        points = sent(local, c)
        best = minimize(total, points.mean(0), (points,), method="BFGS", tol=1e-10).fun
        best = min(best, *(total(p, points) for p in points))  # where it has no gradient
        assert total(made.values[c].numpy(), points) <= best * (1 + 1e-3) + 1e-9


@rule
@often
@given(st.integers(0, 10_000))
def test_the_order_of_clients_does_not_matter(rule, seed):
    local = federation(seed)
    shuffled = torch.from_numpy(np.random.default_rng(seed).permutation(7))
    other = rule(PerClass(local.values[shuffled], local.mask[shuffled]))
    torch.testing.assert_close(rule(local).values, other.values, rtol=1e-9, atol=1e-9)


@rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equal_prototypes_it_is_that_one(rule, dtype):
    local = PerClass(torch.full((5, 2, 3), 0.1, dtype=dtype), torch.ones(5, 2, dtype=torch.bool))
    torch.testing.assert_close(rule(local).values, local.values[0])


@rule
def test_of_one_client_it_is_its_own_and_of_two_the_middle(rule):
    local = federation(3, holders=(0, 1, 2, 2))
    made = rule(local)
    assert made.mask.tolist() == [False, True, True, True]
    assert torch.equal(made.values[0], torch.zeros(5, dtype=torch.float64))
    for c in (1, 2, 3):
        np.testing.assert_allclose(made.values[c], sent(local, c).mean(0))


@rule
@often
@given(st.integers(0, 10_000), st.sampled_from([3, 5, 6, 9]), st.floats(1, 12))
def test_a_minority_arbitrarily_far_away_moves_it_boundedly(rule, seed, clients, power):
    rng = np.random.default_rng(seed)
    local = federation(seed, clients, classes=1, holders=(clients,))
    few = (clients - 1) // 2 if rule is not RULES["trimmed"] else math.ceil(0.2 * clients)
    assume(few)
    honest = local.values[few:, 0]
    lies = rng.normal(size=(few, 1, 5)) * 10**power * float(honest.norm(dim=-1).max())
    attacked = rule(PerClass(torch.cat([torch.from_numpy(lies), local.values[few:]]), local.mask)).values[0]
    if rule is geometric:
        reach = (honest - honest.mean(0)).norm(dim=-1).max()
        share = few / clients
        assert (attacked - honest.mean(0)).norm() <= 2 * (1 - share) / (1 - 2 * share) * reach * 1.01
    else:
        assert (attacked >= honest.min(0).values - 1e-9).all()
        assert (attacked <= honest.max(0).values + 1e-9).all()


def test_the_mean_is_moved_as_far_as_somebody_likes():
    local = PerClass(torch.tensor([[[1.0]], [[1.0]], [[3e9]]]), torch.ones(3, 1, dtype=torch.bool))
    assert combine(local).values.item() > 9e8


def test_a_gross_lie_in_float32_costs_no_precision():
    honest = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(1))
    lie = torch.full((1, 3, 64), 1e30)
    everyone = torch.ones(5, 3, dtype=torch.bool)
    for one in RULES.values():
        made = one(PerClass(torch.cat([honest, lie]), everyone)).values
        assert torch.isfinite(made).all()
        assert made.abs().max() <= 2 * honest.abs().max()


@pytest.mark.parametrize(("n", "left"), [(1, 1), (2, 2), (3, 1), (4, 2), (5, 3), (10, 6), (15, 9), (16, 8)])
def test_a_fifth_is_rounded_up_but_leaves_something(n, left):
    local = PerClass(torch.arange(n).double()[:, None, None], torch.ones(n, 1, dtype=torch.bool))
    cut = (n - left) // 2
    assert trimmed(local, 0.2).values.item() == pytest.approx(sum(range(cut, n - cut)) / left)


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_lengths_are_limited_by_the_median_over_clients_of_their_medians(times):
    local = federation(5, clients=6)
    usual = np.median([np.median(local.values[q][local.mask[q]].norm(dim=-1)) for q in range(6) if local.mask[q].any()])
    made = limited(local, times)
    assert torch.equal(made.mask, local.mask)
    for q, c in local.mask.nonzero().tolist():
        p = local.values[q, c]
        torch.testing.assert_close(made.values[q, c], p * min(1.0, times * usual / float(p.norm())))


def test_who_claims_many_classes_has_no_more_say_in_the_usual_length():
    values, mask = torch.zeros(3, 9, 1), torch.zeros(3, 9, dtype=torch.bool)
    values[0], mask[0] = 1000.0, True
    for q in (1, 2):
        values[q, 0], mask[q, 0] = 1.0, True
    assert limited(PerClass(values, mask), 1.0).values.max() == 1.0


def test_with_limit_zero_nothing_is_touched():
    local = federation(1)
    assert limited(local, 0.0) is local


def test_zero_prototypes_stay_zero():
    nothing = PerClass(torch.zeros(3, 2, 4), torch.ones(3, 2, dtype=torch.bool))
    for made in (limited(nothing, 1.0), *(one(nothing) for one in RULES.values())):
        assert torch.equal(made.values, torch.zeros_like(made.values))


@pytest.mark.parametrize("name", RULES)
def test_replies_are_combined_by_the_rule_after_the_limit(name):
    local = federation(2, holders=(3, 4, 5, 6))
    made = combine_replies(send(local), rule=name, trim=0.2, limit=1.5)
    assert torch.equal(made.values, RULES[name](limited(local, 1.5)).values)


def test_confidence_is_the_mean_probability_of_the_true_class():
    logits, y = torch.randn(20, 4, generator=torch.Generator().manual_seed(2)), torch.arange(20) % 3
    p = logits.softmax(-1)
    means = torch.stack([p[y == c].mean(0) if c < 3 else torch.zeros(4) for c in range(4)])[None]
    mask = torch.tensor([[True, True, True, False]])
    message = send(PerClass(torch.zeros(1, 4, 2), mask), None, PerClass(means, mask))
    for c in range(3):
        expected = sum(float(p[i, c]) for i in range(20) if y[i] == c) / int((y == c).sum())
        assert table(message, "confidence").values[0, c].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", [FedProto(rule="confidence"), FedMPS(rule="confidence")])
def test_a_client_sends_one_number_more_per_class_that_its_trained_head_gives(method):
    simulation, models, mine, *_ = pair(method, "small")
    plain, *_ = pair(replace(method, rule="mean"), "small")
    message = simulation.train(1, {}, {}, [0, 1, 2, 3]).message
    without = plain.train(1, {}, {}, [0, 1, 2, 3]).message
    for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
        classes = len(y.unique())
        more = cost(select(message, torch.tensor(q))).numbers - cost(select(without, torch.tensor(q))).numbers
        assert more == classes
        model.load_state_dict(weights_of_client(simulation, q))
        with torch.no_grad():
            p = model.eval()(x)[1].softmax(-1)
        for c in y.unique():
            expected = p[y == c, c].mean()
            torch.testing.assert_close(table(message, "confidence").values[q, c, 0], expected)


def test_a_mean_by_confidence_and_by_samples_and_confidence():
    local = PerClass(torch.tensor([[[1.0]], [[4.0]]]), torch.ones(2, 1, dtype=torch.bool))
    sure = PerClass(torch.tensor([[[0.25]], [[0.75]]]), local.mask)
    assert combine_replies({"proto": local, "confidence": sure}).values.item() == pytest.approx((0.25 + 3) / 1)
    counted = {**send(local, torch.tensor([[9], [1]])), "confidence": sure}
    assert combine_replies(counted).values.item() == pytest.approx((9 * 0.25 + 0.75 * 4) / (9 * 0.25 + 0.75))


def test_nobody_counts_more_than_by_being_sure():
    claims = PerClass(torch.tensor([[[0.5]], [[1e9]], [[-3.0]]]), torch.ones(3, 1, dtype=torch.bool))
    assert weights_of({"confidence": claims}).flatten().tolist() == pytest.approx([0.5, 1.0, 1e-6])


@pytest.mark.parametrize(
    "method",
    [
        FedProto(rule="median", weighted=True),
        FedSAP(rule="trimmed", weighted=True),
        FedSAP(rule="geometric", agreement=2.0),
    ],
)
def test_weights_that_a_rule_has_no_use_for_are_refused(method):
    assert "count alike" in method.degenerate()


@pytest.mark.parametrize("method", [FedProto(), FedSAP(), FedMPS()])
def test_the_plain_mean_is_the_default(method):
    assert (method.rule, method.limit) == ("mean", 0)


@pytest.fixture
def attack(monkeypatch):
    """benchmarks/attack.py; its methods are forgotten afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    module = __import__("attack")
    for one in module.METHODS.values():
        monkeypatch.setitem(METHODS, one.name, one)
    yield module
    del sys.modules["attack"]


def honest(attack, tmp_path, method, kind, **options):
    """Accuracies of the nine honest clients of ten."""
    options = {"start": "common", **options}
    return attack.measured(method, kind, options, seeds=[1234], rounds=60, ways=4, out=tmp_path / kind / str(options))


@pytest.mark.parametrize("method", ["fedproto", "fedsap", "fedmps"])
def test_prototypes_times_a_thousand_ruin_the_plain_mean_and_hardly_touch_a_robust_centre(attack, tmp_path, method):
    clean = honest(attack, tmp_path, method, "none")
    ruined = honest(attack, tmp_path, method, "scaled")
    assert "became nan" in ruined or ruined["head"][0] < clean["head"][0] - 0.2
    found = honest(attack, tmp_path, method, "scaled", rule="geometric", limit=1.0)
    for measure in attack.MEASURES:
        assert found[measure][0] > clean[measure][0] - 0.02, measure


@pytest.mark.parametrize("name", RULES)
def test_prototypes_with_their_classes_changed_about_hardly_touch_a_robust_centre(attack, tmp_path, name):
    clean = honest(attack, tmp_path, "fedproto", "none")
    found = honest(attack, tmp_path, "fedproto", "swapped", rule=name)
    for measure in attack.MEASURES:
        assert found[measure][0] > clean[measure][0] - 0.02, measure


def test_an_attacker_lies_about_its_own_prototypes_alone(attack):
    local = federation(4, clients=3, holders=(3, 3, 2, 0))
    clients = torch.tensor([2, 5, 7])
    for kind in ("scaled", "swapped"):
        made = table(attack.corrupted(send(local), clients, 5, kind), "proto")
        assert torch.equal(made.mask, local.mask)
        assert torch.equal(made.values[[0, 2]], local.values[[0, 2]])
        own = local.mask[1].nonzero().flatten()
        if kind == "scaled":
            torch.testing.assert_close(made.values[1], 1000 * local.values[1])
        else:
            assert not torch.equal(made.values[1], local.values[1])
            assert torch.equal(made.values[1, own].sort(0).values, local.values[1, own].sort(0).values)
