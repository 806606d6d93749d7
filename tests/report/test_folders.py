"""Folders that are not whole cost a line each; the report of the others is made."""

import json
import shutil

import pytest

from fedsap.errors import UserError
from fedsap.report import write_report
from fedsap.report.read import find, load


@pytest.fixture
def runs(trained, tmp_path):
    out = tmp_path / "runs"
    shutil.copytree(trained / "fedsap-1", out / "good", ignore=shutil.ignore_patterns("snapshots"))
    shutil.copytree(trained / "fedproto-1", out / "bad", ignore=shutil.ignore_patterns("snapshots"))
    return out


def empty(bad):
    shutil.rmtree(bad)
    bad.mkdir()


def no_config(bad):
    (bad / "config.json").unlink()


def no_partition(bad):
    (bad / "partition.json").unlink()


def torn_config(bad):
    (bad / "config.json").write_text('{"preset": "pa')


def torn_middle(bad):
    lines = (bad / "metrics.jsonl").read_text().splitlines()
    (bad / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:50], *lines[2:]]) + "\n")


def no_round(bad):
    (bad / "metrics.jsonl").write_text("")


def other_version(bad):
    rows = [json.loads(line) for line in (bad / "metrics.jsonl").read_text().splitlines()]
    (bad / "metrics.jsonl").write_text("".join(json.dumps({"round": r["round"], "acc": 1}) + "\n" for r in rows))
    (bad / "environment.json").write_text(json.dumps({"fedsap": "9.9"}))


def other_rows(bad):
    rows = [json.loads(line) for line in (bad / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["up"] = "lots"
    (bad / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def not_objects(bad):
    (bad / "metrics.jsonl").write_text("1\n2\n")


def other_clients(bad):
    part = json.loads((bad / "partition.json").read_text())
    part["classes"].pop()
    (bad / "partition.json").write_text(json.dumps(part))


def binary(bad):
    (bad / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")


HARM = [empty, no_config, no_partition, torn_config, torn_middle, no_round, other_version, other_rows, not_objects,
        other_clients, binary]  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_one_line_and_the_rest(runs, tmp_path, harm):
    harm(runs / "bad")
    lines = []
    (page,) = write_report([runs], tmp_path / "out", ["md"], lines.append)
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert str(runs / "bad") in lines[0]
    assert "FedSAP" in page.read_text()
    assert "FedProto" not in page.read_text()
    if harm is other_version:
        assert "9.9" in lines[0]


def test_a_last_line_cut_off_is_a_run_that_is_not_over(runs, tmp_path):
    bad = runs / "bad"
    (bad / "result.json").unlink()
    lines = (bad / "metrics.jsonl").read_text().splitlines()
    (bad / "metrics.jsonl").write_text("\n".join([*lines[:3], lines[3][:40]]))
    told = []
    write_report([runs], tmp_path / "out", ["md"], told.append)
    assert told == [f"{bad}: not over (round 3 of 4); in the curves, not in the tables"]


def test_damaged_snapshots_cost_a_line_and_the_picture(trained, tmp_path):
    shutil.copytree(trained / "fedsap-1", tmp_path / "run")
    (tmp_path / "run" / "snapshots" / "round-000002.npz").write_bytes(b"PK no")
    (tmp_path / "run" / "snapshots" / "images.npz").write_bytes(b"")
    lines = []
    write_report([tmp_path / "run"], tmp_path / "out", ["html", "md"], lines.append)
    assert len(lines) == 1
    assert "round-000002.npz" in lines[0]


def test_the_same_run_twice_is_no_second_seed(trained, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(trained / "fedsap-1", tmp_path / name, ignore=shutil.ignore_patterns("snapshots"))
    lines = []
    (run,) = load(find([tmp_path], lines.append), lines.append)
    assert run.folder.name == "a"
    assert lines == [f"{tmp_path / 'b'}: the same run as {tmp_path / 'a'}; left out"]


def test_nothing_at_all_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        write_report([tmp_path / "missing"], tmp_path / "out")
    with pytest.raises(UserError, match="holds no run"):
        write_report([tmp_path], tmp_path / "out")
    with pytest.raises(UserError, match="--format: got 'pdf', takes html, md, tex"):
        write_report([tmp_path], tmp_path / "out", ["pdf"])


def test_a_hundred_and_eight_runs(fabricated, tmp_path):
    """The paper's number of runs, with few rounds."""
    assert fabricated.paper(tmp_path / "runs", 5, (1, 2, 3)) == 108
    lines = []
    paths = write_report([tmp_path / "runs"], tmp_path / "out", complain=lines.append)
    assert lines == []
    assert paths[0].stat().st_size < 5_000_000
    assert paths[1].read_text().count("FedMPS") >= 2
