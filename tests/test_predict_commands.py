"""fedsap predict and fedsap export as a person calls them."""

import csv
import io
import json
import sys

import pytest
from PIL import Image
from typer.testing import CliRunner

from fedsap.cli import app
from fedsap.data import load
from fedsap.methods import METHODS
from fedsap.saved import load_model

SMALL = ["--set", "partition.clients=4", "--set", "train.rounds=8", "--set", "eval.every=8"]


def fedsap(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("o")
    done = fedsap("run", *SMALL, "--method", "fedsap", "--method", "fedavg", "--out", out)
    assert done.exit_code == 0, done.output
    return out / "fedsap-1234"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Some test digits as files, named for their class."""
    folder = tmp_path_factory.mktemp("pictures")
    digits = load("digits").test
    for i in range(0, 40, 4):
        Image.fromarray(digits.images[i, ..., 0]).save(folder / f"{i:02d}-{digits.labels[i]}.png")
    return folder


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_predictions_are_csv(run, pictures):
    done = fedsap("predict", run, pictures, "--client", 2)
    assert (done.exit_code, done.stderr) == (0, "")
    found = rows(done.stdout)
    assert [row["path"] for row in found] == [str(path) for path in sorted(pictures.iterdir())]
    own = {load("digits").classes[c] for c in json.loads((run / "partition.json").read_text())["classes"][2]}
    for row in found:
        assert {row["class"], row["second"]} <= own
        assert 0.5 / len(own) < float(row["score"]) <= 1
        assert 0 <= float(row["margin"]) <= float(row["score"])
    right = [row["class"] == row["path"][-5] for row in found if row["path"][-5] in own]
    assert sum(right) > len(right) / 2


def test_predictions_are_one_json_object_and_nothing_else(run, pictures, tmp_path):
    done = fedsap("predict", run, pictures / "00-5.png", tmp_path / "no.png", "--client", 2, "--json", "--by", "cos")
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert done.stderr == f"fedsap: {tmp_path / 'no.png'}: cannot be read (No such file or directory)\n"
    assert (found["by"], found["classes"], found["model"]["client"]) == ("cos", "own", 2)
    assert [one.keys() for one in found["images"]] == [{"path", "class", "score", "second", "margin"}]
    assert found["failed"] == [
        {"path": str(tmp_path / "no.png"), "reason": "cannot be read (No such file or directory)"}
    ]
    nothing = json.loads(fedsap("predict", run, tmp_path / "no.png", "--client", 2, "--json").stdout)
    assert nothing["images"] == []


def test_the_rest_goes_on_when_a_file_is_no_image(run, pictures, tmp_path):
    (tmp_path / "notes.txt").write_text("not an image")
    done = fedsap(
        "predict", run, tmp_path / "notes.txt", pictures / "00-5.png", "--client", 0, "--out", tmp_path / "p.csv"
    )
    assert done.exit_code == 1
    assert done.stdout == f"predictions: {tmp_path / 'p.csv'}\n"
    assert done.stderr.count("\n") == 1
    assert f"{tmp_path / 'notes.txt'}: unreadable image" in done.stderr
    assert [row["path"] for row in rows((tmp_path / "p.csv").read_text())] == [str(pictures / "00-5.png")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "p.csv"]


def test_both_json_and_a_file_of_csv(run, pictures, tmp_path):
    done = fedsap("predict", run, pictures, "--client", 1, "--json", "--out", tmp_path / "p.csv", "--by", "proto")
    said = json.loads(done.stdout)["images"]
    kept = rows((tmp_path / "p.csv").read_text())
    assert [one["class"] for one in said] == [row["class"] for row in kept]
    assert [one["score"] for one in said] == pytest.approx([float(row["score"]) for row in kept], rel=1e-5)


@pytest.mark.parametrize("by", ["head", "proto", "cos"])
def test_a_file_of_export_predicts_the_same(by, run, pictures, tmp_path):
    done = fedsap("export", run, "--client", 3, "--out", tmp_path / "m.safetensors")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"safetensors: {tmp_path / 'm.safetensors'}, ")
    assert "(run fedsap-1234, data digits, seed 1234, client 3, round 8)" in done.stdout
    from_file = fedsap("predict", tmp_path / "m.safetensors", pictures, "--by", by, "--classes", "all")
    assert from_file.exit_code == 0
    assert from_file.stdout == fedsap("predict", run, pictures, "--client", 3, "--by", by, "--classes", "all").stdout


def test_onnx_says_how_far_it_is_from_the_model(run, pictures, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    done = fedsap("export", run, "--client", 0, "--out", tmp_path / "m.onnx", "--check", pictures)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "opset 18, on 10 images at most " in done.stdout
    assert "from fedsap's (tolerance 1e-04)" in done.stdout
    names = [o.name for o in onnxruntime.InferenceSession(tmp_path / "m.onnx").get_outputs()]
    assert names == ["logits", "embedding", "cosine", "distance"]


OWN = """
from dataclasses import dataclass
from typing import ClassVar
from torch import nn
from fedsap.methods import FedProto

@dataclass(frozen=True)
class Mine(FedProto):
    name: ClassVar[str] = "mine for commands"
    title: ClassVar[str] = "Mine"

class Net(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        self.body = nn.Linear(64, 6)
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        h = self.body(x.flatten(1))
        return h, self.head(h)
"""


def test_a_run_with_code_of_ones_own(pictures, tmp_path, monkeypatch):
    (tmp_path / "code_for_commands.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--method", "code_for_commands:Mine", "--set", "model.name=code_for_commands:Net", "--out", tmp_path / "o"]
    assert fedsap("run", *SMALL, *words).exit_code == 0
    METHODS.pop("mine for commands")  # as in another process
    sys.modules.pop("code_for_commands")
    folder = tmp_path / "o" / "mine for commands-1234"
    refused = fedsap("predict", folder, pictures, "--client", 0)
    assert refused.exit_code == 2
    assert "needs code_for_commands:Mine, which is not part of fedsap; --own-code imports it" in refused.stderr
    assert "code_for_commands" not in sys.modules
    assert fedsap("predict", folder, pictures, "--client", 0, "--own-code").exit_code == 0
    done = fedsap("export", folder, "--client", 0, "--own-code", "--out", tmp_path / "m.safetensors")
    assert done.exit_code == 0, done.output
    assert load_model(tmp_path / "m.safetensors", own_code=True).network.dim == 6
    METHODS.pop("mine for commands")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict", "RUN", "p"], "--client: got nothing, takes one of the clients of"),
        (["predict", "RUN", "p", "--client", "9"], "--client: got 9, takes one of the clients of"),
        (["predict", "RUN", "p", "--client", "0", "--by", "vote"], "--by: got 'vote', takes head, proto or cos"),
        (["predict", "RUN", "p", "--client", "0", "--classes", "3"], "--classes: got '3', takes own or all"),
        (["predict", "OTHER", "p", "--client", "0", "--by", "proto"], "FedAvg keeps no prototypes; takes head"),
        (
            ["predict", "RUN", "p", "--client", "0", "--out", "no/p.csv"],
            "--out: got no/p.csv, takes a file in a folder",
        ),
        (["predict", "nowhere", "p"], "nowhere: no such file or folder; takes a run's folder, or a file of fedsap"),
        (["predict", "FILE", "p", "--client", "3"], "--client: got 3, but m.safetensors holds client 1; leave it out"),
        (["predict", "notes.txt", "p"], "notes.txt: not a model that fedsap export has written"),
        (["export", "RUN", "--client", "0", "--out", "m.pt"], "--format: got 'pt', takes safetensors or onnx"),
        (["export", "RUN", "--client", "0", "--out", "m"], "--format: got '', takes safetensors or onnx"),
        (["export", "RUN", "--client", "0", "--out", "no/m.onnx"], "--out: got no/m.onnx, takes a file in a folder"),
        (["export", "RUN", "--out", "m.onnx"], "--client: got nothing, takes one of"),
        (["export", "FILE", "--out", "m.onnx", "--check", "notes.txt"], "--check: no image that can be read in notes"),
    ],
)
def test_mistakes_are_one_line_with_exit_two(words, said, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("no model")
    assert fedsap("export", run, "--client", 1, "--out", "m.safetensors").exit_code == 0
    places = {"RUN": run, "OTHER": run.parent / "fedavg-1234", "FILE": "m.safetensors"}
    done = fedsap(*[places.get(word, word) for word in words])
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors", "notes.txt"]
