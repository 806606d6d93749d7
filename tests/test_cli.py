"""The commands as a person calls them."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedsap.cli import app
from fedsap.methods import METHODS

SMALL = ["--set", "partition.clients=4", "--set", "train.rounds=4", "--set", "eval.every=2"]


def fedsap(*words, cwd=None, **env):
    return subprocess.run(
        [sys.executable, "-m", "fedsap.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **env},
    )


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """A CIFAR-10 of 20 training and 5 test images a class, in the official format."""
    root = tmp_path_factory.mktemp("data") / "cifar-10-batches-py"
    root.mkdir()
    rng = np.random.default_rng(0)

    def batch(name, n):
        labels = np.arange(n) % 10
        pixels = rng.integers(0, 256, (n, 3072), dtype=np.uint8)
        (root / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, protocol=2))

    batch("data_batch_1", 200)
    batch("test_batch", 50)
    names = [n.encode() for n in ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]]
    (root / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}, protocol=2))
    return root.parent


def test_run_prints_json_and_nothing_else(tmp_path):
    done = fedsap(
        "run",
        *SMALL,
        "--method",
        "fedsap",
        "--method",
        "local",
        "--seed",
        1,
        "--seed",
        2,
        "--out",
        tmp_path / "o",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [m["method"] for m in found["methods"]] == ["fedsap", "local"]
    for entry in found["methods"]:
        assert (entry["dataset"], entry["seeds"], entry["rounds"]) == ("digits", [1, 2], 4)
        for measure in ("head_acc", "proto_acc", "proto_cos_acc"):
            shares = entry[measure]["per_client"]
            assert len(shares) == 2 * 4
            assert entry[measure]["mean"] == pytest.approx(np.mean(shares))
            by_seed = np.reshape(shares, (2, 4)).mean(1)
            assert entry[measure]["std"] == pytest.approx(np.std(by_seed, ddof=1))
            assert entry[measure]["best"] >= entry[measure]["mean"] - 1e-9
        assert entry["comm"]["up"].keys() == {"numbers", "bytes"}
    assert "round 4/4" in done.stderr


def test_run_prints_a_table_and_says_where_the_report_is(tmp_path):
    done = fedsap("run", *SMALL, "--out", tmp_path / "o")
    assert done.returncode == 0, done.stderr
    assert "FedSAP" in done.stdout
    reports = [Path(line.split(": ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("report: ")]
    assert reports
    assert all(path.exists() for path in reports)


def test_run_takes_a_configuration_file(tmp_path):
    (tmp_path / "c.toml").write_text(
        'seeds = [5]\n[method]\nname = "fedproto"\nalign = 0.3\n[partition]\nclients = 3\n[train]\nrounds = 2\n'
    )
    done = fedsap("run", tmp_path / "c.toml", "--out", tmp_path / "o", "--json")
    entry = json.loads(done.stdout)["methods"][0]
    assert (entry["seeds"], entry["rounds"], entry["config"]["method"]["align"]) == ([5], 2, 0.3)


def test_run_on_a_folder_of_ones_own_images(tmp_path):
    rng = np.random.default_rng(1)
    for split, n in (("train", 12), ("test", 3)):
        for shade, name in enumerate(("cat", "dog", "horse", "owl")):
            (tmp_path / "d" / split / name).mkdir(parents=True)
            for i in range(n):
                pixels = (rng.integers(0, 60, (20, 24, 3)) + 60 * shade).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "d" / split / name / f"{i}.png")
    sets = [
        "data.name=folder",
        "data.size=16",
        "model.name=small",
        "partition.clients=3",
        "partition.ways=2",
        "partition.spread=1",
        "partition.shots=6",
        "train.rounds=2",
    ]
    done = fedsap(
        "run", *[w for s in sets for w in ("--set", s)], "--data", tmp_path / "d", "--out", tmp_path / "o", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["methods"][0]["dataset"] == "folder"


@pytest.mark.parametrize("size", [0, 10])
def test_all_methods_run_and_it_is_said_who_cannot(tmp_path, size):
    words = ["--method", "all", "--set", f"unlabelled.size={size}", "--set", "unlabelled.rounds=2", "--json"]
    done = fedsap("run", *SMALL, *words, "--out", tmp_path / "o")
    assert done.returncode == 0, done.stderr
    found = [m["method"] for m in json.loads(done.stdout)["methods"]]
    needy = [name for name, m in METHODS.items() if m.needs_pool]
    idle = [name for name, m in METHODS.items() if not m.uses_pool]
    assert found == [name for name in METHODS if size or name not in needy]
    said = done.stderr.splitlines()[0]
    listed = said.partition(": ")[2].split(", ")
    assert ("left out" in said, listed) == ((False, idle) if size else (True, needy))


def test_partition_shows_saves_and_draws(tmp_path, cifar):
    words = ["partition", "--data", cifar, "--set", "data.name=cifar10", "--set", "partition.shots=5", "--seed", "1235"]
    done = fedsap(*words, "--json", "--picture", tmp_path / "p.png", "--save", tmp_path / "p.json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["classes"]) == len(found["shots"]) == 20
    assert found["classes"][0] == [3, 6, 7, 8]
    assert {"hash", "overlap"} <= found.keys()
    assert json.loads((tmp_path / "p.json").read_text())["hash"] == found["hash"]
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.size[0] > 300
    table = fedsap(*words)
    assert "horse" in table.stdout
    assert found["hash"][:16] in table.stdout
    assert table.stdout.count("samples") == 1
    assert table.stderr == "fedsap: cifar10: 200 of its 50,000 training images are there\n"


@pytest.mark.parametrize("what", ["methods", "datasets", "models", "options"])
def test_list(what):
    done = fedsap("list", what)
    assert done.returncode == 0, done.stderr
    expected = {
        "methods": "fedmps",
        "datasets": "femnist",
        "models": "resnet18",
        "options": "method.fedsap.proxy_scale",
    }
    assert expected[what] in done.stdout


def test_doctor_names_versions_and_data():
    done = fedsap("doctor")
    assert done.returncode == 0, done.stderr
    assert "digits: 1442 training" in done.stdout


def test_bench_compares_the_same_job():
    done = fedsap("bench", "--repeat", 1, "--clients", 3, "--clients", 7, "--json")
    rows = json.loads(done.stdout)["rows"]
    assert [(r["clients"], r["way"]) for r in rows] == [(q, w) for q in (3, 7) for w in ("plain loop", "stack fp32")]
    for row in rows:
        assert row["difference"] is None or row["difference"] < 1e-5
        assert row["ms"] > 0
        assert row["ratio"] == 1 or row["way"] != "plain loop"


def test_bench_of_a_run_accounts_for_its_time():
    done = fedsap("bench", "run", "--set", "train.rounds=3", "--method", "fedsap", "--json")
    found = json.loads(done.stdout)
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    assert {"loading", "training", "prototypes", "evaluation", "checkpoints"} <= found["parts"].keys()
    assert min(found["parts"].values()) >= 0
    assert found["methods"][0]["rounds"] == 3


def test_report_of_a_finished_run(tmp_path):
    fedsap("run", *SMALL, "--out", tmp_path / "o")
    done = fedsap("report", tmp_path / "o", "--out", tmp_path / "r")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "r").iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--set", "train.rouds=3"], "did you mean 'train.rounds'"),
        (["run", "--method", "fedprot"], "did you mean"),
        (["run", "nowhere.toml"], "nowhere.toml: No such file or directory"),
        (["run", "--set", "partition.ways=11"], "partition.ways: got 11"),
        (["run", "--set", "partition.shots=5000"], "partition.shots"),
        (["run", "--set", "data.name=cifar100", "--data", "."], "cifar"),
        (["run", "--set", "data.name=femnist", "--data", "."], "by_class"),
        (["run", "--data", "/nowhere/at/all", "--set", "data.name=cifar10"], "/nowhere/at/all"),
        (["run", "--set", "model.name=resnet"], "did you mean 'resnet18'"),
        (["run", "--set", "model.resolution=64"], "model.resolution is no option of model 'small'"),
        (["run", "--method", "json:Missing"], "'json' has no 'Missing'"),
        (["run", "--method", "json:JSONDecoder"], "takes a dataclass derived from fedsap.methods.Method"),
        (["run", "--set", "model.name=json:loads"], "it cannot be called with classes, shape"),
        (["run", "--method", "fedsap", "--method", "semifl"], "method.name=semifl needs unlabelled samples"),
        (["run", "--set", "device=tpu"], "device: got 'tpu'"),
        (["report", "nothing-here"], "nothing-here"),
        (["list", "planets"], "got 'planets'"),
        (["run", "--set", "method.fedprot.align=1"], "did you mean 'method.fedproto'"),
        (["run", "--set", "method.fedproto=1"], "method.fedproto: got 1, takes options below it"),
        (["partition", "--picture", "nowhere/a.png"], "nowhere/a.png: cannot be written: No such file"),
        (["partition", "--save", "nowhere/a.json"], "nowhere/a.json: cannot be written: No such file"),
        (["partition", "--seed", "1", "--seed", "2"], "takes one seed"),
    ],
)
def test_mistakes_are_one_line_with_exit_two(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*words, *(["--out", "o"] if words[0] == "run" else [])])
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--seed", "x"], "Invalid value for '--seed'"),
        (["run", "--sed", "1"], "--seed"),
        (["rum"], "No such command 'rum'"),
        (["report"], "Missing argument"),
    ],
)
def test_words_that_are_not_understood_are_one_line_with_exit_two(words, said):
    done = fedsap(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("fedsap: ")
    assert line.endswith("--help says what it takes")


def test_no_words_at_all_get_help():
    done = fedsap()
    assert done.returncode == 0
    assert "reproduce" in done.stdout


def test_weights_of_another_shape_and_truncated_files(tmp_path, cifar):
    words = [
        "run",
        "--data",
        cifar,
        "--set",
        "data.name=cifar10",
        "--set",
        "partition.shots=5",
        "--set",
        "train.rounds=1",
        "--out",
        tmp_path / "o",
    ]
    np.savez(tmp_path / "w.npz", **{"conv1.weight": np.zeros((64, 3, 3, 3), np.float32)})
    done = fedsap(*words, "--set", f"model.weights={tmp_path / 'w.npz'}")
    assert done.returncode == 2
    noted, said = done.stderr.splitlines()
    assert noted == "fedsap: cifar10: 200 of its 50,000 training images are there"
    assert "conv1.weight" in said
    missing = fedsap(*words)
    assert missing.returncode == 2
    assert "model.weights: no file resnet18-f37072fd.pth in" in missing.stderr
    broken = tmp_path / "broken" / "cifar-10-batches-py"
    broken.mkdir(parents=True)
    for path in (cifar / "cifar-10-batches-py").iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "data_batch_1").write_bytes((broken / "data_batch_1").read_bytes()[:1000])
    done = fedsap("run", "--data", tmp_path / "broken", "--set", "data.name=cifar10", "--out", tmp_path / "o")
    assert done.returncode == 2
    assert "data_batch_1" in done.stderr
    assert not (tmp_path / "o").exists()


def test_resnet_on_cifar_files(tmp_path, cifar):
    sets = [
        "data.name=cifar10",
        "partition.clients=2",
        "partition.ways=2",
        "partition.shots=6",
        "train.rounds=1",
        "eval.silhouette=0",
        "model.weights=none",
    ]
    done = fedsap("run", "--data", cifar, *[w for s in sets for w in ("--set", s)], "--out", tmp_path / "o", "--json")
    assert done.returncode == 0, done.stderr
    entry = json.loads(done.stdout)["methods"][0]
    assert entry["comm"]["up"]["numbers"] % 512 == 0
