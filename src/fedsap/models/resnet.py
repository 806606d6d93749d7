"""ResNet-18 in torchvision's layout, from random or from ImageNet weights."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fedsap.errors import UserError
from fedsap.models import checks, layers, layout
from fedsap.models.network import Features, Weights
from fedsap.models.pretrained import read

_STEM = ("conv1.", "bn1.")


@dataclass(frozen=True)
class ResNet18:
    """h is the pooled output of layer4, low the output of layer1, flattened with the channel first.

    Grey images are repeated to three channels. 11,181,642 weights for 10 classes, 11,227,812 for 100. With another
    `dim` than 512, a linear layer `project` ->dim gives h, and what is said below of what was pooled is said of it.

    >>> network = ResNet18(classes=10, shape=(32, 32, 3))
    >>> network.dim, network.low_dim
    (512, 4096)
    """

    classes: int
    shape: tuple[int, int, int]  # H, W, C of an image, C = 1 or 3
    resolution: int | None = None  # images are resized (bilinear) to this many pixels a side first; None: as they are
    weights: str | None = None  # file with ImageNet weights, .pth or .npz, torchvision's names; None: random
    reinit_stem: bool = False  # with `weights`: conv1 and bn1 are fresh for every client nevertheless
    stem_stride: int = 4  # by how much conv1 and the pool shrink an image: 4; 2: conv1 with stride 1; 1: and no pool
    embedding: str = "relu"  # h is pooled after the last ReLU; "linear": without it; "unit": after it, of length 1
    head_input: str = (
        "raw"  # the output layer reads what was pooled; "normalized": of length 1; "cosine": gives cosines
    )
    head_scale: float = 16.0  # times the cosines
    dim: int = 512  # d, the size of h

    noise: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    head_names = ("fc.weight", "fc.bias")

    def __post_init__(self) -> None:
        checks.images("resnet18", self.shape, least=1)
        checks.classes("resnet18", self.classes)
        if self.shape[2] not in (1, 3):
            raise UserError(f"model 'resnet18' takes images with 1 or 3 channels; these have {self.shape[2]}")
        if self.resolution is not None and self.resolution < 1:
            raise UserError(f"model.resolution is {self.resolution}; it takes a number of pixels from 1, or nothing")
        if self.stem_stride not in (1, 2, 4):
            raise UserError(f"model.stem_stride is {self.stem_stride}; it takes 4, 2 or 1")
        checks.head(self.embedding, self.head_input, self.head_scale, self.dim)

    @property
    def low_dim(self) -> int:
        height, width = self._maps()["layer1.0.conv1.weight"]
        return 64 * height * width

    @property
    def buffers(self) -> frozenset[str]:
        return frozenset(name for name in self._shapes() if name.endswith(("running_mean", "running_var")))

    def _shapes(self) -> layout.Shapes:
        shapes: dict[str, tuple[int, ...]] = {}
        for conv, norm, inputs, outputs, kernel, _ in self._convolutions():
            shapes[f"{conv}.weight"] = (outputs, inputs, kernel, kernel)
            shapes |= {f"{norm}.{name}": (outputs,) for name in ("weight", "bias", "running_mean", "running_var")}
        head = {"fc.weight": (self.classes, self.dim), "fc.bias": (self.classes,)}
        return {**shapes, **layout.projection(512, self.dim), **head}

    def _maps(self) -> dict[str, tuple[int, int]]:
        """Height and width of the map that each convolution reads, by the name of its weight."""
        side = self.resolution
        size = (side, side) if side is not None else self.shape[:2]
        maps: dict[str, tuple[int, int]] = {}
        for conv, _, _, _, kernel, stride in self._convolutions():
            if conv.endswith("downsample.0"):  # reads what the block reads: the map before its first convolution
                maps[f"{conv}.weight"] = maps[f"{conv.removesuffix('downsample.0')}conv1.weight"]
                continue
            maps[f"{conv}.weight"] = size
            height, width = (layers.output_size(n, kernel, stride, kernel // 2) for n in size)
            size = (height, width)
            if conv == "conv1" and self.stem_stride > 1:
                height, width = (layers.output_size(n, 3, 2, 1) for n in size)
                size = (height, width)
        return maps

    @property
    def _first_stride(self) -> int:
        return 2 if self.stem_stride == 4 else 1

    def _convolutions(self) -> Iterator[tuple[str, str, int, int, int, int]]:
        """Name, name of its BatchNorm, channels in and out, kernel and stride of every convolution."""
        yield "conv1", "bn1", 3, 64, 7, self._first_stride
        for block, inputs, outputs, stride in _blocks():
            yield f"{block}.conv1", f"{block}.bn1", inputs, outputs, 3, stride
            yield f"{block}.conv2", f"{block}.bn2", outputs, outputs, 3, 1
            if inputs != outputs:
                yield f"{block}.downsample.0", f"{block}.downsample.1", inputs, outputs, 1, stride

    def init(self, generator: Generator) -> Weights:
        shapes = self._shapes()
        linear = {name: shape for name, shape in shapes.items() if name.startswith(("project.", "fc."))}
        body = {name: shape for name, shape in shapes.items() if name not in linear}
        given = {} if self.weights is None else read(self.weights, body, ignore=("fc.",))
        weights: Weights = {}
        for name, shape in body.items():
            if name in given and not (self.reinit_stem and name.startswith(_STEM)):
                weights[name] = given[name].clone()
            elif len(shape) == 4:
                deviation = math.sqrt(2 / (shape[0] * shape[2] * shape[3]))  # Kaiming, by fan out
                weights[name] = layout.internal(torch.empty(shape).normal_(0, deviation, generator=generator))
            else:
                weights[name] = torch.full(shape, 1.0 if name.endswith((".weight", "running_var")) else 0.0)
        return {**weights, **layout.uniform(linear, generator)}

    def __call__(
        self,
        weights: Weights,
        x: Tensor,
        *,
        train: bool = False,
        noise: Mapping[str, Tensor] | None = None,  # noqa: ARG002
    ) -> Features:
        def conv(
            x: Tensor, name: str, norm: str, kernel: int, stride: int = 1, add: Tensor | None = None, relu: bool = True
        ) -> Tensor:
            x = layers.conv2d(x, weights[f"{name}.weight"], stride=stride, padding=kernel // 2, kernel=kernel)
            scale, shift, mean, var = (
                weights[f"{norm}.{entry}"] for entry in ("weight", "bias", "running_mean", "running_var")
            )
            return layers.batch_norm(x, scale, shift, mean, var, train=train, add=add, relu=relu)

        x = conv(self._picture(x), "conv1", "bn1", kernel=7, stride=self._first_stride)
        if self.stem_stride > 1:
            x = layers.max_pool(x, 3, stride=2, padding=1)
        low = x
        for block, inputs, outputs, stride in _blocks():
            y = conv(x, f"{block}.conv1", f"{block}.bn1", kernel=3, stride=stride)
            if inputs != outputs:
                x = conv(x, f"{block}.downsample.0", f"{block}.downsample.1", kernel=1, stride=stride, relu=False)
            rectified = block != "layer4.1" or self.embedding != "linear"
            x = conv(y, f"{block}.conv2", f"{block}.bn2", kernel=3, add=x, relu=rectified)
            low = x if block.startswith("layer1") else low
        e = layers.project(x.mean((2, 3)), weights)
        return Features(layers.embedding(e, self.embedding), self.head(weights, e), layers.flatten(low))

    def _picture(self, x: Tensor) -> Tensor:
        """x: [Q, B, H, W, 1 or 3] -> [Q, B, resolution, resolution, 3]."""
        side = self.resolution
        if side is not None and tuple(x.shape[2:4]) != (side, side):
            merged = x.flatten(0, 1).permute(0, 3, 1, 2)
            merged = F.interpolate(merged, size=(side, side), mode="bilinear", align_corners=False)
            x = merged.permute(0, 2, 3, 1).reshape(*x.shape[:2], side, side, x.shape[-1])
        return x.expand(*x.shape[:4], 3)

    def head(self, weights: Weights, h: Tensor) -> Tensor:
        read = layers.head_input(h, self.head_input)
        return layers.output(read, weights["fc.weight"], weights["fc.bias"], self.head_input, self.head_scale)

    def live(self, weights: Weights) -> Weights:
        """Kernels narrowed to their live taps: at 32x32, 6.9 of the 11.2 million weights never meet data."""
        live = dict(weights)
        for (conv, _, _, _, kernel, stride), (height, width) in zip(
            self._convolutions(), self._maps().values(), strict=True
        ):
            rows = layers.live_taps(height, kernel, stride, kernel // 2)
            columns = layers.live_taps(width, kernel, stride, kernel // 2)
            live[f"{conv}.weight"] = weights[f"{conv}.weight"][:, rows, columns]
        return live

    def export(self, weights: Weights) -> Weights:
        return layout.export(weights)

    def load(self, state: Mapping[str, Tensor]) -> Weights:
        return layout.load(state, self._shapes(), "the state of a model 'resnet18'")


def _blocks() -> Iterator[tuple[str, int, int, int]]:
    """Name, channels in, channels out and stride of the eight residual blocks."""
    inputs = 64
    for layer, outputs in enumerate((64, 128, 256, 512), start=1):
        yield f"layer{layer}.0", inputs, outputs, 1 if layer == 1 else 2
        yield f"layer{layer}.1", outputs, outputs, 1
        inputs = outputs
