"""A small convolutional network for images of 8x8 to 32x32."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Generator, Tensor

from fedsap.models import checks, layers, layout
from fedsap.models.network import Features, Weights


@dataclass(frozen=True)
class Small:
    """conv3 C->16, ReLU, pool / conv3 16->32, ReLU, pool / fc ->64, ReLU = h / fc ->classes.

    low is the map after the first pool, flattened with the channel first. With another `dim` than 64, a linear layer
    `project` ->dim gives h, and what is said of fc1 below is said of it.

    >>> network = Small(classes=10, shape=(8, 8, 1))
    >>> network.dim, network.low_dim
    (64, 256)
    """

    classes: int
    shape: tuple[int, int, int]  # H, W, C of an image
    embedding: str = "relu"  # h leaves the ReLU of fc1; "linear": fc1 without one; "unit": the ReLU's, of length 1
    head_input: str = "raw"  # the output layer reads fc1; "normalized": of length 1; "cosine": and gives cosines
    head_scale: float = 16.0  # times the cosines
    dim: int = 64  # d, the size of h

    buffers = frozenset[str]()
    head_names = ("fc2.weight", "fc2.bias")
    noise: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def __post_init__(self) -> None:
        checks.images("small", self.shape, least=4)
        checks.classes("small", self.classes)
        checks.head(self.embedding, self.head_input, self.head_scale, self.dim)

    @property
    def low_dim(self) -> int:
        height, width, _ = self.shape
        return 16 * (height // 2) * (width // 2)

    def _shapes(self) -> layout.Shapes:
        height, width, channels = self.shape
        return {
            "conv1.weight": (16, channels, 3, 3),
            "conv1.bias": (16,),
            "conv2.weight": (32, 16, 3, 3),
            "conv2.bias": (32,),
            "fc1.weight": (64, 32 * (height // 4) * (width // 4)),
            "fc1.bias": (64,),
            **layout.projection(64, self.dim),
            "fc2.weight": (self.classes, self.dim),
            "fc2.bias": (self.classes,),
        }

    def init(self, generator: Generator) -> Weights:
        return layout.uniform(self._shapes(), generator)

    def __call__(  # train and noise change nothing here
        self,
        weights: Weights,
        x: Tensor,
        *,
        train: bool = False,  # noqa: ARG002
        noise: Mapping[str, Tensor] | None = None,  # noqa: ARG002
    ) -> Features:
        x = layers.conv2d(x, weights["conv1.weight"], weights["conv1.bias"], padding=1, kernel=3)
        early = layers.pool_relu(x, 2)
        x = layers.conv2d(early, weights["conv2.weight"], weights["conv2.bias"], padding=1, kernel=3)
        x = layers.flatten(layers.pool_relu(x, 2))
        e = layers.linear(x, weights["fc1.weight"], weights["fc1.bias"])
        e = layers.project(e if self.embedding == "linear" else F.relu(e), weights)
        return Features(layers.embedding(e, self.embedding), self.head(weights, e), layers.flatten(early))

    def head(self, weights: Weights, h: Tensor) -> Tensor:
        read = layers.head_input(h, self.head_input)
        return layers.output(read, weights["fc2.weight"], weights["fc2.bias"], self.head_input, self.head_scale)

    def live(self, weights: Weights) -> Weights:
        return dict(weights)

    def export(self, weights: Weights) -> Weights:
        return layout.export(weights)

    def load(self, state: Mapping[str, Tensor]) -> Weights:
        return layout.load(state, self._shapes(), "the state of a model 'small'")
