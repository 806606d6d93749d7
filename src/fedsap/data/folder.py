"""Anybody's images: train/CLASS/*.png and test/CLASS/*.png."""

import os
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsap.data.decode import decode, fill
from fedsap.data.places import search_path
from fedsap.data.split import Dataset, Pixels, Split
from fedsap.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg")
LAYOUT = "train/CLASS/*.png and test/CLASS/*.png (or .jpg, .jpeg)"


def load_folder(root: Path | None, size: int = 64, channels: Literal[1, 3] = 3) -> Dataset:
    """The images under train/CLASS and test/CLASS, scaled and cropped to uint8 [N, size, size, channels].

    Classes are sorted by name and images by path; folders inside a class belong to it; what begins with a dot is left
    out. A given `root` is taken as it is, otherwise the first place of the search path with a train folder. A class
    may be without test images, but not without training images.
    """
    look = pixels(size, channels)
    base = _base(root)
    train, test = _classes(base / "train"), _classes(base / "test")
    for name in sorted(set(test) - set(train)):
        raise UserError(f"{base / 'test' / name}: class {name!r} has no folder in {base / 'train'}")
    names = sorted(train)
    return Dataset(
        name="folder",
        train=_split(train, names, size, channels),
        test=_split(test, names, size, channels),
        classes=tuple(names),
        mean=look.mean,
        std=look.std,
        augment="crop-flip",
    )


def pixels(size: int, channels: int) -> Pixels:
    """How images of a folder come to a network.

    >>> pixels(64, 1)
    Pixels(shape=(64, 64, 1), mean=(0.5,), std=(0.5,), background=0)
    """
    if size < 1:
        raise UserError(f"data.size: {size}, should be at least 1 pixel")
    if channels not in (1, 3):
        raise UserError(f"data.channels: {channels}, should be 1 (grey) or 3 (RGB)")
    return Pixels((size, size, channels), mean=(0.5,) * channels, std=(0.5,) * channels)


def _base(root: Path | None) -> Path:
    places = search_path(root)[: 1 if root is not None else None]
    base = next((place for place in places if (place / "train").is_dir()), None)
    if base is None:
        looked = ", ".join(map(str, places))
        raise UserError(f"data.root: no folder train/ in {looked}; images go into {LAYOUT}")
    if not (base / "test").is_dir():
        raise UserError(f"{base}: there is train/ but no folder test/; images go into {LAYOUT}")
    return base


def _classes(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class folder, none of them empty."""
    found = {}
    try:
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.name.startswith("."):
                found[entry.name] = _images(entry)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from error
    for name, paths in sorted(found.items()):
        if not paths:
            raise UserError(
                f"{folder / name}: no image in this class; a class needs at least one {', '.join(SUFFIXES)}"
            )
    if not found:
        raise UserError(f"{folder}: no class folders in it; images go into {LAYOUT}")
    return found


def _images(folder: Path) -> list[Path]:
    def stop(error: OSError) -> None:
        raise error

    paths = []
    for parent, subfolders, files in os.walk(folder, onerror=stop):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        paths += [Path(parent, name) for name in files if name.lower().endswith(SUFFIXES) and not name.startswith(".")]
    return sorted(paths)


def _split(classes: dict[str, list[Path]], names: list[str], size: int, channels: int) -> Split:
    pairs = [(path, label) for label, name in enumerate(names) for path in classes.get(name, [])]

    def one(i: int) -> NDArray[np.uint8]:
        path = pairs[i][0]
        try:
            payload = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        return decode(payload, str(path), channels=channels, size=size)

    images = np.empty((len(pairs), size, size, channels), dtype=np.uint8)
    fill(images, one)
    return Split(images, np.array([label for _, label in pairs], dtype=np.int64))
