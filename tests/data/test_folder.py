"""Folders of images of mixed sizes and modes."""

import numpy as np
import pytest
from PIL import Image

from fedsap.data import load, pixels
from fedsap.errors import UserError


@pytest.fixture(autouse=True)
def _nothing_elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDSAP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-cache"))


def write(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


@pytest.fixture
def root(tmp_path):
    """Three classes; names begin with a capital and a space occurs, as people's folders have them."""
    base = tmp_path / "scans"
    palette = Image.new("P", (40, 30), 1)
    palette.putpalette([0, 0, 0, 10, 200, 30])
    write(base / "train" / "crack" / "a.png", palette)
    write(base / "train" / "crack" / "deep" / "er" / "b.PNG", Image.new("RGBA", (20, 90), (1, 2, 3, 255)))
    write(base / "train" / "No defect" / "c.JPG", Image.new("L", (33, 33), 120))
    deep = Image.fromarray(np.full((50, 70), 32896, dtype=np.uint16))
    write(base / "train" / "No defect" / "d.png", deep)
    write(base / "train" / "scratch" / "e.jpeg", Image.new("RGB", (8, 8), (50, 60, 70)))
    write(base / "test" / "crack" / "f.png", Image.new("RGB", (100, 100), (9, 9, 9)))
    write(base / "test" / "No defect" / "g.png", Image.new("L", (100, 10), 44))
    (base / "train" / "crack" / ".a.png").write_bytes(b"left by a file browser")
    (base / "train" / ".cache").mkdir()
    (base / "train" / "crack" / ".old").mkdir()
    (base / "train" / "crack" / ".old" / "x.png").write_bytes(b"")
    (base / "train" / "crack" / "notes.txt").write_text("not an image")
    (base / "train" / "readme.txt").write_text("not a class")
    return base


def fails(root, match, **options):
    with pytest.raises(UserError, match=match) as caught:
        load("folder", root, **options)
    assert "\n" not in str(caught.value)


def test_classes_are_sorted_and_images_brought_to_one_size(root):
    dataset = load("folder", root)
    assert dataset.classes == ("No defect", "crack", "scratch")
    assert dataset.train.images.shape == (5, 64, 64, 3)
    assert dataset.train.images.dtype == np.uint8
    assert dataset.train.labels.tolist() == [0, 0, 1, 1, 2]
    assert dataset.test.labels.tolist() == [0, 1]
    expected = [[120] * 3, [128] * 3, [10, 200, 30], [1, 2, 3], [50, 60, 70]]
    middle = dataset.train.images[:, 32, 32].astype(int)
    assert abs(middle - expected).max() <= 2  # JPEG


def test_size_and_grey(root):
    dataset = load("folder", root, size=16, channels=1)
    assert dataset.test.images.shape == (2, 16, 16, 1)
    assert dataset.test.images[0, 3, 3, 0] == 44
    assert (dataset.mean, dataset.std) == ((0.5,), (0.5,))
    assert dataset.pixels == pixels("folder", 16, 1)


def test_statistics(root):
    dataset = load("folder", root)
    assert (dataset.mean, dataset.std, dataset.augment) == ((0.5,) * 3, (0.5,) * 3, "crop-flip")


def test_the_variable_names_the_root(root, monkeypatch):
    monkeypatch.setenv("FEDSAP_DATA", str(root))
    assert len(load("folder").classes) == 3


def test_a_given_root_is_not_replaced_by_another_place(root, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSAP_DATA", str(root))
    (tmp_path / "other").mkdir()
    fails(tmp_path / "other", r"^data\.root: no folder train/ in \S+other; images go into train/CLASS")


def test_an_unreadable_image_is_named(root):
    (root / "train" / "scratch" / "z.jpg").write_bytes(b"\xff\xd8\xff broken")
    fails(root, r"train/scratch/z\.jpg: unreadable image")


def test_a_dead_link_is_named(root):
    (root / "train" / "scratch" / "z.jpg").symlink_to(root / "gone.jpg")
    fails(root, r"train/scratch/z\.jpg: cannot be read")


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_empty_class_is_named(root, split):
    (root / split / "blank").mkdir()
    (root / split / "blank" / "scan.tif").write_bytes(b"")
    fails(root, rf"{split}/blank: no image in this class; .*\.png, \.jpg, \.jpeg")


def test_a_class_only_in_test_is_named(root):
    write(root / "test" / "burn" / "a.png", Image.new("L", (4, 4)))
    fails(root, r"test/burn: class 'burn' has no folder in \S+train")


def test_without_a_test_folder(root):
    (root / "test").rename(root / "valid")
    fails(root, "there is train/ but no folder test/")


def test_without_class_folders(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    fails(tmp_path, "train: no class folders in it")


@pytest.mark.parametrize(("options", "key"), [({"size": 0}, "size"), ({"channels": 4}, "channels")])
def test_options_out_of_range(root, options, key):
    fails(root, rf"^data\.{key}: ", **options)
