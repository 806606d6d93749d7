"""What the rest of fedsap knows of a network: functions over weights that carry a leading client axis Q."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Generator, Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Features:
    """One forward pass.

    h: [Q, B, d] the embedding. logits: [Q, B, C]. low: [Q, B, l] an early feature map, flattened.
    """

    h: Tensor
    logits: Tensor
    low: Tensor


class Network(Protocol):
    """A network without state of its own. The weights of Q clients are one dictionary of tensors [Q, ...]."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """H, W, C of an image."""
        ...

    @property
    def dim(self) -> int:
        """d, the size of the embedding."""
        ...

    @property
    def low_dim(self) -> int:
        """l, the size of the flattened early feature map."""
        ...

    @property
    def classes(self) -> int:
        """C, the number of logits."""
        ...

    @property
    def buffers(self) -> frozenset[str]:
        """Names in the weights that no gradient reaches (BatchNorm statistics)."""
        ...

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names of the output layer."""
        ...

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """Shape per sample of each random input in training (dropout masks)."""
        ...

    def init(self, generator: Generator) -> Weights:
        """Fresh weights of ONE client (no client axis), in the network's own layout, on the CPU, float32."""
        ...

    def __call__(
        self, weights: Weights, x: Tensor, *, train: bool = False, noise: Mapping[str, Tensor] | None = None
    ) -> Features:
        """x: [Q, B, H, W, C] normalised floats. With `train`, BatchNorm uses the batch and updates its running
        statistics in `weights` in place, and dropout uses `noise` (uniform numbers in [0, 1), [Q, B, *shape])."""
        ...

    def head(self, weights: Weights, h: Tensor) -> Tensor:
        """The output layer alone: h [Q, B, d] -> logits [Q, B, C]. `weights` needs to hold `head_names` only.
        With an embedding made of unit length, a forward pass may give it the vector from before that."""
        ...

    def live(self, weights: Weights) -> Weights:
        """Views of the weights without those that never meet data at this network's image size (taps of a padded kernel
        that only ever see padding). The network computes the same with them, and their gradients are all there are."""
        ...

    def export(self, weights: Weights) -> Weights:
        """ONE client's weights in the layout of the equivalent torch.nn module (its state_dict)."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> Weights:
        """The inverse of `export`; raises UserError naming the first missing, unknown or misshapen entry."""
        ...
