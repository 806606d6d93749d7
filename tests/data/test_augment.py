"""Augmentation of a batch against one image at a time with numpy's own padding and slicing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsap.data import augment


def crop_and_flip(image, dy, dx, flip, pad):
    """One image [H, W, C] the slow way."""
    h, w, _ = image.shape
    cropped = np.pad(image, ((pad, pad), (pad, pad), (0, 0)))[dy : dy + h, dx : dx + w]
    return cropped[:, ::-1] if flip else cropped


def tensors(draws, shape):
    return {name: torch.from_numpy(numbers).reshape(shape) for name, numbers in draws.items()}


@settings(deadline=None)
@given(
    lead=st.lists(st.integers(1, 4), min_size=0, max_size=3),
    h=st.integers(1, 9),
    w=st.integers(1, 9),
    c=st.sampled_from([1, 3]),
    pad=st.integers(0, 4),
    kind=st.sampled_from(["none", "crop", "crop-flip"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_batch_is_augmented_like_each_image_alone(lead, h, w, c, pad, kind, seed):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (*lead, h, w, c), dtype=np.uint8)
    n = int(np.prod(lead))
    draws = augment.draw(rng, n, kind, pad)
    got = augment.apply(torch.from_numpy(images), tensors(draws, lead), kind, pad).numpy()

    nothing = {"dy": np.full(n, pad), "dx": np.full(n, pad), "flip": np.zeros(n, dtype=bool)}
    dy, dx, flip = ({**nothing, **draws}[name] for name in ("dy", "dx", "flip"))
    flat = images.reshape(n, h, w, c)
    expected = np.stack([crop_and_flip(flat[i], dy[i], dx[i], flip[i], pad) for i in range(n)])
    np.testing.assert_array_equal(got, expected.reshape(images.shape))
    assert got.dtype == np.uint8


def test_images_need_not_be_contiguous():
    images = torch.arange(2 * 3 * 5 * 4, dtype=torch.uint8).reshape(2, 3, 5, 4).permute(0, 3, 2, 1)
    draws = tensors(augment.draw(np.random.default_rng(1), 2, "crop-flip", 2), (2,))
    got = augment.apply(images, draws, "crop-flip", 2)
    assert torch.equal(got, augment.apply(images.contiguous(), draws, "crop-flip", 2))


def test_every_corner_of_the_padded_image_is_drawn():
    draws = augment.draw(np.random.default_rng(0), 2000, "crop-flip", 4)
    assert set(draws["dy"]) == set(draws["dx"]) == set(range(9))
    assert draws["flip"].dtype == bool
    assert 900 < draws["flip"].sum() < 1100


def test_the_same_generator_gives_the_same_draws():
    first, second = (augment.draw(np.random.default_rng(7), 12, "crop-flip", 4) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_no_augmentation_draws_nothing_and_leaves_the_stream_alone():
    rng = np.random.default_rng(3)
    assert augment.draw(rng, 10, "none", 4) == {}
    assert rng.bit_generator.state == np.random.default_rng(3).bit_generator.state


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'mixup'.*none, crop, crop-flip"):
        augment.draw(np.random.default_rng(0), 1, "mixup", 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalise_is_the_formula_to_the_bit(dtype):
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(2, 16, 16, 3)
    got = augment.normalise(images, mean, std, dtype)
    for channel in range(3):
        m, s = (torch.tensor(numbers[channel], dtype=dtype) for numbers in (mean, std))
        assert torch.equal(got[..., channel], (images[..., channel].to(dtype) / 255 - m) / s)
    assert got.dtype == dtype


def test_half_precision_is_rounded_once():
    images = torch.arange(256, dtype=torch.uint8).reshape(16, 16, 1)
    full = augment.normalise(images, (0.1307,), (0.3081,), torch.float32)
    assert torch.equal(augment.normalise(images, (0.1307,), (0.3081,), torch.bfloat16), full.bfloat16())


def test_normalise_leaves_its_input_alone():
    images = torch.full((1, 2, 2, 1), 255.0)
    augment.normalise(images, (0.5,), (0.5,))
    assert images.eq(255).all()


def test_normalise_wants_one_number_per_channel():
    with pytest.raises(ValueError, match="1 means and 1 deviations for 3 channels"):
        augment.normalise(torch.zeros(2, 4, 4, 3, dtype=torch.uint8), (0.5,), (0.5,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_gives_the_same_pixels():
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (3, 4, 32, 32, 3), dtype=np.uint8))
    draws = tensors(augment.draw(rng, 12, "crop-flip", 4), (3, 4))
    there = augment.apply(images.cuda(), {name: x.cuda() for name, x in draws.items()}, "crop-flip", 4)
    assert torch.equal(there.cpu(), augment.apply(images, draws, "crop-flip", 4))
