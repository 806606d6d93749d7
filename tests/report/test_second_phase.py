"""What the report says of a run with unlabelled samples is what its folder says."""

import json
import shlex
import statistics

import numpy as np
import pytest

from fedsap.config import assignments, resolve
from fedsap.federation import dataset
from fedsap.report import figures, tables
from fedsap.report.content import command, content
from fedsap.report.read import find, load
from fedsap.report.study import POOL, arrange, over_rounds
from fedsap.runs import Run, decisive

KEYS = {
    "partition": {"clients": 6},
    "train": {"rounds": 4},
    "unlabelled": {"size": 20, "rounds": 3, "foreign": 0.2},
    "eval": {"every": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("taught")
    configs = resolve(KEYS, ["fedsap", "fedproto"], [1, 2])
    loaded = dataset(configs[0])
    for config in configs:
        Run(out / f"{config.method['name']}-{config.seed}", config).execute(loaded)
    return out


@pytest.fixture(scope="module")
def study(folder):
    return arrange(load(find([folder], pytest.fail), pytest.fail))


def rows(folder, seed):
    return [json.loads(line) for line in (folder / f"fedsap-{seed}" / "metrics.jsonl").read_text().splitlines()]


def mean(values):
    some = [v for v in values if v is not None]
    return statistics.fmean(some) if some else float("nan")


@pytest.mark.parametrize("name", POOL)
def test_curves_of_the_pool_are_the_metrics(study, folder, name):
    v = study.find(study.settings[0].label, "FedSAP")
    curve = over_rounds(v.runs, f"unlabelled:{name}")
    for t in range(1, 8):
        found = [mean(rows(folder, seed)[t - 1].get("unlabelled", {}).get(name, [])) for seed in (1, 2)]
        known = [x for x in found if x == x]
        assert curve.mean[t - 1] == pytest.approx(statistics.fmean(known) if known else float("nan"), nan_ok=True)
    assert np.isnan(curve.mean[:4]).all()
    assert not np.isnan(curve.mean[4])


def test_each_has_a_figure_that_marks_the_phase(study):
    made = {name: figure for name, _, figure in figures.figures(study, {})}
    assert {f"pool-{name.replace('_', '-')}" for name in POOL} <= made.keys()
    ax = made["pool-accepted"].axes[0]
    curve = over_rounds(study.find(study.settings[0].label, "FedSAP").runs, "unlabelled:accepted")
    np.testing.assert_allclose(ax.lines[0].get_ydata(), 100 * curve.mean)
    assert "semi-supervised" in [text.get_text() for text in ax.texts]
    assert ax.get_ylabel() == "accepted samples, %"


def test_before_and_after_are_the_ends_of_the_phases(study, folder):
    table = next(t for t in tables.tables(study) if t.name == "semi-supervised")
    (row,) = table.blocks[0].rows
    assert row[0].text == "FedSAP"
    for cell, t, key in ((1, 4, "silhouette"), (2, 4, "proto"), (3, 7, "silhouette"), (4, 7, "proto")):
        ends = [rows(folder, seed)[t - 1] for seed in (1, 2)]
        values = [r["silhouette"] if key == "silhouette" else 100 * mean(r["accuracy"]["proto"]) for r in ends]
        assert row[cell].value == pytest.approx(statistics.fmean(values))


def test_the_page_has_curves_phase_and_command(study, folder):
    data = content(study, {}, [])
    assert data["measures"]["unlabelled:right"] == "Right among the accepted"
    v = next(v for v in data["variants"] if v["label"] == "FedSAP")
    assert v["marks"] == [["semi-supervised", 5]]
    assert (v["round"], v["planned"]) == (7, 7)
    accepted = statistics.fmean(mean(rows(folder, seed)[6]["unlabelled"]["accepted"]) for seed in (1, 2))
    assert v["curves"]["unlabelled:accepted"]["y"][-1] == pytest.approx(100 * accepted, abs=1e-3)
    other = next(v for v in data["variants"] if v["label"] == "FedProto")
    assert "unlabelled:accepted" not in other["curves"]
    assert other["marks"] == []


def test_the_command_makes_the_same_configuration(study):
    for run in study.runs:
        words = shlex.split(command(run, [run.seed]))
        pairs = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        (config,) = resolve(assignments(pairs), [run.method], [run.seed])
        assert decisive(config) == run.config
