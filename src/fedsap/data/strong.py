"""Strong views of images: RandAugment and Cutout for a batch on its device, without a loop over images.

Of RandAugment's 14 operations an image gets `ops` after one another, each drawn for itself. All images of a batch go
through one pass that can do any of them: pixels are fetched from where a geometric operation takes them, looked up in a
table of 256 values, and mixed with a plainer picture. What an operation does not use is the identity. Results are those
of Pillow, and of torchvision's RandAugment with nearest-neighbour sampling.

The random numbers are drawn beforehand on the host, from a stream of the client's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedsap.data.split import Kind

SHAPE = ("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
OPERATIONS = (
    *SHAPE, "Brightness", "Color", "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"
)  # fmt: skip
LEVELS = 30  # magnitudes go from 0 to this
_NUMBER = {name: i for i, name in enumerate(OPERATIONS)}
_MIXED = [_NUMBER[name] for name in ("Brightness", "Color", "Contrast", "Sharpness")]
_ONE = 1 << 16  # geometric operations count in 1/65536 of a pixel, as Pillow does


@dataclass(frozen=True)
class Strong:
    """What a strong view is made of.

    kind: all 14 operations, or those on the shape alone. ops: how many come after one another. magnitude: 0 to 30; None
    draws it anew for every operation. cutout: the side of the square that is cut out, as a share of the image's shorter
    side; 0: none. fill: a value per channel, of what comes in from outside the image and of what is cut out.
    """

    kind: Kind = "colour"
    ops: int = 2
    magnitude: int | None = 10
    cutout: float = 0.5
    fill: tuple[int, ...] = (128, 128, 128)


def draw(rng: np.random.Generator, n: int, size: tuple[int, int], strong: Strong) -> dict[str, NDArray[Any]]:
    """The random numbers that `apply` needs for n images of `size` (height, width).

    op: int64 [n, ops]. amount: float32 [n, ops]. take: int64 [n, ops, 6], where the geometric operation takes pixels
    from, in 1/65536 of a pixel. cut: int64 [n, 2], the middle of the square.

    >>> made = draw(np.random.default_rng(0), 5, (32, 32), Strong())
    >>> {name: value.shape for name, value in made.items()}
    {'op': (5, 2), 'amount': (5, 2), 'take': (5, 2, 6), 'cut': (5, 2)}
    """
    names = OPERATIONS if strong.kind == "colour" else SHAPE
    op = rng.integers(0, len(names), (n, strong.ops))
    level = np.full(op.shape, strong.magnitude)
    if strong.magnitude is None:
        level = rng.integers(0, LEVELS + 1, op.shape)
    sign = np.where(rng.integers(0, 2, op.shape) == 1, 1.0, -1.0)
    made: dict[str, NDArray[Any]] = {
        "op": op,
        "amount": _amount(op, level, sign),
        "take": _taken(op, level, sign, size),
    }
    if strong.cutout:
        made["cut"] = np.stack([rng.integers(0, side, n) for side in size], 1)
    return made


def _amount(op: NDArray[Any], level: NDArray[Any], sign: NDArray[Any]) -> NDArray[np.float32]:
    """What an operation on values goes by: a factor (1 + or - up to 0.9), a mask of bits, or a threshold."""
    bits = 8 - np.rint(level / (LEVELS / 4))
    choices = {
        "Posterize": 256 - 2.0 ** (8 - bits),
        "Solarize": 255 - 8.5 * level,
        **dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 1 + sign * 0.9 * level / LEVELS),
    }
    amount = np.ones(op.shape)
    for name, values in choices.items():
        amount = np.where(op == _NUMBER[name], values, amount)
    return amount.astype(np.float32)


def _taken(op: NDArray[Any], level: NDArray[Any], sign: NDArray[Any], size: tuple[int, int]) -> NDArray[np.int64]:
    """Where the pixel at (x, y) comes from: (a x + b y + c, d x + e y + f), in 1/65536, of pixel centres."""
    height, width = size
    share = sign * level / LEVELS
    is_a = {name: op == _NUMBER[name] for name in SHAPE}
    angle = np.where(is_a["Rotate"], -np.deg2rad(30 * share), 0.0)  # against the clock
    zero = np.zeros(op.shape)
    a, b = np.cos(angle), np.sin(angle) + np.where(is_a["ShearX"], 0.3 * share, zero)
    d, e = -np.sin(angle) + np.where(is_a["ShearY"], 0.3 * share, zero), np.cos(angle)
    middle_x, middle_y = np.where(is_a["Rotate"], width / 2, zero), np.where(is_a["Rotate"], height / 2, zero)
    c = middle_x - a * middle_x - b * middle_y
    f = middle_y - d * middle_x - e * middle_y
    c = np.where(is_a["TranslateX"], np.trunc(150 / 331 * width * share), c)
    f = np.where(is_a["TranslateY"], np.trunc(150 / 331 * height * share), f)
    c, f = c + (a + b) / 2, f + (d + e) / 2
    return np.floor(np.stack([a, b, c, d, e, f], -1) * _ONE + 0.5).astype(np.int64)


def apply(images: Tensor, draws: Mapping[str, Tensor], strong: Strong) -> Tensor:
    """RandAugment, then Cutout.

    images: uint8 [*, H, W, C]. draws: [*, ...] each, on the same device. Returns uint8 [*, H, W, C].

    >>> image = torch.arange(4, dtype=torch.uint8).view(1, 1, 4, 1)
    >>> draws = {"op": torch.tensor([[3]]), "amount": torch.ones(1, 1)}
    >>> draws["take"] = torch.tensor([[[65536, 0, 65536 + 32768, 0, 65536, 32768]]])  # one pixel to the left
    >>> apply(image, draws, Strong("shape", ops=1, cutout=0, fill=(9,))).flatten().tolist()
    [1, 2, 3, 9]
    """
    height, width, channels = images.shape[-3:]
    x = images.reshape(-1, height, width, channels)
    count = len(x)
    outside = torch.stack([x.new_full((), value) for value in strong.fill])
    for i in range(strong.ops):
        op = draws["op"].reshape(count, -1)[:, i]
        amount = draws["amount"].reshape(count, -1)[:, i]
        x = _moved(x, draws["take"].reshape(count, -1, 6)[:, i], outside)
        if strong.kind == "colour":
            x = torch.where(_is(op, _MIXED)[:, None, None, None], _mixed(x, op, amount), _looked_up(x, op, amount))
    if strong.cutout:
        x = _cut(x, draws["cut"].reshape(count, 2), round(strong.cutout * min(height, width)), outside)
    return x.view(images.shape)


def _is(op: Tensor, numbers: list[int]) -> Tensor:
    found = op == numbers[0]
    for number in numbers[1:]:
        found = found | (op == number)
    return found


def _moved(x: Tensor, take: Tensor, outside: Tensor) -> Tensor:
    """Each pixel from where `take` [N, 6] says."""
    count, height, width, channels = x.shape
    across, down = (torch.arange(n, device=x.device) for n in (width, height))
    a, b, c, d, e, f = (take[:, i, None, None] for i in range(6))
    column = (a * across + b * down[:, None] + c) >> 16
    row = (d * across + e * down[:, None] + f) >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    line = torch.arange(count, device=x.device)[:, None, None] * (height * width)
    pixel = line + row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    moved = x.reshape(-1, channels).index_select(0, pixel.flatten()).view(x.shape)
    return torch.where(inside[..., None], moved, outside)


def _looked_up(x: Tensor, op: Tensor, amount: Tensor) -> Tensor:
    """Posterize, Solarize, AutoContrast and Equalize: a table of 256 values for each image and channel."""
    count, height, width, channels = x.shape
    flat = x.permute(0, 3, 1, 2).reshape(count, channels, -1).long()
    histogram = torch.zeros(count, channels, 256, dtype=torch.long, device=x.device)
    histogram.scatter_add_(2, flat, torch.ones_like(flat))
    value = torch.arange(256, device=x.device)
    table = value.expand(count, channels, 256)
    a = amount[:, None, None]
    for name, made in (
        ("Posterize", value & a.long()),
        ("Solarize", torch.where(value < a, value, 255 - value)),
        ("AutoContrast", _stretched(histogram, value)),
        ("Equalize", _equalised(histogram, value)),
    ):
        table = torch.where((op == _NUMBER[name])[:, None, None], made, table)
    looked = table.gather(2, flat).to(torch.uint8)
    return looked.view(count, channels, height, width).permute(0, 2, 3, 1)


def _stretched(histogram: Tensor, value: Tensor) -> Tensor:
    """The least value that occurs becomes 0, the largest 255."""
    there = histogram > 0
    low = torch.where(there, value, 256).amin(-1, keepdim=True)
    high = torch.where(there, value, -1).amax(-1, keepdim=True)
    # Not 255 / x, which torch computes as 255 times the reciprocal: the largest value would come out as 254 at times.
    scale = (255 * torch.ones_like(high)).double() / (high - low).clamp(min=1)
    made = (value.double() * scale - low * scale).clamp(0, 255).long()
    return torch.where(high > low, made, value)


def _equalised(histogram: Tensor, value: Tensor) -> Tensor:
    """Every value becomes the share of pixels below it."""
    last = torch.where(histogram > 0, value, -1).amax(-1, keepdim=True)
    step = (histogram.sum(-1, keepdim=True) - histogram.gather(-1, last)) // 255
    before = histogram.cumsum(-1) - histogram
    made = ((step // 2 + before) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, made, value)


def _mixed(x: Tensor, op: Tensor, amount: Tensor) -> Tensor:
    """Brightness, Color, Contrast and Sharpness: plain + amount (x - plain), with the picture that it is mixed with."""
    wide = x.float()
    grey = _grey(x)
    mean = (grey.double().mean((1, 2, 3), keepdim=True) + 0.5).floor().float()
    plain = torch.zeros_like(wide)
    for name, made in (("Color", grey.float()), ("Contrast", mean), ("Sharpness", _smooth(x).float())):
        plain = torch.where((op == _NUMBER[name])[:, None, None, None], made, plain)
    return (plain + amount[:, None, None, None] * (wide - plain)).clamp(0, 255).to(torch.uint8)


def _grey(x: Tensor) -> Tensor:
    """Luminance, [N, H, W, 1] whole numbers."""
    if x.shape[-1] != 3:
        return x.long()[..., :1]
    red, green, blue = x.long().unbind(-1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16)[..., None]


def _smooth(x: Tensor) -> Tensor:
    """The mean over 3x3 pixels, the middle one counted five times; the border as it is."""
    height, width = x.shape[1:3]
    if min(height, width) < 3:
        return x
    wide = x.long()
    total = 4 * wide[:, 1:-1, 1:-1]
    for i in range(3):
        for j in range(3):
            total = total + wide[:, i : height - 2 + i, j : width - 2 + j]
    inner = (2 * total + 13) // 26  # rounded to the nearest
    return F.pad(inner, (0, 0, 1, 1, 1, 1)) + wide * _border(height, width, x.device)


def _border(height: int, width: int, device: torch.device) -> Tensor:
    inner = torch.zeros(height - 2, width - 2, 1, dtype=torch.long, device=device)
    return F.pad(inner, (0, 0, 1, 1, 1, 1), value=1)


def _cut(x: Tensor, middle: Tensor, side: int, outside: Tensor) -> Tensor:
    """A square around `middle` [N, 2] (row, column), as far as it lies in the image, filled."""
    height, width = x.shape[1:3]
    half = side // 2

    def near(n: int, at: Tensor) -> Tensor:
        place = torch.arange(n, device=x.device)
        return (place >= at[:, None] - half) & (place < at[:, None] - half + side)

    inside = near(height, middle[:, 0])[:, :, None] & near(width, middle[:, 1])[:, None, :]
    return torch.where(inside[..., None], outside, x)
