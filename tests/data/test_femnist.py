"""The by_class tree of NIST SD19 with two or three images per class."""

import os
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fedsap.data import load, pixels
from fedsap.errors import UserError

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@pytest.fixture(autouse=True)
def _nothing_elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDSAP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


def write(path, value, mode="L", size=(128, 128)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).convert(mode).save(path)


@pytest.fixture
def tree(tmp_path):
    """Class i has the training images 2i, 2i + 1 and the test image 200 - i, as grey values."""
    base = tmp_path / "data" / "by_class"
    for i, character in enumerate(CHARACTERS):
        code = f"{ord(character):02x}"
        for n in (1, 0):
            write(base / code / f"train_{code}" / f"train_{code}_{n:05d}.png", 2 * i + n, "RGB" if n else "L")
        write(base / code / "hsf_0" / "hsf_0_00000.png", 200 - i)
        write(base / code / "hsf_4" / "hsf_4_00000.png", 255)  # a part that is not used
        (base / code / "hsf_0.mit").write_text("hsf_0/hsf_0_00000.png")
    return base


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def pack(tree, prefix="by_class/"):
    path = tree.parent.parent / "zipped" / "by_class.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in tree.rglob("*.*"):
            archive.write(file, prefix + file.relative_to(tree).as_posix())
    return path


def check(dataset):
    assert dataset.classes == tuple(CHARACTERS)
    assert dataset.pixels == pixels("femnist", 64, 3)
    assert dataset.train.images.shape == (124, 128, 128, 1)
    assert dataset.test.images.shape == (62, 128, 128, 1)
    np.testing.assert_array_equal(dataset.train.images[:, 5, 7, 0], np.arange(124))
    np.testing.assert_array_equal(dataset.test.images[:, 127, 0, 0], 200 - np.arange(62))
    np.testing.assert_array_equal(dataset.train.labels, np.repeat(np.arange(62), 2))
    np.testing.assert_array_equal(dataset.test.labels, np.arange(62))


def fails(root, cache, match):
    with pytest.raises(UserError, match=match) as caught:
        load("femnist", root, cache=cache)
    assert "\n" not in str(caught.value)


def test_the_tree_is_found_under_the_root_and_as_the_root(tree, cache):
    for root in (tree.parent, tree):
        check(load("femnist", root, cache=cache))


@pytest.mark.parametrize("prefix", ["by_class/", ""])
def test_the_zip_is_read_as_it_is(tree, cache, prefix):
    archive = pack(tree, prefix)
    for root in (archive.parent, archive):
        check(load("femnist", root, cache=cache))


def test_statistics(tree, cache):
    dataset = load("femnist", tree, cache=cache)
    assert (dataset.mean, dataset.std, dataset.augment) == ((0.1307,), (0.3081,), "none")


def test_a_second_time_comes_from_the_cache(tree, cache):
    load("femnist", tree, cache=cache)
    (kept,) = cache.iterdir()
    written = kept.stat().st_mtime_ns
    check(load("femnist", tree, cache=cache))
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [written]


def test_the_cache_is_the_user_s_unless_given(tree, tmp_path):
    load("femnist", tree)
    assert [path.suffix for path in (tmp_path / "user-cache" / "fedsap").iterdir()] == [".npy"]


def test_a_changed_tree_is_decoded_again(tree, cache):
    load("femnist", tree, cache=cache)
    write(tree / "30" / "train_30" / "train_30_00000.png", 77)
    assert load("femnist", tree, cache=cache).train.images[0, 0, 0, 0] == 77


def test_a_cut_cache_is_decoded_again(tree, cache):
    load("femnist", tree, cache=cache)
    (kept,) = cache.iterdir()
    os.truncate(kept, 1000)
    check(load("femnist", tree, cache=cache))


def test_what_is_done_to_the_images_does_not_reach_the_cache(tree, cache):
    images = load("femnist", tree, cache=cache).train.images
    images[:] = 9
    check(load("femnist", tree, cache=cache))


def test_at_most_three_hundred_test_images_per_class(tree, cache):
    for n in range(301):
        write(tree / "7a" / "hsf_0" / f"hsf_0_{n:05d}.png", n % 256)
    dataset = load("femnist", tree, cache=cache)
    assert (dataset.test.labels == 61).sum() == 300
    assert dataset.test.images[-1, 0, 0, 0] == 299 % 256


def test_an_image_of_another_size_is_named_and_nothing_is_kept(tree, cache):
    write(tree / "41" / "hsf_0" / "hsf_0_00000.png", 0, size=(28, 30))
    fails(tree, cache, r"41/hsf_0/hsf_0_00000\.png: 28x30 pixels, should be 128x128")
    assert list(cache.iterdir()) == []


def test_a_damaged_image_is_named(tree, cache):
    (tree / "41" / "train_41" / "train_41_00001.png").write_bytes(b"\x89PNG")
    fails(tree, cache, r"by_class/41/train_41/train_41_00001\.png: unreadable image")


@pytest.mark.parametrize(("folder", "said"), [("train_62", "62/train_62"), ("hsf_0", "62/hsf_0")])
def test_a_class_without_images_is_named(tree, cache, folder, said):
    (tree / "62" / folder).rename(tree / "62" / "elsewhere")
    fails(tree, cache, rf"by_class: no PNG files in {said};")


def test_a_zip_without_a_class_is_named(tree, cache):
    (tree / "62" / "hsf_0").rename(tree / "62" / "elsewhere")
    fails(pack(tree), cache, r"by_class\.zip: no PNG files in 62/hsf_0;")


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_cut_zip_is_named(tree, cache, keep):
    archive = pack(tree)
    os.truncate(archive, int(keep * archive.stat().st_size))
    fails(archive.parent, cache, r"by_class\.zip: damaged archive")


def test_a_flipped_byte_in_a_zip_is_noticed(tree, cache):
    archive = pack(tree)
    with zipfile.ZipFile(archive) as opened:
        info = next(i for i in opened.infolist() if i.filename.endswith("train_30_00000.png"))
    payload = bytearray(archive.read_bytes())
    start = info.header_offset + 30 + len(info.filename)
    payload[start + info.compress_size // 2] ^= 0xFF
    archive.write_bytes(payload)
    fails(archive, cache, r"by_class\.zip/by_class/30/train_30/train_30_00000\.png: ")


def test_a_cache_that_cannot_be_written_is_named(tree, tmp_path):
    (tmp_path / "file").write_text("in the way")
    fails(tree, tmp_path / "file" / "cache", r"file/cache: the decoded images cannot be kept here \(Not a directory\)")


def test_too_little_room_is_said_before_anything_is_written(tree, cache, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    fails(tree, cache, r"cache: 0\.0 GB needed to decode .*by_class, 0\.0 GB free")
    assert list(cache.iterdir()) == []


def test_missing_data_names_the_page(tmp_path):
    fails(tmp_path, None, r"by_class\.zip\) not found; .* https://www\.nist\.gov/srd/nist-special-database-19$")
