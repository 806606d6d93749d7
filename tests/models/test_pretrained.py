"""ImageNet weights for ResNet-18: the real file where there is one, otherwise one made here; and damaged files."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Generator
from torch.testing import assert_close

from fedsap.errors import UserError
from fedsap.models import ResNet18, layout, pretrained

SHARED = Path(os.environ.get("FEDSAP_SHARED", Path(__file__).parents[3] / "shared"))
REAL = SHARED / "data" / "resnet18_imagenet1k_v1.npz"
Arrays = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    """A state_dict of torchvision's ResNet-18 with its 1000 classes and recognisable numbers."""
    network = ResNet18(classes=1000, shape=(32, 32, 3))
    return {name: tensor.numpy() for name, tensor in network.export(network.init(Generator().manual_seed(7))).items()}


@pytest.fixture(scope="module")
def file(arrays: Arrays, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "resnet18.npz"
    np.savez(path, **arrays)
    return path


def make(path: Path, **options: Any) -> ResNet18:
    return ResNet18(classes=10, shape=(32, 32, 3), weights=str(path), **options)


def test_everything_but_the_head_is_loaded(file: Path, arrays: Arrays) -> None:
    network = make(file)
    state = network.export(network.init(Generator().manual_seed(0)))
    assert len(state) == 122
    for name, tensor in state.items():
        if name.startswith("fc."):
            assert tensor.shape[0] == 10
        else:
            np.testing.assert_array_equal(tensor.numpy(), arrays[name])


def test_the_head_is_new_for_every_client(file: Path) -> None:
    first, other = (make(file).init(Generator().manual_seed(seed)) for seed in (0, 1))
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert torch.equal(first["conv1.weight"], other["conv1.weight"])


def test_the_stem_can_be_new_for_every_client(file: Path, arrays: Arrays) -> None:
    first, other = (make(file, reinit_stem=True).init(Generator().manual_seed(seed)) for seed in (0, 1))
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])
    assert bool((first["bn1.weight"] == 1).all() and (first["bn1.running_mean"] == 0).all())
    np.testing.assert_array_equal(layout.external(first["layer1.0.conv1.weight"]), arrays["layer1.0.conv1.weight"])


def test_the_file_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretrained._read.cache_clear()
    reads = []
    load = np.load
    monkeypatch.setattr(np, "load", lambda *a, **k: reads.append(a) or load(*a, **k))
    first = make(file).init(Generator().manual_seed(0))
    first["layer1.0.conv1.weight"].zero_()
    assert float(make(file).init(Generator().manual_seed(1))["layer1.0.conv1.weight"].abs().sum()) > 0
    assert len(reads) == 1


def test_pth_and_npz_give_the_same(file: Path, arrays: Arrays, tmp_path: Path) -> None:
    path = tmp_path / "resnet18.pth"
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    first, other = (make(p).init(Generator().manual_seed(0)) for p in (file, path))
    assert_close(first, other, rtol=0, atol=0)


def test_batch_counters_are_optional(arrays: Arrays, tmp_path: Path) -> None:
    path = tmp_path / "no_counters.npz"
    np.savez(path, **{name: array for name, array in arrays.items() if "num_batches" not in name})
    make(path).init(Generator().manual_seed(0))


@pytest.mark.skipif(not REAL.is_file(), reason="the ImageNet weights are not here")
def test_the_real_file() -> None:
    network = make(REAL, resolution=64)
    weights = network.init(Generator().manual_seed(0))
    with np.load(REAL) as real:
        state = network.export(weights)
        assert [name for name in state if not name.startswith("fc.")] == [n for n in real.files if n[:3] != "fc."]
        for name in real.files:
            if not name.startswith("fc.") and "num_batches" not in name:
                np.testing.assert_array_equal(state[name].numpy(), real[name])
    out = network({name: tensor[None] for name, tensor in weights.items()}, torch.zeros(1, 2, 32, 32, 3))
    assert bool(out.h.isfinite().all() and (out.h >= 0).all() and out.h.max() > 0)


def missing(arrays: Arrays) -> Arrays:
    return {name: array for name, array in arrays.items() if name != "layer2.0.bn1.running_var"}


def misshapen(arrays: Arrays) -> Arrays:
    return {**arrays, "layer3.0.conv1.weight": np.zeros((256, 128, 1, 1), np.float32)}


def unknown(arrays: Arrays) -> Arrays:
    return {**arrays, "layer1.2.conv1.weight": np.zeros(1, np.float32)}


def integers(arrays: Arrays) -> Arrays:
    return {**arrays, "bn1.bias": np.zeros(64, np.int64)}


def objects(arrays: Arrays) -> Arrays:
    return {**arrays, "bn1.bias": np.array([None] * 64)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (missing, r"layer2.0.bn1.running_var is missing; a tensor of shape \(128,\) is needed"),
        (misshapen, r"layer3.0.conv1.weight has shape \(256, 128, 1, 1\); \(256, 128, 3, 3\) is needed"),
        (unknown, "layer1.2.conv1.weight is unknown"),
        (integers, r"bn1.bias holds torch.int64; floating point numbers of shape \(64,\) are needed"),
        (objects, "cannot be read as .npz: Object arrays cannot be loaded"),
    ],
)
def test_a_file_with_wrong_entries(
    change: Callable[[Arrays], Arrays], message: str, arrays: Arrays, tmp_path: Path
) -> None:
    path = tmp_path / "wrong.npz"
    np.savez(path, **change(arrays))
    assert_refused(path, message)


def assert_refused(path: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make(path).init(Generator().manual_seed(0))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".npz", ".pth"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file(suffix: str, share: float, arrays: Arrays, file: Path, tmp_path: Path) -> None:
    whole = file
    if suffix == ".pth":
        whole = tmp_path / "whole.pth"
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, whole)
    content = whole.read_bytes()
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(content[: int(len(content) * share)])
    assert_refused(path, f"cannot be read as {suffix}")


def test_a_file_with_a_damaged_entry(file: Path, tmp_path: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path = tmp_path / "flipped.npz"
    path.write_bytes(bytes(content))
    assert_refused(path, "cannot be read as .npz: Bad CRC-32")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.pth", b"not weights at all", "cannot be read as .pth: it holds something else than plain tensors"),
        ("text.npz", b"not weights at all", "cannot be read as .npz"),
        ("weights.bin", b"", "a name ending in .pth or .npz is needed"),
    ],
)
def test_a_file_of_another_kind(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert_refused(path, message)


def test_a_pth_that_holds_no_dictionary(tmp_path: Path) -> None:
    path = tmp_path / "list.pth"
    torch.save([torch.zeros(2)], path)
    assert_refused(path, "it holds list, not a dictionary of tensors")


class Code:
    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return print, ("code of a stranger",)


def test_a_pth_with_code_in_it_is_not_read_and_nobody_is_told_to_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "code.pth"
    torch.save({"conv1.weight": Code()}, path)
    assert_refused(path, "is not read, since that could run code; takes what torch.save writes of a state_dict$")
    assert capsys.readouterr().out == ""


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere.npz", "is not a file; it takes a .pth or .npz file")
