"""Networks by name, and stacks of weights."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Generator
from torch.testing import assert_close

from fedsap.errors import UserError
from fedsap.models import CNN, MODELS, ModuleNetwork, ResNet18, Small, build, client, count, stack

OWN = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, shape, width):
        super().__init__()
        height, across, channels = shape
        self.body = nn.Linear(height * across * channels, width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        h = self.body(x.flatten(1)).relu()
        return h, self.fc(h)

def net(classes, shape, width=7):
    return Net(classes, shape, width)

def ten(classes, shape):
    return Net(10, shape, 7)

def ready(classes, shape):
    from fedsap.models import Small
    return Small(classes, shape)

def nothing(classes, shape):
    return None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "nets_of_a_user.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nets_of_a_user", raising=False)
    return "nets_of_a_user"


def test_every_listed_name_is_built() -> None:
    kinds = {"small": Small, "cnn": CNN, "resnet18": ResNet18}
    assert list(MODELS) == [*kinds, "package.module:function"]
    for name, kind in kinds.items():
        assert isinstance(build(name, classes=3, shape=(32, 32, 3)), kind)


def test_options_reach_the_network() -> None:
    assert build("cnn", classes=3, shape=(32, 32, 3), dropout=0.0) == CNN(3, (32, 32, 3), dropout=0.0)


def test_a_function_of_the_user(own: str) -> None:
    network = build(f"{own}:net", classes=4, shape=(5, 6, 1), width=9)
    assert isinstance(network, ModuleNetwork)
    assert (network.dim, network.classes, count(network)) == (9, 4, 31 * 9 + 10 * 4)
    assert isinstance(build(f"{own}:ready", classes=4, shape=(8, 8, 1)), Small)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet", "model.name is 'resnet'; did you mean 'resnet18'. It takes small, cnn, resnet18 or package"),
        ("vit", "model.name is 'vit'; it takes small, cnn, resnet18 or package.module:function"),
        ("no_such_place:net", "importing 'no_such_place' failed: No module named 'no_such_place'"),
        (":net", "importing '' failed"),
        ("nets_of_a_user:nett", "'nets_of_a_user' has no 'nett'; did you mean 'net'?"),
        ("nets_of_a_user:ten", "it gives 10 logits, and the data has 4 classes"),
        ("nets_of_a_user:nothing", "it returned NoneType, not a torch.nn.Module or Network"),
    ],
)
def test_names_that_do_not_fit(name: str, message: str, own: str) -> None:
    with pytest.raises(UserError, match=message):
        build(name, classes=4, shape=(8, 8, 1))


def test_an_option_that_is_unknown() -> None:
    with pytest.raises(
        UserError, match=r"model.resolution is no option of model 'small'; it takes embedding, head_input"
    ):
        build("small", classes=4, shape=(8, 8, 1), resolution=64)


def test_stack_and_client_are_inverse() -> None:
    network = Small(4, (8, 8, 1))
    each = [network.init(Generator().manual_seed(q)) for q in range(3)]
    weights = stack(each)
    for q in range(3):
        assert_close(client(weights, q), each[q], rtol=0, atol=0)
    client(weights, 1)["fc2.bias"].zero_()
    assert torch.count_nonzero(weights["fc2.bias"][1]) == 0
