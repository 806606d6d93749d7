"""The schedule's shapes at points worked out by hand."""

import pytest

from fedsap.methods import FedSAP
from fedsap.schedules import Schedule

SHAPES = ["constant", "linear", "cosine", "sigmoid", "step"]


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_nothing_before_the_start_and_all_from_the_end(shape):
    schedule = Schedule(shape, start=20, end=100, top=0.7)
    assert [schedule(t) for t in (1, 20)] == [0.0, 0.0]
    assert [schedule(t) for t in (100, 150)] == pytest.approx([0.7, 0.7])


@pytest.mark.parametrize("shape", SHAPES)
def test_never_falls(shape):
    schedule = Schedule(shape, start=3, end=17, top=2.0)
    values = [schedule(t) for t in range(1, 30)]
    assert values == sorted(values)


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.35), ("cosine", 0.35), ("sigmoid", 0.35), ("step", 0.7)])
def test_half_way(shape, half):
    assert Schedule(shape, 20, 100, 0.7)(60) == pytest.approx(half)


def test_step_jumps_at_half_way():
    schedule = Schedule("step", 20, 100, 0.7)
    assert (schedule(59), schedule(60)) == (0.0, 0.7)


def test_constant_is_full_from_the_first_round():
    assert Schedule("constant", 20, 100, 0.1)(1) == 0.1


def test_a_start_at_the_end_is_a_jump_after_it():
    assert [Schedule("linear", 5, 5, 1.0)(t) for t in (5, 6)] == [0.0, 1.0]


def test_the_papers_formula_from_start_zero():
    """lambda_t = M min(t / t_w, 1)."""
    schedule = Schedule("linear", start=0, end=40, top=0.7)
    assert [schedule(t) for t in (1, 20, 40, 90)] == pytest.approx([0.7 / 40, 0.35, 0.7, 0.7])


def test_defaults_of_fedsap_are_the_appendix_at_100_rounds():
    weights = [FedSAP().schedule(t, 100)["align"] for t in (20, 60, 100)]
    assert weights == pytest.approx([0.0, 0.35, 0.7])
