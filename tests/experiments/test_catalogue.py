"""The files of the paper's tables: they resolve, and hold what the paper prints."""

import pytest

from fedsap.errors import UserError
from fedsap.experiments.catalogue import catalogue, chosen, configs, groups
from fedsap.experiments.plan import Change


@pytest.mark.parametrize("quick", [False, True])
def test_every_run_has_a_configuration(quick):
    change = Change(quick=quick)
    for one in catalogue().values():
        for where in one.places():
            layer = one.layer(*where)
            looked = {k: v for k, v in layer.get("eval", {}).items() if k != "snapshots"}
            found = configs(change({**layer, "eval": looked}), one.seeds)
            assert [c.seed for c in found] == list(one.seeds)
            assert found[0].data.name == layer["data"]["name"]


def lead(measure, one, other, data):
    table = catalogue()["table1"]
    settings = [s for s in table.settings if s.startswith(data)]
    return [table.paper[measure, one, s].mean - table.paper[measure, other, s].mean for s in settings]


@pytest.mark.parametrize(
    ("measure", "data", "expected"),
    [
        ("head", "cifar100-", [7.68, 9.51, 10.69]),
        ("head", "cifar10-", [3.64, 4.22, 6.04]),
        ("proto", "cifar100-", [3.70, 5.75, 6.98]),
    ],
)
def test_leads_of_fedsap_over_fedproto_in_table_1(measure, data, expected):
    assert lead(measure, "fedsap", "fedproto", data) == pytest.approx(expected)


def test_table_1_is_whole():
    table = catalogue()["table1"]
    assert len(table.paper) == 63  # 4 methods x 9 settings x 2, without FedAvg's prototypes
    assert all(claim.std for claim in table.paper.values())
    assert lead("head", "fedsap", "fedmps", "femnist-") == pytest.approx([0.36, -0.39, -0.57])
    best = {s: max(table.variants, key=lambda v: table.paper["head", v, s].mean) for s in table.settings}
    assert list(best.values()) == ["fedsap", "fedmps", "fedmps", "fedsap", "fedavg", "fedavg", *["fedsap"] * 3]


def test_the_ablations_rows_are_runs_of_table_1():
    first, fourth = catalogue()["table1"], catalogue()["table4"]

    def content(one, variant):
        return configs(one.layer("", "cifar100-n10", variant), (1234,))[0]

    assert content(fourth, "neither") == content(first, "fedproto")
    assert content(fourth, "both") == content(first, "fedsap")
    assert fourth.paper["proto", "neither", "cifar100-n10"].mean == first.paper["proto", "fedmps", "cifar100-n10"].mean


def test_the_values_of_readings_that_are_joined_are_all_there():
    assert catalogue()["study"].readings["the text"] == {}
    joined = catalogue()["study-pairs"].readings["64 pixels + prototypes running along + s 8"]
    assert joined == {"model": {"resolution": 64}, "method": {"fedsap": {"proto_pass": "running", "proxy_scale": 8.0}}}


def test_each_reading_changes_a_run_of_table_1():
    study, pairs = catalogue()["study"], catalogue()["study-pairs"]
    for setting in study.settings:
        plain = {v: configs(study.layer("the text", setting, v), (1,)) for v in study.variants}
        for one, readings in ((study, list(study.readings)[1:]), (pairs, list(pairs.readings))):
            for reading in readings:
                changed = {v: configs(one.layer(reading, setting, v), (1,)) for v in one.variants}
                assert changed != plain, reading


def test_groups_and_names():
    assert groups()["figures"][0] == "convergence"
    assert {"table1", "table2", "table4", "scale"} <= set(groups()["all"])
    assert not {"study", "plus"} & set(groups()["all"])
    assert [one.name for one in chosen(["figures", "scale", "table1"])].count("scale") == 1
    with pytest.raises(UserError, match="reproduce: got 'tabel1', takes table1, "):
        chosen(["tabel1"])
