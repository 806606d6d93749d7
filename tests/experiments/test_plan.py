"""Which runs are needed, and which are shared."""

from pathlib import Path

import pytest

from fedsap.config import resolve
from fedsap.errors import UserError
from fedsap.experiments.catalogue import catalogue, chosen
from fedsap.experiments.plan import Change, distinct, identity, places_of, plan, select
from fedsap.runs import decisive

OUT = Path("out")


def made(*words, **change):
    return plan(chosen(list(words)), OUT, Change(**change))


def folders(places):
    return {run.folder for run in distinct(places)}


def test_what_two_experiments_have_is_run_once():
    one, four = made("table1"), made("table4")
    assert (len(folders(one)), len(folders(four))) == (108, 15)
    assert len(folders(made("table1", "table4"))) == 108 + 15 - 6
    assert folders(made("convergence")) < folders(one)
    assert len(folders(made("scale")) - folders(one)) == 9


def test_what_is_looked_at_besides_makes_no_other_run():
    silhouettes, table = made("silhouette"), select(made("table1"), ["cifar10", "n=3"])
    assert folders(silhouettes) < folders(table)
    for place in table:
        for run in place.runs:
            assert run.config.eval.snapshots == [10, 50, 75, 100]
            assert run.config.eval.gradients == (place.variant in ("fedproto", "fedsap"))
    for place in select(made("table1"), ["cifar10", "n=4"]):
        assert place.runs[0].config.eval.snapshots == []


def test_readings_that_do_not_concern_a_method_share_its_runs():
    places = made("study", "study-pairs")
    of = {p.reading: folders([p]) for p in places if (p.setting, p.variant) == ("cifar10-n3", "fedproto")}
    assert of["s 8"] == of["the text"]
    assert of["64 pixels + s 8"] == of["64 pixels"]
    assert of["weight 1 for FedProto"] != of["the text"]
    assert of["the text"] == folders(
        [p for p in made("table1") if (p.setting, p.variant) == ("cifar10-n3", "fedproto")]
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cifar10", "n=3", "fedsap"], {("cifar10-n3", "fedsap")}),
        (["cifar10", "n=3", "n=4", "fedsap"], {("cifar10-n3", "fedsap"), ("cifar10-n4", "fedsap")}),
        (["cifar100-n10", "fedavg"], {("cifar100-n10", "fedavg")}),
    ],
)
def test_words_select(words, expected):
    assert {(p.setting, p.variant) for p in select(made("table1"), words)} == expected


def test_words_that_select_nothing_or_are_unknown():
    with pytest.raises(UserError, match="--only: got 'cifar11', takes words from: femnist, cifar10"):
        select(made("table1"), ["cifar11"])
    with pytest.raises(UserError, match="--only: nothing is cifar10 and n=20 at once"):
        select(made("table1"), ["cifar10", "n=20"])


def test_quick_runs_are_short_and_have_nothing_of_the_paper():
    for place in made("all", "study", quick=True):
        (run,) = place.runs
        assert run.config.train.rounds <= 10
        assert run.config.partition.shots <= 10
        assert run.config.model.name == ("cnn" if run.config.data.name == "femnist" else "small")
        assert place.experiment.paper == {}
        assert place.experiment.name.endswith("-quick")
    assert not folders(made("table1", quick=True)) & folders(made("table1"))


def test_rounds_are_shares_of_all_rounds_where_there_are_fewer():
    (place,) = select(made("silhouette", quick=True), ["fedsap"])
    assert [place.round(t) for t in (1, 10, 50, 75, 100)] == [1, 1, 5, 8, 10]
    assert place.runs[0].config.eval.snapshots == [1, 5, 8, 10]


def test_changed_keys_have_their_own_runs_and_name():
    places = made("table1", sets=("model.resolution=64",), seeds=(7,))
    assert {p.experiment.name for p in places} == {"table1-model.resolution-64"}
    assert {run.config.seed for run in distinct(places)} == {7}
    assert {run.config.model.resolution for run in distinct(places)} == {64}
    assert places[0].experiment.paper == catalogue()["table1"].paper


def test_identity_knows_no_seed_and_nothing_that_is_only_looked_at():
    def mark(seed=1, **keys):
        return identity(decisive(resolve(keys, (), [seed])[0]))

    assert mark() == mark(seed=2) == mark(eval={"gradients": True}) == mark(eval={"snapshots": [5]})
    assert mark() != mark(eval={"every": 10})


def test_runs_that_were_made_otherwise_find_their_place():
    config = resolve({"data": {"name": "cifar10"}, "method": {"name": "fedproto"}}, (), [1235])[0]
    found = places_of([(Path("anywhere"), decisive(config), 1235), (Path("else"), {"eval": 3}, 1)])
    assert {(p.experiment.name, p.setting, p.variant) for p in found} == {
        ("table1", "cifar10-n3", "fedproto"), ("silhouette", "cifar10-n3", "fedproto")
    }  # fmt: skip
    assert [run.folder for run in found[0].runs] == [Path("anywhere")]
