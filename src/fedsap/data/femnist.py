"""The 62 handwritten characters of NIST Special Database 19, from its `by_class` tree or zip, 128x128 and grey."""

import hashlib
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from fedsap.data.decode import decode, fill
from fedsap.data.places import cache_folder, find
from fedsap.data.split import Dataset, Pixels, Split
from fedsap.errors import UserError

PAGE = "https://www.nist.gov/srd/nist-special-database-19"
CODES = tuple(f"{ord(c):02x}" for c in "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
SIDE = 128
PIXELS = Pixels((SIDE, SIDE, 1), mean=(0.1307,), std=(0.3081,), background=255)
TEST_FILES = 300  # per class, the first by name, as FedProto takes them


@dataclass(frozen=True, slots=True)
class _File:
    """One image of the tree. name: CODE/FOLDER/FILE. stamp: what changes when the content does."""

    name: str
    stamp: str


@dataclass(frozen=True)
class _Tree:
    """The images of a tree in the order of their names, and how to read one."""

    source: Path
    files: dict[tuple[str, str], list[_File]]  # (code, "train" or "test")
    read: Callable[[str], bytes]

    def listing(self, split: str) -> list[tuple[int, _File]]:
        """(label, file) of a split, class by class."""
        stop = TEST_FILES if split == "test" else None
        return [(label, file) for label, code in enumerate(CODES) for file in self.files[code, split][:stop]]


def load_femnist(root: Path | None, cache: Path | None = None) -> Dataset:
    """Every `train_XX` image for training, the first 300 of `hsf_0` of each class for testing: uint8 [N, 128, 128, 1].

    The files are decoded once, into an array in `cache` (default: the user's cache folder) that later calls map into
    memory; the whole database takes about 12 GB there. A tree that has changed is decoded again.
    """

    def locate(place: Path) -> Path | None:
        for path in (place / "by_class", place / "by_class.zip"):
            if path.exists():
                return path
        tree = (place / CODES[0]).is_dir() and (place / CODES[-1]).is_dir()
        return place if tree or (place.suffix == ".zip" and place.is_file()) else None

    source = find("femnist (NIST SD19, by_class/ or by_class.zip)", root, locate, PAGE)
    if source.is_dir():
        return _load(_scan_folder(source), cache)
    try:
        with zipfile.ZipFile(source) as archive:
            return _load(_scan_zip(source, archive), cache)
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"{source}: damaged archive ({error}); fetch it again from {PAGE}") from error


def _load(tree: _Tree, cache: Path | None) -> Dataset:
    for (code, split), files in tree.files.items():
        if not files:
            folder = f"{code}/{f'train_{code}' if split == 'train' else 'hsf_0'}"
            raise UserError(f"{tree.source}: no PNG files in {folder}; by_class has them for each of its 62 classes")
    train, test = tree.listing("train"), tree.listing("test")
    images = _decoded(tree, [file for _, file in train + test], cache if cache is not None else cache_folder())
    labels = np.array([label for label, _ in train + test], dtype=np.int64)
    return Dataset(
        name="femnist",
        train=Split(images[: len(train)], labels[: len(train)]),
        test=Split(images[len(train) :], labels[len(train) :]),
        classes=tuple(chr(int(code, 16)) for code in CODES),
        mean=PIXELS.mean,
        std=PIXELS.std,
        augment="none",
        kind="shape",
        background=PIXELS.background,
    )


def _scan_folder(folder: Path) -> _Tree:
    files: dict[tuple[str, str], list[_File]] = {}
    for code in CODES:
        for split, name in (("train", f"train_{code}"), ("test", "hsf_0")):
            found = files[code, split] = []
            with suppress(FileNotFoundError), os.scandir(folder / code / name) as entries:
                for entry in entries:
                    if entry.name.lower().endswith(".png") and not entry.name.startswith("."):
                        status = entry.stat()
                        found.append(_File(f"{code}/{name}/{entry.name}", f"{status.st_size} {status.st_mtime_ns}"))
            found.sort(key=lambda file: file.name)
    return _Tree(folder, files, lambda name: (folder / name).read_bytes())


def _scan_zip(path: Path, archive: zipfile.ZipFile) -> _Tree:
    files: dict[tuple[str, str], list[_File]] = {(code, split): [] for code in CODES for split in ("train", "test")}
    pattern = re.compile(r"(?:by_class/)?([0-9a-f]{2})/(train_\1|hsf_0)/[^/.][^/]*\.png", re.IGNORECASE)
    for info in archive.infolist():
        match = pattern.fullmatch(info.filename)
        if match and match[1] in CODES:
            split = "test" if match[2] == "hsf_0" else "train"
            files[match[1], split].append(_File(info.filename, f"{info.file_size} {info.CRC}"))
    for found in files.values():
        found.sort(key=lambda file: file.name)
    return _Tree(path, files, archive.read)


def _decoded(tree: _Tree, files: list[_File], cache: Path) -> NDArray[np.uint8]:
    """The images of the files, [N, 128, 128, 1], from the cache or else decoded into it."""
    digest = hashlib.sha256(b"1\n")  # raise the number when the decoding changes
    for file in files:
        digest.update(f"{file.name} {file.stamp}\n".encode())
    kept = cache / f"femnist-{digest.hexdigest()[:16]}.npy"
    shape = (len(files), SIDE, SIDE, 1)
    if (images := _mapped(kept, shape)) is not None:
        return images

    def one(i: int) -> NDArray[np.uint8]:
        where = f"{tree.source}/{files[i].name}"
        try:
            payload = tree.read(files[i].name)
        except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError(f"{where}: cannot be read ({error})") from error
        image = decode(payload, where, channels=1)
        if image.shape != shape[1:]:
            raise UserError(f"{where}: {image.shape[1]}x{image.shape[0]} pixels, should be {SIDE}x{SIDE}")
        return image

    try:
        cache.mkdir(parents=True, exist_ok=True)
        need, free = len(files) * SIDE * SIDE, shutil.disk_usage(cache).free
        if need > free:  # writing to a map on a full disk would kill the process
            raise UserError(f"{cache}: {need / 1e9:.1f} GB needed to decode {tree.source}, {free / 1e9:.1f} GB free")
        handle, name = tempfile.mkstemp(dir=cache, prefix=f"{kept.stem}-", suffix=".part")
        os.close(handle)
        part = Path(name)
        try:
            out = open_memmap(part, mode="w+", dtype=np.uint8, shape=shape)
            fill(out, one)
            out.flush()
            del out
            part.replace(kept)  # whole or not at all, also when two processes decode at once
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{cache}: the decoded images cannot be kept here ({error.strerror}); set XDG_CACHE_HOME"
        ) from error
    images = _mapped(kept, shape)
    assert images is not None
    return images


def _mapped(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
    """The array in a cache file, read as it is touched, or None if it is not there or not whole."""
    try:
        images = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return np.asarray(images) if images.shape == shape and images.dtype == np.uint8 else None
