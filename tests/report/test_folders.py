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


def a_class_that_is_none(bad):
    edit(bad / "partition.json", lambda part: part["classes"][0].__setitem__(0, 10))


def samples_that_are_no_number(bad):
    edit(bad / "partition.json", lambda part: part["shots"][0].__setitem__(0, "12"))


def fewer_samples_than_classes(bad):
    edit(bad / "partition.json", lambda part: part["shots"][0].pop())


def no_seed(bad):
    edit(bad / "config.json", lambda config: config.update(seed=None))


def not_a_number_in_the_configuration(bad):
    edit(bad / "config.json", lambda config: config["train"].update(lr=float("nan")))


def infinitely_much_sent(bad):
    lines = (bad / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    row["up"][0][0] = float("inf")
    (bad / "metrics.jsonl").write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


HARM = [empty, no_config, no_partition, torn_config, torn_middle, no_round, other_version, other_rows, not_objects,
        other_clients, binary, a_class_that_is_none, samples_that_are_no_number, fewer_samples_than_classes, no_seed,
        not_a_number_in_the_configuration, infinitely_much_sent]  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_one_line_and_the_rest(runs, tmp_path, harm):
    harm(runs / "bad")
    lines = []
    page, _ = write_report([runs], tmp_path / "out", ["md", "html"], lines.append)
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


def test_kept_rounds_that_are_not_laid_out_cost_a_line(trained, tmp_path):
    shutil.copytree(trained / "fedsap-1", tmp_path / "run")
    kept = tmp_path / "run" / "snapshots"
    for t in (1, 3, 5, 6, 7):
        shutil.copyfile(kept / "round-000002.npz", kept / f"round-{t:06d}.npz")
    lines = []
    (page,) = write_report([tmp_path / "run"], tmp_path / "out", ["html"], lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("embeddings: 6 of 7 kept rounds are laid out")
    assert lines[0] in page.read_text()


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
