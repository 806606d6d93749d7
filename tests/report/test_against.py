"""A report of runs that the paper has figures for puts these beside them."""

import json
import statistics

import pytest

from fedsap.config import resolve
from fedsap.report import against, tables
from fedsap.report.read import find, load
from fedsap.runs import read_json


@pytest.fixture(scope="module")
def runs(fabricated, tmp_path_factory):
    out = tmp_path_factory.mktemp("paper")
    data = fabricated.dataset("cifar10", 10)
    for config in resolve({"data": {"name": "cifar10"}}, ["fedsap", "fedproto"], [1234, 1235]):
        fabricated.fabricate(out / f"{config.method['name']}-{config.seed}", config, data)
    (other,) = resolve({"data": {"name": "cifar10"}, "train": {"rounds": 7}}, ["fedmps"], [1])
    fabricated.fabricate(out / "other", other, data)
    return out


def test_what_the_paper_has_stands_beside_what_was_measured(runs):
    found = {table.name: table for table in against.of_runs(load(find([runs], pytest.fail), pytest.fail))}
    assert list(found) == ["paper-table1", "paper-silhouette"]
    (block,) = found["paper-table1"].blocks
    assert [row[1].text.partition(" [")[0] for row in block.rows] == ["FedProto", "FedSAP"]
    for row, method, head in zip(block.rows, ("fedproto", "fedsap"), (89.04, 92.68), strict=True):
        means = [
            100 * read_json(runs / f"{method}-{s}" / "result.json")["accuracy"]["head"]["mean"] for s in (1234, 1235)
        ]
        assert (row[2].value, row[3].value) == (head, pytest.approx(statistics.fmean(means)))
        assert row[4].value == pytest.approx(statistics.fmean(means) - head)
    row = found["paper-silhouette"].blocks[0].rows[-1]
    rows = [json.loads(line) for line in (runs / "fedsap-1234" / "metrics.jsonl").read_text().splitlines()]
    assert row[2].value == 0.1549
    assert rows[9]["silhouette"] is not None


def test_it_is_in_every_format_with_its_footnotes(runs):
    for table in against.of_runs(load(find([runs], pytest.fail), pytest.fail)):
        assert "FedSAP" in tables.markdown(table)
        assert "appendix has one class per client here" in tables.latex(table) or table.name != "paper-table1"
        assert tables.latex(table).count(r"\begin{tabular}") == 1


def test_runs_that_the_paper_knows_nothing_of_have_no_such_table(trained):
    assert against.of_runs(load(find([trained], pytest.fail), pytest.fail)) == []
