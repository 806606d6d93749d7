"""Run folders: what is in them, and that a run which died anywhere goes on to the same bits."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from fedsap.config import resolve
from fedsap.errors import UserError
from fedsap.federation import dataset
from fedsap.methods import METHODS
from fedsap.runs import Run, Stopped, metrics

SMALL = {"partition": {"clients": 4}, "train": {"rounds": 6, "checkpoint": 0.0}, "eval": {"every": 2}}


def config(name="fedsap", /, **user):
    small = SMALL | (
        {"unlabelled": {"size": 20, "rounds": 4, "start": 1, "batch": 4}} if METHODS[name].needs_pool else {}
    )
    merged = {k: small.get(k, {}) | user.get(k, {}) for k in small.keys() | user.keys()}
    return resolve(merged, [name])[0]


@pytest.fixture(scope="module")
def digits():
    return dataset(config())


def outcome(folder):
    """Everything a run came to, without what depends on the clock."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in metrics(folder)]
    result = {k: v for k, v in json.loads((folder / "result.json").read_text()).items() if k != "seconds"}
    return rows, result, load_file(folder / "checkpoint.safetensors")


def same(one, other):
    assert one[:2] == other[:2]
    assert one[2].keys() == other[2].keys()
    assert all(torch.equal(v, other[2][k]) for k, v in one[2].items())


def stopped_and_resumed(tmp_path, digits, method, more):
    whole, halted = Run(tmp_path / "whole", config(method, **more)), Run(tmp_path / "halted", config(method, **more))
    whole.execute(digits)
    seen = []
    with pytest.raises(Stopped, match="after round 3"):
        halted.execute(digits, on_round=seen.append, stop=lambda: len(seen) == 3)
    halted.check(resume=True)
    halted.execute(digits)
    same(outcome(whole.folder), outcome(halted.folder))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("more", [{}, {"train": {"participation": 0.6, "failures": 0.3, "reset_momentum": False}}])
def test_stopped_and_resumed_is_never_stopped(tmp_path, digits, method, more):
    turns = {"cfl": {"after": 1, "eps1": 100.0}, "fedmatch": {"refresh": 2}}  # before and after the stop
    stopped_and_resumed(tmp_path, digits, method, more | {"method": turns})


@pytest.mark.parametrize("refresh", ["round", "batch", "once"])
def test_the_second_phase_stopped_and_resumed_is_never_stopped(tmp_path, digits, refresh):
    more = {"train": {"rounds": 2}, "unlabelled": {"size": 30, "rounds": 4}, "method": {"refresh": refresh}}
    stopped_and_resumed(tmp_path, digits, "fedsap", more)
    rows = metrics(tmp_path / "halted")
    assert [row["phase"] for row in rows] == ["supervised"] * 2 + ["semi-supervised"] * 4
    assert all("unlabelled" in row for row in rows[2:])


def test_rounds_after_the_last_checkpoint_come_again(tmp_path, digits):
    """As after kill -9: the metrics are ahead of the checkpoint, and their last line is cut off."""
    whole, killed = Run(tmp_path / "whole", config()), Run(tmp_path / "killed", config())
    whole.execute(digits)
    seen = []
    with pytest.raises(Stopped):
        killed.execute(digits, on_round=seen.append, stop=lambda: len(seen) == 3)
    ahead = (whole.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed.folder / "metrics.jsonl").write_text("".join(ahead[:5]) + ahead[5][:20])
    killed.execute(digits)
    same(outcome(whole.folder), outcome(killed.folder))


def command(*words):
    return [sys.executable, "-m", "fedsap.cli", *words]


def test_kill_nine_anywhere(tmp_path, digits):
    sets = ["partition.clients=4", "train.rounds=40", "train.checkpoint=0", "eval.every=5"]
    words = ["run", "--resume", "--out", str(tmp_path / "runs"), *[w for s in sets for w in ("--set", s)]]
    folder = tmp_path / "runs" / "fedsap-1234"
    for rounds in (3, 11):
        process = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while len(metrics(folder)) < rounds and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.poll() is None, "it was over before it could be killed"
        process.kill()
        process.wait()
        assert not (folder / "result.json").exists()
    subprocess.run(command(*words), check=True, capture_output=True, timeout=300)
    user = {"partition": {"clients": 4}, "train": {"rounds": 40, "checkpoint": 0.0}, "eval": {"every": 5}}
    whole = Run(tmp_path / "whole", resolve(user)[0])
    whole.execute(digits)
    same(outcome(whole.folder), outcome(folder))


