"""The datasets by name."""

from pathlib import Path
from typing import Literal

from fedsap.data import digits, femnist, folder
from fedsap.data.cifar import CIFAR10, CIFAR100, load_cifar
from fedsap.data.digits import load_digits
from fedsap.data.femnist import load_femnist
from fedsap.data.folder import load_folder
from fedsap.data.places import search_path
from fedsap.data.split import Augment, Dataset, Pixels, Split
from fedsap.errors import UserError

__all__ = ["DATASETS", "Augment", "Dataset", "Pixels", "Split", "load", "pixels", "search_path", "shortage"]

DATASETS: dict[str, str] = {
    "digits": "handwritten digits, built in: 10 classes, 1,442 + 355 grey images of 8x8",
    "cifar10": "CIFAR-10: 10 classes, 50,000 + 10,000 colour images of 32x32",
    "cifar100": "CIFAR-100: 100 classes, 50,000 + 10,000 colour images of 32x32",
    "femnist": "NIST SD19 by class: 62 handwritten characters, grey images of 128x128",
    "folder": "your own images: train/CLASS/*.png and test/CLASS/*.png (or .jpg)",
}


def load(
    name: str,
    root: Path | None = None,
    *,
    size: int | None = None,
    channels: Literal[1, 3] = 3,
    cache: Path | None = None,
) -> Dataset:
    """The dataset `name` from `root` or the rest of the search path. Nothing is downloaded.

    size, channels: what the images of 'folder' are brought to (default 64, RGB); the others have a fixed size.
    cache: where 'femnist' keeps its decoded images, instead of the user's cache folder.

    >>> digits = load("digits")
    >>> digits.train.images.shape, digits.test.images.shape
    ((1442, 8, 8, 1), (355, 8, 8, 1))
    """
    if name not in DATASETS:
        raise UserError(f"data.name: no dataset {name!r}; there are {', '.join(DATASETS)}")
    if name == "folder":
        return load_folder(root, 64 if size is None else size, channels)
    if name == "digits":
        dataset = load_digits()
    elif name == "femnist":
        dataset = load_femnist(root, cache)
    else:
        dataset = load_cifar(CIFAR10 if name == "cifar10" else CIFAR100, root)
    return _fixed(dataset, size, channels)


def shortage(dataset: Dataset) -> str:
    """What is missing of a data set that is used all the same; empty if nothing is.

    >>> shortage(load("digits"))
    ''
    """
    whole, there = {"cifar10": 50_000, "cifar100": 50_000}.get(dataset.name, 0), len(dataset.train.labels)
    return f"{dataset.name}: {there:,} of its {whole:,} training images are there" if there < whole else ""


def pixels(name: str, size: int, channels: int) -> Pixels:
    """How the images of a data set come to a network, without the data. `size` and `channels` are those of 'folder'.

    >>> pixels("digits", 64, 3).shape
    (8, 8, 1)
    """
    if name == "folder":
        return folder.pixels(size, channels)
    fixed = {"digits": digits.PIXELS, "femnist": femnist.PIXELS, "cifar10": CIFAR10.pixels, "cifar100": CIFAR100.pixels}
    return fixed[name]


def _fixed(dataset: Dataset, size: int | None, channels: int) -> Dataset:
    """The dataset, unless something else than its own size and channels was asked for."""
    _, side, _, own = dataset.train.images.shape
    if size not in (None, side):
        raise UserError(f"data.size: {size}, but the images of {dataset.name} are {side}x{side}; leave it out")
    if channels not in (3, own):
        raise UserError(f"data.channels: {channels}, but the images of {dataset.name} have {own}; leave it out")
    return dataset
