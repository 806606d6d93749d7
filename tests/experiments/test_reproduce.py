"""`fedsap reproduce` from data to tables, on tiny data, as a person calls it."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from fedsap.cli import app

SMALL = ["--quick", "--set", "partition.clients=3"]


def reproduce(tiny, out, *words):
    return CliRunner().invoke(
        app, ["reproduce", "--set", "train.rounds=3", *words, *SMALL, "--data", str(tiny), "--out", str(out)]
    )


def test_table_1_from_data_to_tables_and_again_from_what_is_there(tiny, tmp_path):
    words = ["table1", "--only", "cifar10,cifar100,n=4,n=20", "--json"]
    done = reproduce(tiny, tmp_path, *words)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["complete"]
    (table,) = found["experiments"]
    assert [(c["setting"], c["variant"], c["measure"]) for c in table["cells"]][:4] == [
        ("cifar10-n4", "fedavg", "head"), ("cifar10-n4", "fedproto", "head"), ("cifar10-n4", "fedproto", "proto"),
        ("cifar10-n4", "fedmps", "head"),
    ]  # fmt: skip
    assert all(0 <= c["mean"] <= 100 and c["paper"] is None for c in table["cells"])
    assert len(found["methods"]) == 8
    assert {"head_acc", "proto_cos_acc", "comm", "silhouette", "seconds"} <= found["methods"][0].keys()
    by_folder = {path.parent: json.loads(path.read_text()) for path in tmp_path.rglob("result.json")}
    assert len(by_folder) == 8
    for cell in table["cells"]:
        means = [100 * r["accuracy"][cell["measure"]]["mean"] for f, r in by_folder.items()
                 if r["method"] == cell["method"] and f"{r['dataset']}-n" in cell["setting"]]  # fmt: skip
        assert cell["mean"] == pytest.approx(means[0])
    assert not list(tmp_path.rglob("checkpoint*"))
    assert (tmp_path / "report.html").exists()
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    again = reproduce(tiny, tmp_path, *words)
    assert json.loads(again.stdout)["experiments"] == found["experiments"]
    assert "8 runs, 8 of them done" in again.stderr
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}


def test_full_runs_stand_beside_the_paper(tiny, tmp_path):
    sets = ["model.name=small", "model.weights=none", "partition.clients=3", "partition.shots=6", "train.rounds=2"]
    words = ["table1", "--only", "cifar10,n=3,fedsap,fedproto", "--seeds", "1,2"]
    words += [w for s in sets for w in ("--set", s)]
    command = ["reproduce", *words, "--data", str(tiny), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "Against the paper, Table 1" in text
    assert re.search(r"n=3 FedSAP(?: \[\w\])? Head 92\.68 ± 1\.29 \d+\.\d\d ± \d+\.\d\d [+-]\d+\.\d\d", text)
    assert re.search(r"n=3 FedSAP(?: \[\w\])? Prototype L2 86\.98 ± 2\.65 \[\w\] \d+\.\d\d", text)
    assert "Distance to the paper" in text
    (record,) = (path for path in tmp_path.glob("table1-*.json"))
    assert json.loads(record.read_text())["agreement"]["compared"] == 4
    assert len(list(tmp_path.rglob("result.json"))) == 4


def test_the_second_phase_is_measured_before_and_after(tiny, tmp_path):
    sets = ["unlabelled.rounds=2", "unlabelled.size=6", "partition.shots=6"]
    words = ["table3", "--only", "cifar10-n3-k25-u600", "--json", *(w for s in sets for w in ("--set", s))]
    done = reproduce(tiny, tmp_path, *words)
    assert done.exit_code == 0, done.stderr
    (table,) = json.loads(done.stdout)["experiments"]
    assert len(table["cells"]) == 8  # with the pool, and as many rounds without
    settings = {path.parent: json.loads(path.read_text())["method"] for path in tmp_path.rglob("config.json")}
    (path,) = (folder / "metrics.jsonl" for folder, method in settings.items() if method["consistency"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 5
    found = {c["measure"]: c["mean"] for c in table["cells"] if c["variant"] == "fedsap"}
    for measure, row in (("@100", rows[2]), ("@150", rows[4])):  # three of 100 rounds, five of 150
        assert found[f"silhouette{measure}"] == row["silhouette"]
        assert found[f"proto{measure}"] == pytest.approx(100 * sum(row["accuracy"]["proto"]) / 3)


def test_figures_are_drawn_from_shared_runs(tiny, tmp_path):
    done = reproduce(tiny, tmp_path, "scale", "silhouette", "maturity", "--only", "cifar10,fedsap,fedproto")
    assert done.exit_code == 0, done.stderr
    drawn = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert {"scale", "silhouette", "gradients", "distances", "tsne-rounds", "tsne-methods"} <= drawn
    assert "7 runs" in done.stderr  # 4 scales, FedProto, 2 more of the gap: FedSAP and FedProto are in all three


def test_data_that_is_missing_is_one_line_and_the_rest_is_made(tiny, tmp_path):
    words = ["table1", "--only", "n=3,fedsap", "--json"]
    done = reproduce(tiny, tmp_path, *words)
    assert done.exit_code == 2
    assert len([line for line in done.stderr.splitlines() if "femnist" in line]) == 1
    found = json.loads(done.stdout)
    assert not found["complete"]
    assert {c["setting"]: c["mean"] is None for c in found["experiments"][0]["cells"]} == {
        "femnist-n3": True, "cifar10-n3": False
    }  # fmt: skip


def test_nothing_to_run_on_is_one_line(tmp_path):
    done = reproduce(tmp_path, tmp_path / "out", "table1", "--only", "cifar10")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "data.root: cifar10 " in done.stderr.splitlines()[-1]


def test_out_of_time_it_stops_and_the_same_command_goes_on(tiny, tmp_path):
    words = ["table1", "--only", "cifar10,n=3,fedsap,fedproto"]
    done = reproduce(tiny, tmp_path, *words, "--minutes", "0")
    assert done.exit_code == 0
    assert "not complete: the same command goes on" in done.stdout
    assert not list(tmp_path.rglob("result.json"))
    assert reproduce(tiny, tmp_path, *words).exit_code == 0
    assert len(list(tmp_path.rglob("result.json"))) == 2


def test_with_nothing_measured_the_papers_values_are_there(tmp_path):
    words = ["reproduce", "table4", "--minutes", "0", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert done.exit_code == 0
    assert "n=10 both Prototype L2 84.68 ± 0.22 – –" in " ".join(done.stdout.split())


def test_killed_and_taken_up_it_gives_the_same_figures(tiny, tmp_path):
    words = ["table1", "--only", "cifar10,n=3,fedproto", "--set", "train.checkpoint=0", "--set", "eval.snapshots=[]"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert reproduce(tiny, whole, *words, "--set", "train.rounds=20").exit_code == 0
    command = [sys.executable, "-m", "fedsap.cli", "reproduce", *words, "--set", "train.rounds=20", *SMALL]
    process = subprocess.Popen([*command, "--data", tiny, "--out", cut], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and not list(cut.rglob("checkpoint.safetensors")):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(cut.rglob("result.json"))
    assert reproduce(tiny, cut, *words, "--set", "train.rounds=20").exit_code == 0
    (one,), (other,) = (list(folder.glob("table1*.json")) for folder in (whole, cut))
    assert json.loads(one.read_text())["cells"] == json.loads(other.read_text())["cells"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["table9"], "reproduce: got 'table9', takes table1, table2"),
        (["table1", "--seeds", "a"], "--seeds: got 'a', takes different whole numbers"),
        (["table1", "--only", "cifar"], "--only: got 'cifar', takes words from"),
        (["table1", "--set", "train.rouds=3"], "unknown key 'train.rouds'"),
    ],
)
def test_mistakes_are_one_line_with_exit_two(tmp_path, words, said):
    done = CliRunner().invoke(app, ["reproduce", *words, "--out", str(tmp_path / "o")])
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_experiments_are_listed():
    done = CliRunner().invoke(app, ["list", "experiments"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "Ablation: curriculum and proxy loss" in done.stdout