def test_control_c_ends_after_the_round_and_says_how_to_go_on(tmp_path):
    words = ["run", "--out", str(tmp_path / "runs"), "--set", "train.rounds=5000", "--set", "eval.every=1000"]
    process = subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "runs" / "fedsap-1234"
    deadline = time.monotonic() + 120
    while len(metrics(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "--resume goes on" in said
    assert "Traceback" not in said
    assert (folder / "checkpoint.safetensors").exists()


def test_a_full_disk_is_one_line_and_the_old_checkpoint_stays(tmp_path):
    """A real failed write: the process may not write files of more than 200 kB."""
    words = ["run", "--out", str(tmp_path / "runs"), "--set", "train.rounds=3", "--set", "train.checkpoint=0"]
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000));"
        f"sys.argv = ['fedsap', *{words!r}];"
        "from fedsap.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "checkpoint.safetensors: cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    left = {p.name for p in (tmp_path / "runs" / "fedsap-1234").iterdir()}
    assert "config.json" in left
    assert not any(name.endswith(".part") for name in left)


def test_a_folder_of_another_configuration_is_left_alone(tmp_path, digits):
    first = Run(tmp_path / "run", config())
    first.execute(digits)
    before = {p: p.read_bytes() for p in first.folder.iterdir()}
    other = Run(tmp_path / "run", config(train={"rounds": 8}))
    with pytest.raises(UserError, match=r"train.rounds = 6, not 8; choose another --out"):
        other.check(resume=True)
    with pytest.raises(UserError, match="holds this run already"):
        first.check(resume=False)
    assert {p: p.read_bytes() for p in first.folder.iterdir()} == before


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds other files and no run"):
        Run(tmp_path, config()).check(resume=True)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_damaged_checkpoint_is_named(tmp_path, digits, content):
    run = Run(tmp_path / "run", config())
    seen = []
    with pytest.raises(Stopped):
        run.execute(digits, on_round=seen.append, stop=lambda: len(seen) == 3)
    path = run.folder / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-10] if content is None else content)
    with pytest.raises(UserError, match=r"checkpoint.safetensors: not a checkpoint of this run"):
        run.execute(digits)


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_checkpoint(tmp_path, digits):
    run = Run(tmp_path / "run", config(method={"align_top": 1e38, "align_start": 3}))  # from round 4 on
    said = r"the loss term '\w+' of client \d+ became \S+ in round 4; lower train.lr .* after round 3 is kept"
    with pytest.raises(UserError, match=said):
        run.execute(digits)
    assert run.done == len(run.rows()) == 3
    assert not (run.folder / "result.json").exists()


def test_a_loss_that_is_not_a_number_at_once_says_that_there_is_no_checkpoint(tmp_path, digits):
    run = Run(tmp_path / "run", config(train={"lr": 1e25}))
    with pytest.raises(UserError, match=r"in round 1; .* There is no checkpoint yet"):
        run.execute(digits)
    assert not run.checkpoint.exists()


def test_other_data_than_a_run_began_with_are_not_taken(tmp_path, digits):
    run, seen = Run(tmp_path / "run", config()), []
    with pytest.raises(Stopped):
        run.execute(digits, on_round=seen.append, stop=lambda: len(seen) == 3)
    before = {path: path.read_bytes() for path in run.folder.iterdir()}
    train = digits.train
    fewer = replace(digits, train=replace(train, images=train.images[:-9], labels=train.labels[:-9]))
    with pytest.raises(UserError, match=r"began with partition \w{16}, and the data now give \w{16}; takes the same"):
        run.execute(fewer)
    assert {path: path.read_bytes() for path in run.folder.iterdir()} == before


