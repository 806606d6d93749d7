"""ONNX graphs, run by onnxruntime."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedsap
from fedsap.data import load
from fedsap.data.augment import normalise
from fedsap.errors import UserError
from fedsap.methods import APFL, MOON, FedAvg, FedMPS, FedNH, FedSAP
from models_of_clients import CLASSES, images, model

pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from fedsap.export import OPSET, TOLERANCE, difference, proof, write_onnx  # noqa: E402

OWN = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        height, width, channels = shape
        self.body = nn.Sequential(
            nn.Conv2d(channels, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(),
            nn.Linear(6 * height * width, 12), nn.ReLU(),
        )
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        h = self.body(x)
        return h, self.head(h)

class Branching(Net):
    def forward(self, x):
        h = self.body(x)
        return (h, self.head(h)) if len(x) > 2 else (h, 1.0 * self.head(h))
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "nets_to_export.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "nets_to_export"
    sys.modules.pop("nets_to_export", None)


def oracle(found, x):
    """What the graph has to say, image by image, from the model's own answers."""
    h, logits = found(normalise(x, found.pixels.mean, found.pixels.std))
    said = {"logits": logits, "embedding": h}
    if found.bank is not None:
        said["cosine"] = torch.full((len(x), len(CLASSES)), -torch.inf)
        said["distance"] = torch.full((len(x), len(CLASSES)), torch.inf)
        for i, v in enumerate(h):
            for c in found.bank.mask.nonzero().flatten().tolist():
                p = found.bank.values[c]
                said["cosine"][i, c] = v @ p / (v.norm() * p.norm())
                said["distance"][i, c] = (v - p).norm()
    return said


CASES = {
    "small": (FedSAP(), {"name": "small", "embedding": "linear"}, (8, 8, 1), (0, 1, 4)),
    "cnn in another d": (FedMPS(), {"name": "cnn", "dim": 32, "head_input": "normalized"}, (28, 28, 1), (0, 3)),
    "resnet18": (FedAvg(), {"name": "resnet18"}, (32, 32, 3), None),
    "resnet18 on grey images resized": (FedSAP(), {"name": "resnet18", "resolution": 40}, (20, 20, 1), (1, 2)),
    "the server's output layer": (FedNH(), {"name": "small"}, (8, 8, 3), (0, 1, 2, 3, 4)),
    "a projection": (MOON(), {"name": "small", "dim": 16}, (8, 8, 1), None),
    "two models mixed, of one's own": (APFL(mix="logits"), {"name": "nets_to_export:Net"}, (10, 10, 3), None),
}


@pytest.mark.parametrize("case", CASES)
def test_onnxruntime_gives_the_same_outputs(case, tmp_path, own):
    method, keys, shape, seen = CASES[case]
    found = model(method, keys, shape, seen=seen)
    x = images(shape)
    apart = write_onnx(tmp_path / "m.onnx", found, x)
    assert 0 <= apart <= TOLERANCE
    assert [path.name for path in tmp_path.glob("*.onnx*")] == ["m.onnx"]  # weights and all
    graph = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(graph)
    assert [(o.domain, o.version) for o in graph.opset_import] == [("", OPSET)]
    assert str(Path(fedsap.__file__).parent).encode() not in (tmp_path / "m.onnx").read_bytes()
    about = {p.key: p.value for p in graph.metadata_props}
    assert json.loads(about["classes"]) == list(CLASSES)
    assert json.loads(about["own classes"]) == ["ant", "cat", "dog"]
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    assert (session.get_inputs()[0].type, session.get_inputs()[0].shape[1:]) == ("tensor(uint8)", list(shape))
    for some in (x, x[:1], images(shape, 11)):  # any number of images
        said = oracle(found, some)
        names = [o.name for o in session.get_outputs()]
        assert names == list(said)
        for name, got in zip(names, session.run(None, {"images": some.numpy()}), strict=True):
            np.testing.assert_allclose(got, said[name].detach().numpy(), rtol=1e-4, atol=1e-4, err_msg=name)


def test_no_file_is_left_if_the_outputs_differ(tmp_path):
    found = model(FedSAP(), {"name": "small"}, (8, 8, 1))
    with pytest.raises(UserError, match=r"m.onnx: not written; .* differ from fedsap's by .*, more than -1e\+00"):
        write_onnx(tmp_path / "m.onnx", found, images((8, 8, 1)), tolerance=-1.0)
    assert not list(tmp_path.iterdir())


def test_other_weights_are_a_difference(tmp_path):
    found, other = (model(FedSAP(), {"name": "small", "head_input": kind}, (8, 8, 1)) for kind in ("raw", "cosine"))
    x = images((8, 8, 1))
    write_onnx(tmp_path / "m.onnx", found, x)
    content = (tmp_path / "m.onnx").read_bytes()
    assert difference(content, found, x) < TOLERANCE < difference(content, other, x)
    fewer = model(FedSAP(), {"name": "small"}, (8, 8, 1), seen=(0, 1))
    assert difference(content, fewer, x) == float("inf")  # a class has no prototype there


def test_a_network_that_cannot_be_traced_is_refused(tmp_path, own):
    found = model(FedAvg(), {"name": "nets_to_export:Branching"}, (8, 8, 1), seen=None)
    with pytest.raises(
        UserError, match=r"Branching with FedAvg cannot be traced \(its forward fixes the number"
    ) as caught:
        write_onnx(tmp_path / "m.onnx", found, images((8, 8, 1)))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.onnx"))


def test_without_the_extra_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found = model(FedSAP(), {"name": "small"}, (8, 8, 1))
    with pytest.raises(UserError, match=r"needs onnxruntime; pip install 'fedsap\[onnx\]'"):
        write_onnx(tmp_path / "m.onnx", found, images((8, 8, 1)))


def test_outputs_are_compared_on_test_images_of_the_clients_classes():
    found = model(FedSAP(), {"name": "small"}, (8, 8, 1), owned=(1, 4))
    digits = load("digits").test
    some = proof(replace(found, about={"data": "digits"}), [], None)
    mine = digits.images[np.isin(digits.labels, (1, 4))]
    assert 1 < len(some) <= 64
    assert {one.tobytes() for one in some.numpy()} <= {one.tobytes() for one in mine}


def test_outputs_are_compared_on_images_that_are_given(tmp_path):
    found = model(FedSAP(), {"name": "small"}, (8, 8, 1))
    for i in range(70):
        Image.new("L", (8, 8), i).save(tmp_path / f"{i:02d}.png")
    (tmp_path / "00.txt").write_text("not an image")
    assert proof(found, [tmp_path], None)[:, 3, 3, 0].tolist() == list(range(63))  # the first 64 files


@pytest.mark.parametrize(
    ("about", "check", "said"),
    [
        ({}, [], "--check"),
        ({"data": "cifar10"}, [], "cifar.*; or give images to compare on with --check"),
        ({"data": "digits"}, ["no.png"], "--check: no image that can be read in .*no.png"),
    ],
)
def test_without_images_to_compare_on(about, check, said, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FEDSAP_DATA", raising=False)
    found = replace(model(FedSAP(), {"name": "small"}, (8, 8, 1)), about=about)
    with pytest.raises(UserError, match=said):
        proof(found, [tmp_path / name for name in check], None)
