"""Crops, flips and normalisation of a batch on its device, with the random numbers drawn beforehand on the host.

Each client draws from a generator of its own, so that what it sees does not depend on who else is in the stack.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedsap.data.split import Augment


def padding(size: int) -> int:
    """The usual border for a random crop of images of this size: 4 pixels for 32.

    >>> padding(32), padding(64), padding(8)
    (4, 8, 1)
    """
    return size // 8


def draw(rng: np.random.Generator, n: int, kind: Augment, pad: int) -> dict[str, NDArray[Any]]:
    """The random numbers that `apply` needs for n images.

    dy, dx: int64 [n] in 0 .. 2 pad, the corner of the crop in the padded image. flip: bool [n]. Nothing for "none".

    >>> sorted(draw(np.random.default_rng(0), 5, "crop-flip", pad=4))
    ['dx', 'dy', 'flip']
    >>> draw(np.random.default_rng(0), 5, "none", pad=4)
    {}
    """
    _check(kind)
    draws: dict[str, NDArray[Any]] = {}
    if kind != "none":
        draws["dy"] = rng.integers(0, 2 * pad, n, endpoint=True)
        draws["dx"] = rng.integers(0, 2 * pad, n, endpoint=True)
    if kind == "crop-flip":
        draws["flip"] = rng.integers(0, 2, n).astype(bool)
    return draws


def apply(images: Tensor, draws: Mapping[str, Tensor], kind: Augment, pad: int, background: int = 0) -> Tensor:
    """Pad with the background, crop to the old size at (dy, dx), then mirror left to right where `flip` is set.

    images: [*, H, W, C], any dtype. draws: [*] each, on the same device. Returns [*, H, W, C].

    >>> row = torch.tensor([[[[1], [2], [3]]]], dtype=torch.uint8)  # one image of 1x3
    >>> draws = {"dy": torch.tensor([1]), "dx": torch.tensor([2]), "flip": torch.tensor([True])}
    >>> apply(row, draws, "crop-flip", pad=1).flatten().tolist()
    [0, 3, 2]
    """
    _check(kind)
    if kind == "none":
        return images
    h, w, c = images.shape[-3:]
    padded = F.pad(images.reshape(-1, h, w, c), (0, 0, pad, pad, pad, pad), value=background)
    n, high, wide = padded.shape[:3]
    device = images.device
    x = torch.arange(w, device=device).expand(n, w)
    if kind == "crop-flip":
        x = torch.where(draws["flip"].reshape(n, 1), w - 1 - x, x)
    column = draws["dx"].reshape(n, 1) + x
    row = draws["dy"].reshape(n, 1) + torch.arange(h, device=device)
    line = torch.arange(n, device=device).unsqueeze(1) * high + row
    # One flat selection of pixels is the fastest of the ways to say this, on the CPU by a factor of two.
    pixel = line.unsqueeze(2) * wide + column.unsqueeze(1)
    return padded.view(-1, c).index_select(0, pixel.view(-1)).view(images.shape)


def normalise(
    images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """((images / 255) - mean) / std per channel, computed in at least float32.

    images: uint8 [*, H, W, C]. mean, std: C numbers. Returns dtype [*, H, W, C].

    >>> normalise(torch.tensor([[[0], [255]]], dtype=torch.uint8), (0.5,), (0.5,)).flatten().tolist()
    [-1.0, 1.0]
    """
    if not len(mean) == len(std) == images.shape[-1]:
        raise ValueError(f"{len(mean)} means and {len(std)} deviations for {images.shape[-1]} channels")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    m, s = (_constant(tuple(numbers), wide, images.device) for numbers in (mean, std))
    return images.to(wide, copy=True).div_(255).sub_(m).div_(s).to(dtype)


@lru_cache(maxsize=64)
def _constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Kept, because the host waits for every copy of this kind to a GPU.
    return torch.tensor(numbers, dtype=dtype, device=device)


def _check(kind: str) -> None:
    if kind not in get_args(Augment):
        raise ValueError(f"augmentation {kind!r}, should be one of {', '.join(get_args(Augment))}")
