"""A second phase from a finished supervised run is the run of both phases."""

import json

import pytest

from fedsap.continued import take_over
from fedsap.errors import UserError
from fedsap.federation import dataset
from fedsap.runs import Run, Stopped, metrics
from test_runs import config, outcome, same

POOL = {"size": 30, "rounds": 3}


@pytest.fixture(scope="module")
def digits():
    return dataset(config())


@pytest.fixture
def supervised(tmp_path, digits):
    run = Run(tmp_path / "supervised" / "fedsap-1234", config())
    run.execute(digits)
    return run


@pytest.mark.parametrize("method", ["fedsap", "fedproto"])
def test_from_a_supervised_run_is_both_phases_at_once(tmp_path, digits, method):
    Run(tmp_path / "supervised" / method, config(method)).execute(digits)
    whole = Run(tmp_path / "whole", config(method, unlabelled=POOL))
    whole.execute(digits)
    second = Run(tmp_path / "second", config(method, unlabelled=POOL, eval={"snapshots": [6]}))
    take_over(second, [tmp_path / "supervised"], digits)
    assert [row["round"] for row in metrics(second.folder)] == [1, 2, 3, 4, 5, 6]
    second.check(resume=True)
    second.execute(digits)
    same(outcome(whole.folder), outcome(second.folder))


def test_a_run_that_has_begun_its_own_second_phase_is_left_alone(tmp_path, digits, supervised):
    second, seen = Run(tmp_path / "second", config(unlabelled=POOL)), []
    take_over(second, [supervised.folder], digits)
    with pytest.raises(Stopped):
        second.execute(digits, on_round=seen.append, stop=lambda: len(seen) == 1)
    take_over(second, [supervised.folder], digits)
    assert second.done == 7


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ({}, r"--from: goes on with unlabelled samples after the supervised rounds; takes unlabelled.size above 0"),
        ({"unlabelled": POOL | {"start": 2}}, r"--from: goes on .* unlabelled.start unset"),
        ({"unlabelled": POOL, "train": {"lr": 0.02}}, r"no finished supervised run .* has train.lr = 0.01, not 0.02"),
        ({"unlabelled": POOL, "train": {"rounds": 9}}, r"has train.rounds = 6, not 9"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, digits, supervised, user, said):
    second = Run(tmp_path / "second", config(**user))
    with pytest.raises(UserError, match=said):
        take_over(second, [supervised.folder.parent], digits)
    assert not second.folder.exists()


def test_an_unfinished_run_is_named(tmp_path, digits):
    first, seen = Run(tmp_path / "first", config()), []
    with pytest.raises(Stopped):
        first.execute(digits, on_round=seen.append, stop=lambda: len(seen) == 3)
    with pytest.raises(UserError, match=r"is at round 3, and takes 6"):
        take_over(Run(tmp_path / "second", config(unlabelled=POOL)), [first.folder], digits)


def test_labels_taken_from_the_labelled_ones_are_another_partition(tmp_path, digits):
    iid = {"partition": {"rule": "iid"}}
    Run(tmp_path / "first", config(**iid)).execute(digits)
    with pytest.raises(UserError, match=r"trained on other samples .* 'iid' deals out every sample"):
        take_over(Run(tmp_path / "second", config(unlabelled=POOL, **iid)), [tmp_path / "first"], digits)


def test_the_partition_says_what_is_in_the_pools(tmp_path, digits, supervised):
    second = Run(tmp_path / "second", config(unlabelled=POOL))
    take_over(second, [supervised.folder], digits)
    there = json.loads((second.folder / "partition.json").read_text())
    assert [len(pool) for pool in there["pools"]] == [30] * 4
