"""CIFAR-10 and CIFAR-100 from the official Python files, unpacked or still inside their tar.gz."""

import gzip
import re
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsap.data.places import find
from fedsap.data.split import Dataset, Pixels, Split
from fedsap.data.unpickle import load_arrays
from fedsap.errors import UserError

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
ROW = 3 * 32 * 32


@dataclass(frozen=True)
class _Format:
    """How one of the two is laid out. `train` matches the names of the training files, of which a part is enough."""

    name: str
    folder: str
    archive: str
    train: str
    test: str
    meta: str
    labels: str
    names: str
    classes: int
    pixels: Pixels


# The constants of FedProto's loaders, which later work in its line keeps: ImageNet's for CIFAR-10.
CIFAR10 = _Format(
    name="cifar10",
    folder="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz",
    train=r"data_batch_\d+",
    test="test_batch",
    meta="batches.meta",
    labels="labels",
    names="label_names",
    classes=10,
    pixels=Pixels((32, 32, 3), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
)
CIFAR100 = _Format(
    name="cifar100",
    folder="cifar-100-python",
    archive="cifar-100-python.tar.gz",
    train="train",
    test="test",
    meta="meta",
    labels="fine_labels",
    names="fine_label_names",
    classes=100,
    pixels=Pixels((32, 32, 3), mean=(0.507, 0.487, 0.441), std=(0.267, 0.256, 0.276)),
)


def load_cifar(form: _Format, root: Path | None) -> Dataset:
    """All images of CIFAR10 or CIFAR100 as uint8 [N, 32, 32, 3], training files in the order of their numbers."""

    def locate(place: Path) -> Path | None:
        for path in (place / form.folder, place / form.archive):
            if path.exists():
                return path
        unpacked = (place / form.test).is_file() and (place / form.meta).is_file()
        return place if unpacked or (place.name == form.archive and place.is_file()) else None

    source = find(f"{form.name} ({form.folder}/ or {form.archive})", root, locate, PAGE)
    files = _read_folder(source, form) if source.is_dir() else _read_archive(source, form)
    train = sorted((name for name in files if re.fullmatch(form.train, name)), key=lambda name: (len(name), name))
    wanted = {"training file": train, form.test: form.test in files, form.meta: form.meta in files}
    if absent := [name for name, there in wanted.items() if not there]:
        raise UserError(f"{source}: incomplete, without {' and '.join(absent)}; fetch {form.archive} from {PAGE}")
    return Dataset(
        name=form.name,
        train=_split([(f"{source}/{name}", files[name]) for name in train], form),
        test=_split([(f"{source}/{form.test}", files[form.test])], form),
        classes=_names(f"{source}/{form.meta}", files[form.meta], form),
        mean=form.pixels.mean,
        std=form.pixels.std,
        augment="crop-flip",
    )


def _wanted(name: str, form: _Format) -> bool:
    return name in (form.test, form.meta) or re.fullmatch(form.train, name) is not None


def _read_folder(folder: Path, form: _Format) -> dict[str, bytes]:
    try:
        return {path.name: path.read_bytes() for path in folder.iterdir() if _wanted(path.name, form)}
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be read ({error.strerror})") from error


def _read_archive(archive: Path, form: _Format) -> dict[str, bytes]:
    files = {}
    try:
        with gzip.open(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:  # in the order of the archive: nothing is decompressed twice
                name = PurePosixPath(member.name).name
                if member.isfile() and _wanted(name, form) and (content := tar.extractfile(member)):
                    files[name] = content.read()
            while stream.read(1 << 20):  # gzip compares its checksum at the very end
                pass
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise UserError(f"{archive}: damaged archive ({error}); fetch it again from {PAGE}") from error
    return files


def _split(parts: Iterable[tuple[str, bytes]], form: _Format) -> Split:
    pairs = [_batch(where, payload, form) for where, payload in parts]
    rows = np.concatenate([data for data, _ in pairs])
    images = np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return Split(images, np.concatenate([labels for _, labels in pairs]))


def _batch(where: str, payload: bytes, form: _Format) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """One file: rows uint8 [N, 3072] (a red, a green and a blue plane) and labels int64 [N]."""
    content = load_arrays(payload, where)
    for key in ("data", form.labels):
        if key not in content:
            raise UserError(f"{where}: no entry {key!r}; a {form.name} file has 'data' and {form.labels!r}")
    data: Any = content["data"]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != ROW:
        got = f"{data.dtype} {list(data.shape)}" if isinstance(data, np.ndarray) else type(data).__name__
        raise UserError(f"{where}: 'data' is {got}, should be uint8 [N, {ROW}]")
    try:
        labels = np.asarray(content[form.labels])
    except ValueError:
        labels = np.empty(0)
    if labels.dtype.kind not in "iu" or labels.shape != (len(data),) or len(data) == 0:
        raise UserError(f"{where}: {form.labels!r} should be one integer for each of the {len(data)} images")
    if labels.min() < 0 or labels.max() >= form.classes:
        bad = labels[(labels < 0) | (labels >= form.classes)][0]
        raise UserError(f"{where}: label {bad} in {form.labels!r}, should be 0 to {form.classes - 1}")
    return data, labels.astype(np.int64)


def _names(where: str, payload: bytes, form: _Format) -> tuple[str, ...]:
    names = load_arrays(payload, where).get(form.names)
    if not isinstance(names, list) or len(names) != form.classes:
        raise UserError(f"{where}: {form.names!r} should be a list of {form.classes} names")
    return tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names)
