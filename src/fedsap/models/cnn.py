"""The network of FedProto's FEMNIST experiments: 849,332 weights for 62 classes of 128x128 grey images."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Generator, Tensor

from fedsap.errors import UserError
from fedsap.models import checks, layers, layout
from fedsap.models.network import Features, Weights


@dataclass(frozen=True)
class CNN:
    """conv3 C->10, pool, ReLU / conv5 10->20, channel dropout, pool, ReLU / fc ->50, ReLU = h / dropout, fc ->classes.

    low is the map that feeds fc1, flattened with the channel first. In training with dropout, `noise` holds
    "conv2": [Q, B, 20] and "fc1": [Q, B, d]. With another `dim` than 50, a linear layer `project` ->dim gives h, and
    what is said of fc1 below is said of it.

    >>> network = CNN(classes=62, shape=(128, 128, 1))
    >>> network.dim, network.low_dim
    (50, 16820)
    """

    classes: int
    shape: tuple[int, int, int]  # H, W, C of an image
    dropout: float = 0.5  # the share dropped, of whole channels after conv2 and of the embedding before fc2; 0: none
    embedding: str = "relu"  # h leaves the ReLU of fc1; "linear": fc1 without one; "unit": the ReLU's, of length 1
    head_input: str = "raw"  # the output layer reads fc1; "normalized": of length 1; "cosine": and gives cosines
    head_scale: float = 16.0  # times the cosines
    dim: int = 50  # d, the size of h

    buffers = frozenset[str]()
    head_names = ("fc2.weight", "fc2.bias")

    def __post_init__(self) -> None:
        checks.images("cnn", self.shape, least=14)
        checks.classes("cnn", self.classes)
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout is {self.dropout}; it takes a number from 0 to below 1")
        checks.head(self.embedding, self.head_input, self.head_scale, self.dim)

    @property
    def low_dim(self) -> int:
        height, width = (((size - 2) // 2 - 4) // 2 for size in self.shape[:2])
        return 20 * height * width

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        return {"conv2": (20,), "fc1": (self.dim,)} if self.dropout else {}

    def _shapes(self) -> layout.Shapes:
        return {
            "conv1.weight": (10, self.shape[2], 3, 3),
            "conv1.bias": (10,),
            "conv2.weight": (20, 10, 5, 5),
            "conv2.bias": (20,),
            "fc1.weight": (50, self.low_dim),
            "fc1.bias": (50,),
            **layout.projection(50, self.dim),
            "fc2.weight": (self.classes, self.dim),
            "fc2.bias": (self.classes,),
        }

    def init(self, generator: Generator) -> Weights:
        return layout.uniform(self._shapes(), generator)

    def __call__(
        self, weights: Weights, x: Tensor, *, train: bool = False, noise: Mapping[str, Tensor] | None = None
    ) -> Features:
        drop = train and self.dropout > 0
        if drop and (noise is None or not self.noise.keys() <= noise.keys()):
            raise ValueError(f"training with dropout needs noise for {', '.join(self.noise)}: [Q, B, *shape], uniform")
        x = layers.conv2d(x, weights["conv1.weight"], weights["conv1.bias"])
        x = layers.pool_relu(x, 2)
        x = layers.pool_relu(layers.conv2d(x, weights["conv2.weight"], weights["conv2.bias"]), 2)
        if drop and noise is not None:
            # A channel's mask is not negative, so it commutes with the pool and the ReLU, and here the map is smaller.
            x = layers.dropout(x, noise["conv2"][:, :, None, None, :], self.dropout)
        low = layers.flatten(x)
        e = layers.linear(low, weights["fc1.weight"], weights["fc1.bias"])
        e = layers.project(e if self.embedding == "linear" else F.relu(e), weights)
        read = layers.head_input(e, self.head_input)
        if drop and noise is not None:
            read = layers.dropout(read, noise["fc1"], self.dropout)
        return Features(layers.embedding(e, self.embedding), self._output(weights, read), low)

    def head(self, weights: Weights, h: Tensor) -> Tensor:
        return self._output(weights, layers.head_input(h, self.head_input))

    def _output(self, weights: Weights, read: Tensor) -> Tensor:
        return layers.output(read, weights["fc2.weight"], weights["fc2.bias"], self.head_input, self.head_scale)

    def live(self, weights: Weights) -> Weights:
        return dict(weights)

    def export(self, weights: Weights) -> Weights:
        return layout.export(weights)

    def load(self, state: Mapping[str, Tensor]) -> Weights:
        return layout.load(state, self._shapes(), "the state of a model 'cnn'")
