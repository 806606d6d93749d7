"""CIFAR from tiny files with the official layout."""

import io
import os
import pickle
import shutil
import tarfile

import numpy as np
import pytest

from fedsap.data import load, pixels
from fedsap.errors import UserError

NAMES = {10: [f"class {i}" for i in range(10)], 100: [f"class {i}" for i in range(100)]}


@pytest.fixture(autouse=True)
def _nothing_elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDSAP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-cache"))


class Python2(pickle._Pickler):
    """Writes what Python 2 wrote: strings of bytes, integers for booleans."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_string(self, text):
        raw = text.encode("latin1") if isinstance(text, str) else text
        self.write(pickle.BINSTRING + len(raw).to_bytes(4, "little") + raw)
        self.memoize(text)

    def save_flag(self, flag):
        self.save(int(flag))

    dispatch[str] = dispatch[bytes] = save_string
    dispatch[bool] = save_flag


def python2(content):
    file = io.BytesIO()
    Python2(file, protocol=2).dump(content)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def python3(content):
    return pickle.dumps({key.encode(): value for key, value in content.items()}, protocol=2)


def rows(n, seed):
    return np.random.default_rng(seed).integers(0, 256, (n, 3072), dtype=np.uint8)


def batch(n, seed, classes=10):
    key = "labels" if classes == 10 else "fine_labels"
    return {"data": rows(n, seed), key: [(seed + 3 * i) % classes for i in range(n)], "filenames": ["a.png"] * n}


@pytest.fixture
def cifar10(tmp_path):
    """A folder with three batches out of five, written in a mixed order."""
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number in (3, 1, 5):
        (folder / f"data_batch_{number}").write_bytes(python2(batch(4, number)))
    (folder / "test_batch").write_bytes(python2(batch(6, 9)))
    (folder / "batches.meta").write_bytes(python2({"label_names": NAMES[10], "num_vis": 3072}))
    (folder / "readme.html").write_text("not a pickle")
    return folder


@pytest.fixture
def cifar100(tmp_path):
    folder = tmp_path / "data" / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, n in (("train", 7), ("test", 5)):
        (folder / name).write_bytes(python3(batch(n, n, 100) | {"coarse_labels": [0] * n}))
    (folder / "meta").write_bytes(python3({"fine_label_names": NAMES[100], "coarse_label_names": NAMES[10]}))
    return folder


def pack(folder):
    """The folder as the tar.gz beside it; the folder is removed."""
    archive = folder.parent / f"{folder.name.removesuffix('-batches-py').removesuffix('-python')}-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    shutil.rmtree(folder)
    return archive


def fails(name, root, match):
    with pytest.raises(UserError, match=match) as caught:
        load(name, root)
    assert "\n" not in str(caught.value)


def test_planes_become_pixels_in_the_order_of_the_batches(cifar10):
    dataset = load("cifar10", cifar10.parent)
    expected = np.concatenate([rows(4, number) for number in (1, 3, 5)])
    assert dataset.train.images.shape == (12, 32, 32, 3)
    for i, y, x, c in ((0, 0, 0, 0), (5, 3, 31, 2), (11, 31, 7, 1)):
        assert dataset.train.images[i, y, x, c] == expected[i, 1024 * c + 32 * y + x]
    assert dataset.train.labels.tolist() == [(s + 3 * i) % 10 for s in (1, 3, 5) for i in range(4)]
    assert dataset.train.labels.dtype == np.int64
    assert dataset.test.images.shape == (6, 32, 32, 3)
    assert dataset.classes == tuple(NAMES[10])


def test_batch_ten_comes_after_batch_two(cifar10):
    (cifar10 / "data_batch_10").write_bytes(python3(batch(1, 10)))
    assert load("cifar10", cifar10).train.labels[-1] == 0


def test_cifar10_statistics(cifar10):
    dataset = load("cifar10", cifar10.parent)
    assert (dataset.mean, dataset.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert dataset.augment == "crop-flip"
    assert dataset.pixels == pixels("cifar10", 64, 3)


def test_cifar100(cifar100):
    dataset = load("cifar100", cifar100.parent)
    assert dataset.train.images.shape == (7, 32, 32, 3)
    assert dataset.test.labels.tolist() == [5, 8, 11, 14, 17]
    assert len(dataset.classes) == 100
    assert (dataset.mean, dataset.std) == ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_folder_itself_and_archive_give_the_same(name, request):
    folder = request.getfixturevalue(name)
    expected = load(name, folder.parent)
    inside = load(name, folder)
    archive = pack(folder)
    for dataset in (inside, load(name, archive.parent), load(name, archive)):
        np.testing.assert_array_equal(dataset.train.images, expected.train.images)
        np.testing.assert_array_equal(dataset.test.labels, expected.test.labels)
        assert dataset.classes == expected.classes
    assert not folder.exists()


def test_a_hostile_batch_in_an_archive_does_not_run(cifar10, tmp_path):
    marker = tmp_path / "ran"

    class Bad:
        def __reduce__(self):
            return os.system, (f"echo > {marker}",)

    (cifar10 / "data_batch_1").write_bytes(pickle.dumps({b"data": Bad()}, protocol=2))
    fails("cifar10", pack(cifar10), r"cifar-10-python\.tar\.gz/data_batch_1: refused")
    assert not marker.exists()


@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
def test_a_cut_file_is_named(cifar10, file):
    payload = (cifar10 / file).read_bytes()
    (cifar10 / file).write_bytes(payload[: len(payload) // 2])
    fails("cifar10", cifar10, f"{file}: damaged pickle")


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.95])
def test_a_cut_archive_is_named(cifar10, keep):
    archive = pack(cifar10)
    payload = archive.read_bytes()
    archive.write_bytes(payload[: int(keep * len(payload))])
    fails("cifar10", archive.parent, r"cifar-10-python\.tar\.gz: (damaged|incomplete)")


def test_a_flipped_byte_in_an_archive_is_noticed(cifar10):
    archive = pack(cifar10)
    payload = bytearray(archive.read_bytes())
    payload[len(payload) // 2] ^= 0xFF
    archive.write_bytes(payload)
    fails("cifar10", archive.parent, r"cifar-10-python\.tar\.gz")


@pytest.mark.parametrize("file", ["test_batch", "batches.meta"])
def test_a_missing_file_is_named(cifar10, file):
    (cifar10 / file).unlink()
    fails("cifar10", cifar10.parent, f"incomplete, without {file}")


def test_without_training_files(cifar100):
    (cifar100 / "train").unlink()
    fails("cifar100", cifar100.parent, "incomplete, without training file")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"data": rows(4, 0).astype(np.float32)}, r"'data' is float32 \[4, 3072\], should be uint8 \[N, 3072\]"),
        ({"data": rows(4, 0)[:, :1024]}, r"'data' is uint8 \[4, 1024\]"),
        ({"data": "pixels"}, "'data' is str|'data' is bytes"),
        ({"labels": [0, 1, 2]}, "one integer for each of the 4 images"),
        ({"labels": [0.5] * 4}, "one integer for each"),
        ({"labels": [[1], [2, 3], 4, 5]}, "one integer for each"),
        ({"labels": [0, 1, 2, 10]}, "label 10 in 'labels', should be 0 to 9"),
        ({"labels": [0, 1, 2, -1]}, "label -1"),
    ],
)
def test_contents_of_the_wrong_kind(cifar10, change, match):
    (cifar10 / "data_batch_3").write_bytes(python3(batch(4, 0) | change))
    fails("cifar10", cifar10, f"data_batch_3: .*({match})")


def test_a_file_of_the_other_dataset(cifar10):
    (cifar10 / "test_batch").write_bytes(python3(batch(4, 0, 100)))
    fails("cifar10", cifar10, "test_batch: no entry 'labels'")


def test_too_few_names(cifar10):
    (cifar10 / "batches.meta").write_bytes(python3({"label_names": ["a"]}))
    fails("cifar10", cifar10, r"batches\.meta: 'label_names' should be a list of 10 names")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_missing_data_names_every_place_and_the_page(name, tmp_path, monkeypatch):
    for place in ("mine", "shared"):
        (tmp_path / place).mkdir()
    monkeypatch.setenv("FEDSAP_DATA", str(tmp_path / "shared"))
    cached = tmp_path / "no-cache" / "fedsap"
    fails(name, tmp_path / "mine", rf"mine, \S+shared, {cached} .*https://www\.cs\.toronto\.edu/~kriz/cifar\.html")
