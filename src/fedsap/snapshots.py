"""Embeddings that a run keeps after some rounds, for pictures of how they move.

    snapshots/round-000010.npz   embeddings [N, d], prototypes [C, d], seen [C], labels [N], clients [N]
    snapshots/images.npz         thumbnails uint8 [N, s, s, channels] of the same test images, once per run

N is at most `evaluate.SNAPSHOT`, and s at most `SIDE`. Embeddings are float16 where that holds them: with d = 512 a
round takes 2 MB, and the images at most 6 MB, before compression. Files are replaced in one step, so a round that is
played again after the death of the process leaves one file with the same content.
"""

import io
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedsap.errors import UserError
from fedsap.evaluate import Kept
from fedsap.files import write

SIDE = 32  # of a thumbnail, in pixels
_LARGEST = float(np.finfo(np.float16).max)
_NAME = re.compile(r"round-(\d{6,})\.npz")


@dataclass(frozen=True)
class Snapshot:
    """What a run's folder says about its embeddings after one round.

    embeddings: [N, d], labels: [N], clients: [N], prototypes: [C, d], of which only those under seen [C] mean anything
    """

    round: int
    embeddings: NDArray[np.float32]
    labels: NDArray[np.int64]
    clients: NDArray[np.int64]
    prototypes: NDArray[np.float32]
    seen: NDArray[np.bool_]


def save_snapshot(run: Path, t: int, kept: Kept, images: Tensor) -> None:
    """Writes round t into the run's folder, and thumbnails once. images: uint8 [*, H, W, channels], all test images."""
    folder = run / "snapshots"
    folder.mkdir(exist_ok=True)
    labels, d = kept.label.cpu().numpy(), kept.h.shape[1]
    prototypes, seen = np.zeros((0, d), np.float32), np.zeros(0, bool)
    if kept.bank is not None:
        prototypes, seen = kept.bank.values.float().cpu().numpy(), kept.bank.mask.cpu().numpy()
    _save(
        folder / f"round-{t:06d}.npz",
        embeddings=_short(kept.h.float().cpu().numpy()),
        labels=labels.astype(np.int32),
        clients=kept.client.cpu().numpy().astype(np.int32),
        prototypes=prototypes,
        seen=seen,
    )
    if not (folder / "images.npz").exists():
        _save(folder / "images.npz", images=_thumbnails(images[kept.image].cpu().numpy()))


def rounds(run: Path) -> list[int]:
    """The rounds after which the run has kept its embeddings, ascending."""
    folder = run / "snapshots"
    found = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def load_snapshot(run: Path, t: int) -> Snapshot:
    """One round of a run's embeddings."""
    path = run / "snapshots" / f"round-{t:06d}.npz"
    content = _load(path)
    try:
        one = Snapshot(
            t,
            content["embeddings"].astype(np.float32),
            content["labels"].astype(np.int64),
            content["clients"].astype(np.int64),
            content["prototypes"].astype(np.float32),
            content["seen"].astype(bool),
        )
    except KeyError as error:
        raise UserError(f"{path}: damaged, has no {error.args[0]}") from None
    same = len(one.labels) == len(one.clients) == len(one.embeddings) and len(one.seen) == len(one.prototypes)
    if not same or one.embeddings.ndim != 2 or not np.isfinite(one.embeddings).all():
        raise UserError(f"{path}: damaged, its arrays do not belong together")
    return one


def load_images(run: Path) -> NDArray[np.uint8]:
    """The thumbnails of a run's snapshots, [N, s, s, channels]."""
    path = run / "snapshots" / "images.npz"
    images = _load(path).get("images")
    if images is None or images.ndim != 4 or images.dtype != np.uint8:
        raise UserError(f"{path}: damaged, holds no images")
    return images


def _load(path: Path) -> Mapping[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: damaged, cannot be read ({error})") from None


def _save(path: Path, **arrays: NDArray[Any]) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write(path, content.getvalue())


def _short(values: NDArray[np.float32]) -> NDArray[np.float16] | NDArray[np.float32]:
    """In half the bytes, unless a value is too large for that.

    >>> _short(np.array([1.5], np.float32)).dtype, _short(np.array([1e6], np.float32)).dtype
    (dtype('float16'), dtype('float32'))
    """
    return values.astype(np.float16) if np.abs(values).max(initial=0.0) < _LARGEST else values


def _thumbnails(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images [N, H, W, channels] with sides of at most SIDE pixels.

    >>> _thumbnails(np.zeros((2, 64, 32, 3), np.uint8)).shape, _thumbnails(np.zeros((2, 8, 8, 1), np.uint8)).shape
    ((2, 32, 16, 3), (2, 8, 8, 1))
    """
    height, width, channels = images.shape[1:]
    scale = SIDE / max(height, width, SIDE)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    if scale == 1.0 or channels not in (1, 3):
        return images[:, :: -(-height // SIDE), :: -(-width // SIDE)]
    flat = images[..., 0] if channels == 1 else images
    small = [np.asarray(Image.fromarray(one).resize(size, Image.Resampling.BOX)) for one in flat]
    return np.stack(small).reshape(len(images), size[1], size[0], channels)
