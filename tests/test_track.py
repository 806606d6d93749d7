"""Trackers: what is in their files is what the run's metrics say, also after a kill."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fedsap.config import resolve
from fedsap.errors import UserError
from fedsap.federation import dataset
from fedsap.runs import Run, metrics
from fedsap.track import Tracked, check, scalars, store

USER = {"partition": {"clients": 3}, "train": {"rounds": 4}, "eval": {"every": 2}}


def tensorboard(folder, name):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    there = accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    there.Reload()
    return [(e.step, e.value) for e in there.Scalars(name)]


def mlflow(folder, name):
    tracking = pytest.importorskip("mlflow.tracking")
    client = tracking.MlflowClient(store(folder.parent))
    experiment = client.get_experiment_by_name("fedsap")
    (run,) = (r for r in client.search_runs([experiment.experiment_id]) if r.info.run_name == folder.name)
    return sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))


READ = {"tensorboard": tensorboard, "mlflow": mlflow}
# SQLAlchemy and what TensorBoard brings warn of themselves.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("name", READ)
def test_tracked_is_the_metrics_also_if_begun_late(name, tmp_path):
    (config,) = resolve(USER)
    run, data = Run(tmp_path / "run", config), dataset(config)
    run.execute(data)
    rows = metrics(run.folder)
    with Tracked([name], run.folder, config, rows[:2]) as tracked:
        tracked(rows[2])
    with Tracked([name], run.folder, config, rows[:3]) as tracked:  # resumed
        tracked(rows[3])
    for key in ("loss/ce", "accuracy/head", "up/numbers", "seconds"):
        expected = [(row["round"], scalars(row)[key]) for row in rows if key in scalars(row)]
        found = READ[name](run.folder, key)
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [v for _, v in found] == pytest.approx([v for _, v in expected], rel=1e-6)


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_killed_runs_files_are_readable(tmp_path):
    command = [sys.executable, "-m", "fedsap.cli", "run", "--out", str(tmp_path / "out"), "--seed", "1"]
    command += ["--track", "tensorboard", "--track", "mlflow"]
    command += ["--set", "train.rounds=100000", "--set", "partition.clients=3"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = tmp_path / "out" / "fedsap-1"
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None:
            if (folder / "metrics.jsonl").exists() and len(metrics(folder)) >= 6:
                break
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    rows = metrics(folder)
    assert len(rows) >= 6
    for read in READ.values():
        steps = [step for step, _ in read(folder, "loss/ce")]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= len(rows) - 1  # the round it died in may be missing


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_a_kill_while_mlflow_makes_its_tables_leaves_no_half_of_them(tmp_path):
    command = [sys.executable, "-m", "fedsap.cli", "run", "--out", str(tmp_path / "out"), "--track", "mlflow"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None:
            if any(path.stat().st_size for path in (tmp_path / "out").glob(".mlflow.*/mlflow.db")):
                break
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "out" / "mlflow.db").exists()
    (config,) = resolve(USER)
    run = Run(tmp_path / "out" / "again", config)
    run.execute(dataset(config))
    with Tracked(["mlflow"], run.folder, config, run.rows()):
        pass
    assert [step for step, _ in mlflow(run.folder, "seconds")] == [1, 2, 3, 4]


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
def test_a_full_disk_under_mlflow_is_one_line(tmp_path):
    words = ["run", "--out", str(tmp_path / "out"), "--set", "train.rounds=2", "--track", "mlflow"]
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000));"
        f"sys.argv = ['fedsap', *{words!r}];"
        "from fedsap.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "fedsap: --track mlflow: " in done.stderr
    assert "mlflow.db cannot be used: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_unknown_tracker_is_a_mistake():
    with pytest.raises(UserError, match="--track: got 'wandb', takes tensorboard or mlflow"):
        check(["wandb"])