@pytest.mark.parametrize("left", ["partition.json", ".partition.json.4711"])
def test_a_run_that_died_before_its_first_round_begins_again(tmp_path, digits, left):
    run = Run(tmp_path / "run", config())
    run.folder.mkdir()
    (run.folder / left).write_text("{")
    run.check(resume=True)
    assert run.execute(digits)["rounds"] == 6


@pytest.mark.parametrize("line", [b"\x84\xff", b"5", b'{"loss": {}}', b'{"round": null}'])
def test_a_damaged_line_of_metrics_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"round": 1}\n' + line + b'\n{"round": 3}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl: line 2 is damaged"):
        metrics(tmp_path)


def test_a_runs_files_are_readable_to_whom_new_files_are(tmp_path, digits):
    run = Run(tmp_path / "run", config(train={"rounds": 1}, eval={"snapshots": [1]}))
    run.execute(digits)
    (tmp_path / "usual").touch()
    modes = {path.stat().st_mode for path in run.folder.rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "usual").stat().st_mode}


def test_a_finished_run_is_read_and_not_run_again(tmp_path, digits):
    run = Run(tmp_path / "run", config())
    first = run.execute(digits)
    stamp = (run.folder / "metrics.jsonl").stat().st_mtime_ns
    assert run.execute(digits) == first
    assert (run.folder / "metrics.jsonl").stat().st_mtime_ns == stamp


def test_the_folder_holds_configuration_partition_versions_metrics_and_checkpoint(tmp_path, digits):
    run = Run(tmp_path / "run", config())
    result = run.execute(digits)
    assert {p.name for p in run.folder.iterdir()} >= {
        "config.json", "partition.json", "environment.json", "metrics.jsonl", "checkpoint.safetensors", "result.json"
    }  # fmt: skip
    rows = metrics(run.folder)
    assert [r["round"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert [r["round"] for r in rows if "accuracy" in r] == [2, 4, 6]
    assert result["accuracy"]["head"]["per_client"] == rows[-1]["accuracy"]["head"]
    assert json.loads((run.folder / "partition.json").read_text())["hash"] == result["partition"]


@pytest.mark.parametrize(
    ("method", "name", "ways", "shots", "spread", "up"),
    [
        ("fedsap", "small", 3, 10, 0, 20 * 3 * 64),
        ("fedproto", "small", 3, 10, 0, 20 * 3 * 64),
        ("local", "small", 3, 10, 0, 0),
    ],
)
def test_communication_is_counted_from_what_is_sent(tmp_path, digits, method, name, ways, shots, spread, up):
    keys = {"ways": ways, "shots": shots, "spread": spread, "clients": 20}
    result = Run(tmp_path / "run", config(method, partition=keys, train={"rounds": 2})).execute(digits)
    assert result["comm"]["up"]["numbers"] == up
    bank = 10 * 64 * 20 if up else 0
    assert result["comm"]["down"]["numbers"] == bank


@pytest.mark.parametrize("method", ["fedsap", "fedproto", "fedmps"])
def test_a_warm_start_gives_round_one_its_prototypes(tmp_path, digits, method):
    run = Run(tmp_path / "run", config(method, train={"warm_start": True}))
    run.execute(digits)
    assert metrics(run.folder)[0]["loss"].keys() > {"ce"}


def test_a_class_that_nobody_sends_keeps_its_prototype(tmp_path, digits):
    run = Run(tmp_path / "run", config("fedproto", train={"participation": 0.25, "rounds": 12}))
    run.execute(digits)
    sent = [len(row["clients"]) for row in metrics(run.folder)]
    assert set(sent) == {1}
    mask = load_file(run.folder / "checkpoint.safetensors")["server/bank@mask"]
    assert mask.sum() > 4  # more than any one client holds


def test_the_reference_preset_runs_on_digits(tmp_path, digits):
    chosen = resolve({"preset": "reference", "train": {"rounds": 1}})[0]
    assert Run(tmp_path / "run", chosen).execute(digits)["rounds"] == 1
