"""Classes of image files."""

import math
import os

import numpy as np
import pytest
import torch
from PIL import Image

from fedsap.data import Pixels, load
from fedsap.data.augment import normalise
from fedsap.errors import UserError
from fedsap.methods import FedAvg, FedMPS, FedSAP
from fedsap.predict import BATCH, Failure, allowed, files, image, predict
from models_of_clients import CLASSES, model

SHAPE = (8, 8, 3)


@pytest.fixture
def pictures(tmp_path):
    """Seven images, an unreadable one between them."""
    rng = np.random.default_rng(2)
    paths = []
    for i in range(7):
        paths.append(tmp_path / f"{i}.png")
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(paths[-1])
    paths.insert(4, tmp_path / "broken.png")
    paths[4].write_bytes(paths[0].read_bytes()[:60])
    return paths


def oracle(found, path, by, among):
    """Score by class name, the slow way."""
    x = torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy())[None]
    h, logits = (v[0] for v in found(normalise(x, found.pixels.mean, found.pixels.std)))
    those = [c for c in range(len(CLASSES)) if among == "all" or c in found.owned]
    if by == "head":
        total = sum(math.exp(logits[c]) for c in those)
        return {CLASSES[c]: math.exp(logits[c]) / total for c in those}
    known = {c: found.bank.values[c] for c in those if found.bank.mask[c]}
    if by == "cos":
        return {CLASSES[c]: float(h @ p / (h.norm() * p.norm())) for c, p in known.items()}
    return {
        CLASSES[c]: -math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(h, p, strict=True)))
        for c, p in known.items()
    }


@pytest.mark.parametrize("among", ["own", "all"])
@pytest.mark.parametrize("by", ["head", "proto", "cos"])
@pytest.mark.parametrize("method", [FedSAP(), FedMPS()], ids=lambda m: m.name)
def test_guesses_are_those_of_the_slow_way(method, by, among, pictures):
    found = model(method, {"name": "small"}, SHAPE, owned=(0, 2, 3), seen=(0, 1, 2, 4))
    guesses = list(predict(found, pictures, by, among))
    assert [one.path for one in guesses] == [str(path) for path in pictures]
    assert isinstance(guesses.pop(4), Failure)
    for one in guesses:
        said = oracle(found, one.path, by, among)
        best, next_best = sorted(said, key=said.get, reverse=True)[:2]
        assert (one.name, one.second) == (best, next_best)
        assert one.score == pytest.approx(said[best], abs=1e-5)
        assert one.margin == pytest.approx(said[best] - said[next_best], abs=1e-5)


def test_one_class_to_choose_from_has_no_second(pictures):
    found = model(FedSAP(), {"name": "small"}, SHAPE, owned=(2,))
    one = next(predict(found, pictures, "head", "own"))
    assert (one.name, one.score, one.second, one.margin) == ("cat", 1.0, None, None)


def test_prototypes_that_are_not_there():
    with pytest.raises(UserError, match="--by: got cos, but FedAvg keeps no prototypes; takes head"):
        allowed(model(FedAvg(), {"name": "small"}, SHAPE, seen=None), "cos", "all")
    found = model(FedSAP(), {"name": "small"}, SHAPE, owned=(3,), seen=(0, 1))
    with pytest.raises(UserError, match="none of the client's classes has a prototype; takes all"):
        allowed(found, "proto", "own")
    assert allowed(found, "proto", "all").tolist() == [True, True, False, False, False]


def test_files_are_read_as_answers_are_taken(pictures):
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield pictures[0]

    found = model(FedSAP(), {"name": "small"}, SHAPE)
    guesses = predict(found, endless(), "head", "all")
    for _ in range(BATCH + 1):
        next(guesses)
    assert len(taken) == 2 * BATCH


def test_folders_stand_for_their_files_in_order(tmp_path):
    for name in ("b/z.png", "b/a.jpg", "b/deep/er/x.bmp", "b/.hidden.png", "b/.git/x.png", "a.png", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "empty").mkdir()
    some = files([tmp_path / "notes.txt", tmp_path / "b", tmp_path / "empty", tmp_path / "gone.png"])
    assert [path.relative_to(tmp_path).as_posix() for path in some] == [
        "notes.txt", "b/a.jpg", "b/z.png", "b/deep/er/x.bmp", "empty", "gone.png"
    ]  # fmt: skip


def test_images_come_as_the_data_set_has_them(tmp_path):
    rng = np.random.default_rng(4)
    kinds = {
        "grey": Image.fromarray(rng.integers(0, 256, (50, 30), dtype=np.uint8)),
        "deep": Image.fromarray(rng.integers(0, 65536, (40, 40)).astype(np.uint16)),
        "clear": Image.fromarray(rng.integers(0, 256, (33, 70, 4), dtype=np.uint8), "RGBA"),
        "large": Image.fromarray(rng.integers(0, 256, (300, 200, 3), dtype=np.uint8)),
    }
    for split in ("train", "test"):
        (tmp_path / split / "one").mkdir(parents=True)
        for name, picture in kinds.items():
            picture.save(tmp_path / split / "one" / f"{name}.png")
        kinds["large"].save(tmp_path / split / "one" / "large.jpg")
    for channels in (1, 3):
        data = load("folder", tmp_path, size=16, channels=channels)
        paths = sorted((tmp_path / "test" / "one").iterdir())
        mine = [image(path, data.pixels) for path in paths]
        np.testing.assert_array_equal(np.stack(mine), data.test.images)


def test_digits_as_png_are_the_digits(tmp_path):
    digits = load("digits")
    Image.fromarray(digits.test.images[7, ..., 0]).save(tmp_path / "7.png")
    np.testing.assert_array_equal(image(tmp_path / "7.png", digits.pixels), digits.test.images[7])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"some text", "unreadable image (no image format that is known)"),
        ("b.png", b"\x89PNG\r\n\x1a\n", "unreadable image ("),
        ("c.png", b"", "unreadable image ("),
        ("d.png", None, "cannot be read (No such file or directory)"),
    ],
)
def test_what_is_no_image_says_why(name, content, said, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    reason = image(tmp_path / name, Pixels(SHAPE, (0.5,) * 3, (0.5,) * 3))
    assert isinstance(reason, str)
    assert reason.startswith(said)


def test_what_is_no_file_or_too_large_is_not_opened(tmp_path):
    pixels = Pixels(SHAPE, (0.5,) * 3, (0.5,) * 3)
    os.mkfifo(tmp_path / "a.png")  # opening it would wait for a writer
    assert image(tmp_path / "a.png", pixels) == "no file, or a folder without any that can be read"
    with (tmp_path / "b.png").open("wb") as file:
        file.truncate(2**28 + 1)
    assert image(tmp_path / "b.png", pixels) == "larger than 256 MB"


def test_networks_of_images_that_are_not_square_are_refused(pictures):
    found = model(FedSAP(), {"name": "small"}, (8, 12, 3))
    with pytest.raises(UserError, match="images of 8x12 pixels; only square ones can be read"):
        next(predict(found, pictures, "head", "all"))
