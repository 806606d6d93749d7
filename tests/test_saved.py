"""A client's model in a file."""

import json
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedsap import plain
from fedsap.data.augment import normalise
from fedsap.errors import UserError
from fedsap.methods import APFL, METHODS, MOON, FedNH, FedProto, FedSAP, Method
from fedsap.saved import load_model, save_model
from models_of_clients import CLASSES, images, model

SHAPE = (8, 8, 1)
X = normalise(images(SHAPE), (0.4,), (0.2,))
BUILT_IN = [m for m in METHODS.values() if m.__module__.startswith("fedsap.")]


def written(tmp_path, found):
    save_model(tmp_path / "m.safetensors", found)
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize(
    "method", [*(m() for m in BUILT_IN), APFL(mix="logits"), MOON(projection=0)], ids=lambda m: m.name
)
def test_a_saved_model_answers_as_before(method, tmp_path):
    found = model(method, {"name": "small", "dim": 20}, SHAPE)
    again = load_model(written(tmp_path, found))
    with torch.no_grad():
        for before, after in zip(found(X), again(X), strict=True):
            torch.testing.assert_close(after, before, rtol=0, atol=0)
    torch.testing.assert_close(again.bank.values, found.bank.values, rtol=0, atol=0)
    assert again.bank.mask.tolist() == [True, True, True, False, True]
    for name in ("method", "network", "classes", "owned", "pixels", "keys", "about"):
        assert getattr(again, name) == getattr(found, name), name


