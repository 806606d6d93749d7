"""Figures of gradients and distances are those of the metrics."""

import json
import statistics

import numpy as np
import pytest

from fedsap.config import resolve
from fedsap.federation import dataset
from fedsap.report import pulls
from fedsap.report.content import content
from fedsap.report.read import find, load
from fedsap.report.study import arrange
from fedsap.runs import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("pulls")
    keys = {"partition": {"clients": 3}, "train": {"rounds": 3}, "eval": {"every": 1, "gradients": True}}
    configs = resolve(keys, ["fedsap", "fedproto"], [1])
    for config in configs:
        Run(out / config.method["name"], config).execute(dataset(config))
    return out


def mean(folder, method, name):
    rows = [json.loads(line)["noted"] for line in (folder / method / "metrics.jsonl").read_text().splitlines()]
    return [statistics.fmean(row[name]) for row in rows]


def test_lines_are_the_means_of_the_rows(folder):
    study = arrange(load(find([folder], pytest.fail), pytest.fail))
    drawn = {name: figure for name, _, figure in pulls.figures(study)}
    sap, proto = drawn["gradients"].axes
    assert [len(line.get_xydata()) for line in sap.lines] == [3, 3, 3]
    np.testing.assert_allclose(sap.lines[0].get_ydata(), mean(folder, "fedsap", "gradient ce"))
    np.testing.assert_allclose(proto.lines[1].get_ydata(), mean(folder, "fedproto", "gradient align"))
    (panel,) = drawn["distances"].axes
    for line, method in zip(panel.lines, ("fedsap", "fedproto"), strict=True):
        expected = np.divide(mean(folder, method, "distance"), mean(folder, method, "length"))
        np.testing.assert_allclose(line.get_ydata(), expected)
    shown = content(study, {}, [])
    assert shown["variants"][0]["curves"]["noted:distance"]["y"] == pytest.approx(
        mean(folder, "fedsap", "distance"), abs=1e-4
    )


def test_runs_without_them_have_no_such_figure(trained):
    assert not list(pulls.figures(arrange(load(find([trained], pytest.fail), pytest.fail))))
