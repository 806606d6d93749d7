"""Strong views: every operation against Pillow's, the draws, and what a batch does to one image alone."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from fedsap.data import strong

H, W = 20, 24


def pictures(n, channels, seed=0):
    """Noise, smooth ramps and flat areas: what the operations on histograms and edges differ by."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, (n, H, W, channels))
    ramp = np.linspace(30, 200, W)[None, None, :, None] + 20 * np.arange(channels)
    some = np.where(rng.random((n, 1, 1, 1)) < 0.5, noise, np.broadcast_to(ramp, noise.shape))
    some[:, :3] = rng.integers(0, 256, (n, 1, 1, channels))
    return some.astype(np.uint8)


def by_pillow(image, name, level, sign):
    """RandAugment's operation as its authors and torchvision define it, in Pillow's own functions."""
    share = sign * level / 30
    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    fill = 7 if image.shape[-1] == 1 else (7, 8, 9)

    def affine(*six):
        return picture.transform(picture.size, Image.Transform.AFFINE, six, Image.Resampling.NEAREST, fillcolor=fill)

    made = {
        "Identity": lambda: picture,
        "ShearX": lambda: affine(1, 0.3 * share, 0, 0, 1, 0),
        "ShearY": lambda: affine(1, 0, 0, 0.3 * share, 1, 0),
        "TranslateX": lambda: affine(1, 0, int(150 / 331 * W * share), 0, 1, 0),
        "TranslateY": lambda: affine(1, 0, 0, 0, 1, int(150 / 331 * H * share)),
        "Rotate": lambda: picture.rotate(30 * share, Image.Resampling.NEAREST, fillcolor=fill),
        "Brightness": lambda: ImageEnhance.Brightness(picture).enhance(1 + 0.9 * share),
        "Color": lambda: ImageEnhance.Color(picture).enhance(1 + 0.9 * share),
        "Contrast": lambda: ImageEnhance.Contrast(picture).enhance(1 + 0.9 * share),
        "Sharpness": lambda: ImageEnhance.Sharpness(picture).enhance(1 + 0.9 * share),
        "Posterize": lambda: ImageOps.posterize(picture, 8 - round(level / 7.5)),
        "Solarize": lambda: ImageOps.solarize(picture, 255 - 8.5 * level),
        "AutoContrast": lambda: ImageOps.autocontrast(picture),
        "Equalize": lambda: ImageOps.equalize(picture),
    }[name]()
    return np.asarray(made).reshape(image.shape)


def by_hand(images, names, levels, signs):
    """The same through `apply`, an operation for each image."""
    op = np.array([[strong.OPERATIONS.index(n)] for n in names])
    level, sign = np.array(levels)[:, None], np.array(signs, float)[:, None]
    draws = {
        "op": torch.from_numpy(op),
        "amount": torch.from_numpy(strong._amount(op, level, sign)),
        "take": torch.from_numpy(strong._taken(op, level, sign, (H, W))),
    }
    fill = (7,) if images.shape[-1] == 1 else (7, 8, 9)
    return strong.apply(torch.from_numpy(images), draws, strong.Strong(ops=1, cutout=0.0, fill=fill)).numpy()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", strong.OPERATIONS)
def test_an_operation_is_pillows(name, channels):
    levels = [0, 1, 4, 10, 17, 23, 30] * 4
    signs = [1, -1] * 14
    images = pictures(len(levels), channels, seed=strong.OPERATIONS.index(name))
    made = by_hand(images, [name] * len(levels), levels, signs)
    for image, mine, level, sign in zip(images, made, levels, signs, strict=True):
        theirs = by_pillow(image, name, level, sign)
        assert np.array_equal(mine, theirs), (level, sign, np.abs(mine.astype(int) - theirs).max())


def test_a_batch_of_all_operations_is_each_image_alone():
    names = list(strong.OPERATIONS) * 2
    images = pictures(len(names), 3)
    levels, signs = [10] * len(names), [1, -1] * (len(names) // 2)
    together = by_hand(images, names, levels, signs)
    for i, name in enumerate(names):
        alone = by_hand(images[i : i + 1], [name], levels[i : i + 1], signs[i : i + 1])
        assert np.array_equal(together[i], alone[0]), name


def test_operations_come_after_one_another():
    images = pictures(6, 3)
    two, one = strong.Strong(ops=2, cutout=0.0), strong.Strong(ops=1, cutout=0.0)
    draws = strong.draw(np.random.default_rng(1), 6, (H, W), two)
    whole = strong.apply(torch.from_numpy(images), _tensors(draws), two)
    first, second = ({k: torch.from_numpy(v[:, i : i + 1]) for k, v in draws.items()} for i in (0, 1))
    step = strong.apply(torch.from_numpy(images), first, one)
    assert torch.equal(whole, strong.apply(step, second, one))


def test_draws_use_every_operation_and_magnitude():
    rng = np.random.default_rng(0)
    colour = strong.draw(rng, 4000, (H, W), strong.Strong(magnitude=None))
    assert set(colour["op"].flatten().tolist()) == set(range(14))
    shares = np.bincount(colour["op"].flatten(), minlength=14) / colour["op"].size
    assert abs(shares - 1 / 14).max() < 0.01
    bright = colour["amount"][colour["op"] == strong.OPERATIONS.index("Brightness")]
    assert bright.min() < 0.2
    assert bright.max() > 1.8
    shape = strong.draw(rng, 400, (H, W), strong.Strong("shape"))
    assert set(shape["op"].flatten().tolist()) == set(range(6))


def test_cutout_fills_a_square_as_far_as_it_lies_in_the_image():
    image = torch.full((2, 8, 8, 1), 5, dtype=torch.uint8)
    draws = {
        "op": torch.zeros(2, 1, dtype=torch.long),
        "amount": torch.ones(2, 1),
        "take": torch.from_numpy(strong._taken(np.zeros((2, 1), int), np.zeros((2, 1)), np.ones((2, 1)), (8, 8))),
        "cut": torch.tensor([[4, 4], [0, 7]]),
    }
    made = strong.apply(image, draws, strong.Strong("shape", ops=1, fill=(9,)))[..., 0]
    inside = torch.zeros(2, 8, 8, dtype=torch.bool)
    inside[0, 2:6, 2:6] = True
    inside[1, 0:2, 5:8] = True
    assert torch.equal(made, torch.where(inside, torch.tensor(9), torch.tensor(5)).to(torch.uint8))


def test_leading_axes_are_the_clients():
    images = torch.from_numpy(pictures(6, 3))
    draws = _tensors(strong.draw(np.random.default_rng(3), 6, (H, W), strong.Strong()))
    flat = strong.apply(images, draws, strong.Strong())
    stacked = {k: v.view(2, 3, *v.shape[1:]) for k, v in draws.items()}
    assert torch.equal(strong.apply(images.view(2, 3, H, W, 3), stacked, strong.Strong()).flatten(0, 1), flat)


def _tensors(draws):
    return {k: torch.from_numpy(v) for k, v in draws.items()}
