"""What a dataset is, once it is in memory."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Augment = Literal["none", "crop", "crop-flip"]
Kind = Literal["colour", "shape"]  # strong views: all of RandAugment's operations, or those on the shape alone


@dataclass(frozen=True)
class Pixels:
    """How images come to a network, as uint8 [N, H, W, C] of which it sees ((v / 255) - mean) / std.

    shape: H, W, C. mean, std: [C], of pixels scaled to [0, 1]. background: the value of pixels outside an image.
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    background: int = 0


@dataclass(frozen=True, eq=False)
class Split:
    """Images and their labels, in a fixed order.

    images: uint8 [N, H, W, C]. labels: int64 [N], indices into the dataset's classes.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test split, and how they are usually fed to a network.

    classes: the name of each label. mean, std: [C], of pixels scaled to [0, 1]. augment: the usual augmentation of the
    training images. kind: what strong views of them may change. background: the value of pixels outside an image.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Augment
    kind: Kind = "colour"
    background: int = 0

    @property
    def pixels(self) -> Pixels:
        """What a network that learns from these images has to be shown later."""
        height, width, channels = map(int, self.train.images.shape[1:])
        return Pixels((height, width, channels), self.mean, self.std, self.background)