@pytest.mark.parametrize(
    ("method", "sets"),
    [
        (FedSAP(), set()),
        (METHODS["fedprox"](), set()),  # keeps the received model in training
        (METHODS["ditto"](), set()),
        (APFL(), set()),
        (APFL(mix="logits"), {"model", "mix"}),
        (FedNH(), {"head", "scale"}),
        (MOON(), {"projection"}),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)
def test_a_file_holds_what_inference_reads_and_no_more(method, sets, tmp_path):
    path = written(tmp_path, model(method, {"name": "small"}, SHAPE, seen=None))
    names = load_file(path).keys()
    assert {name.split("/")[1] for name in names if name.startswith("state/")} == sets
    assert {name.split("/")[0] for name in names} == {"weights", *(["state"] if sets else [])}


def test_weights_in_a_file_are_a_state_dict_of_torch(tmp_path):
    found = model(FedSAP(), {"name": "resnet18"}, (32, 32, 3))
    tensors = load_file(written(tmp_path, found))
    module = plain.NETWORKS["resnet18"](len(CLASSES), (32, 32, 3))
    module.load_state_dict({k.removeprefix("weights/"): v for k, v in tensors.items() if k.startswith("weights/")})
    x = normalise(images((32, 32, 3), 3), found.pixels.mean, found.pixels.std)
    with torch.no_grad():
        theirs = module.eval()(x.permute(0, 3, 1, 2))
        for mine, other in zip(found(x), theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_a_file_names_no_place_of_the_machine_that_wrote_it(tmp_path):
    found = model(FedSAP(), {"name": "resnet18", "weights": "/home/me/resnet18.pth"}, (32, 32, 3))
    with safe_open(written(tmp_path, found), "pt") as file:
        assert "/home/me" not in file.metadata()["fedsap"]


OWN = """
from dataclasses import dataclass
from typing import ClassVar
from torch import nn
from fedsap.methods import Method

@dataclass(frozen=True)
class Mine(Method):
    name: ClassVar[str] = "mine to save"
    title: ClassVar[str] = "Mine"
    paper: ClassVar[str] = ""
    sends: ClassVar[str] = ""

class Net(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        self.body = nn.Linear(shape[0] * shape[1] * shape[2], 6)
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        h = self.body(x.flatten(1))
        return h, self.head(h)
"""


@pytest.fixture
def own(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("own")
    (folder / "code_to_save.py").write_text(OWN)
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop("code_to_save", None)
    METHODS.pop("mine to save", None)


def test_code_that_a_file_names_is_imported_only_if_that_is_allowed(own, tmp_path):
    import code_to_save

    METHODS["mine to save"] = code_to_save.Mine
    found = model(code_to_save.Mine(), {"name": "code_to_save:Net"}, SHAPE)
    path = written(tmp_path, found)
    METHODS.pop("mine to save")
    sys.modules.pop("code_to_save")
    with pytest.raises(UserError, match="needs code_to_save:Mine, which is not part of fedsap; --own-code imports it"):
        load_model(path)
    assert "code_to_save" not in sys.modules
    again = load_model(path, own_code=True)
    with torch.no_grad():
        for before, after in zip(found(X), again(X), strict=True):
            torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_network_of_ones_own_needs_leave_too(own, tmp_path):
    path = written(tmp_path, model(FedSAP(), {"name": "code_to_save:Net"}, SHAPE))
    with pytest.raises(UserError, match="needs code_to_save:Net, which"):
        load_model(path)


def damaged(header=id, tensors=id):
    """A way to change the header or the tensors of a whole file."""

    def make(path):
        held = load_file(path)
        with safe_open(path, "pt") as file:
            said = json.loads(file.metadata()["fedsap"])
        header(said)
        tensors(held)
        save_file(held, path, {"fedsap": json.dumps(said)})

    return make


DAMAGES = {
    "no tensors": (lambda path: path.write_bytes(b"not this"), "not a model that fedsap export has written"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "not a model that fedsap export has written"),
    "another's": (lambda path: save_file({"w": torch.zeros(1)}, path), "a safetensors file of something else"),
    "gone": (lambda path: path.unlink(), "No such file or directory"),
    "newer": (damaged(lambda h: h.update(version=2)), "version: got 2 .*cannot read it"),
    "new key": (damaged(lambda h: h.update(heads=2)), "heads: got 2 .*cannot read it"),
    "no classes": (damaged(lambda h: h.pop("classes")), "classes: got .*cannot read it"),
    "one weight missing": (damaged(tensors=lambda t: t.pop("weights/fc1.bias")), "fc1.bias is missing"),
    "weights of another size": (damaged(lambda h: h.update(shape=[16, 16, 1])), "fc1.weight has shape"),
    "fewer classes": (damaged(lambda h: h.update(classes=["a", "b"])), "fc2.weight has shape"),
    "bank of another d": (
        damaged(tensors=lambda t: t.update({"bank@values": torch.zeros(5, 3)})),
        "do not fit together",
    ),
    "class 9 of 5": (damaged(lambda h: h.update(owned=[9])), "do not fit together"),
    "statistics of 3 colours": (damaged(lambda h: h.update(mean=[0.1] * 3)), "do not fit together"),
    "no state": (damaged(tensors=lambda t: t.pop("state/head/rows")), "do not fit together"),
    "another network": (damaged(lambda h: h["model"].update(name="large")), "model.name is 'large'"),
    "an option of no network": (damaged(lambda h: h["model"].update(dim=-1)), "model.dim: got -1"),
    "an unknown method": (damaged(lambda h: h.update(method="x", origin="os:system")), "needs os:system, which"),
    "an option of no method": (damaged(lambda h: h["options"].update(rho="much")), "method.rho: got 'much'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_in_one_line(damage, tmp_path):
    path = written(tmp_path, model(FedNH(), {"name": "small"}, SHAPE))
    make, said = DAMAGES[damage]
    make(path)
    with pytest.raises(UserError, match=said) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_written_leaves_the_old_file(tmp_path):
    path = written(tmp_path, model(FedProto(), {"name": "small"}, SHAPE))
    before = path.read_bytes()
    (tmp_path / ".m.safetensors.part").mkdir()  # in the way of the new one
    with pytest.raises(UserError, match=r"m\.safetensors: cannot be written"):
        save_model(path, model(FedSAP(), {"name": "small"}, SHAPE))
    assert path.read_bytes() == before
