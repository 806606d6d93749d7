"""Unlabelled samples on a GPU: views and recorded rounds are the CPU's, and operations are torchvision's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from data.test_strong import H, W, by_hand, pictures
from fedsap.data import strong
from gpu.test_training import apart
from methods.test_pools import EVERY
from training.test_pool import BASE, pools
from training.test_pool import played as on_cpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("kind", ["colour", "shape"])
def test_strong_views_are_the_cpus_to_the_bit(kind):
    images = torch.from_numpy(pictures(200, 3))
    spec = strong.Strong(kind, magnitude=None)
    draws = {k: torch.from_numpy(v) for k, v in strong.draw(np.random.default_rng(0), 200, (H, W), spec).items()}
    made = strong.apply(images.cuda(), {k: v.cuda() for k, v in draws.items()}, spec)
    assert torch.equal(made.cpu(), strong.apply(images, draws, spec))


@pytest.mark.parametrize("name", strong.OPERATIONS)
def test_an_operation_is_torchvisions(name):
    transforms = pytest.importorskip("torchvision.transforms.autoaugment")
    from torchvision.transforms import InterpolationMode

    levels, signs = [0, 4, 10, 17, 30] * 2, [1, -1] * 5
    images = pictures(len(levels), 3)
    for image, made, level, sign in zip(
        images, by_hand(images, [name] * len(levels), levels, signs), levels, signs, strict=True
    ):
        magnitude = {
            "ShearX": 0.3, "ShearY": 0.3, "TranslateX": 150 / 331 * W, "TranslateY": 150 / 331 * H, "Rotate": 30.0,
        }.get(name, 0.9) * sign * level / 30  # fmt: skip
        if name == "Posterize":
            magnitude = 8 - round(level / 7.5)
        if name == "Solarize":
            magnitude = 255 - 8.5 * level
        if name.startswith("Translate"):
            magnitude = -magnitude  # there the image moves, here the place that a pixel is taken from
        theirs = np.asarray(
            transforms._apply_op(Image.fromarray(image), name, magnitude, InterpolationMode.NEAREST, [7, 8, 9])
        )
        differing = (made != theirs).any(-1).mean()
        assert differing <= (0.05 if name.startswith(("Shear", "Rotate")) else 0.0), (level, sign, differing)


@pytest.mark.parametrize("refresh", ["round", "batch", "once"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_a_recorded_second_phase_is_the_cpus(refresh, dtype, tolerance):
    method = replace(BASE, refresh=refresh)
    mine, gpu = on_cpu(method, dtype=dtype, device="cuda")
    theirs, cpu = on_cpu(method, dtype=dtype)
    assert gpu.recorder is not None
    assert gpu.recorder.recordings > 0
    assert apart(gpu, cpu) < tolerance
    for one, other in zip(mine, theirs, strict=True):
        assert one.figures.keys() == other.figures.keys()
        for name, value in other.figures.items():
            assert torch.allclose(one.figures[name], value, atol=1e-4, equal_nan=True), name


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_a_recorded_round_of_every_method_with_a_pool_is_the_cpus(name, dtype, tolerance):
    mine, gpu = on_cpu(EVERY[name], dtype=dtype, device="cuda")
    theirs, cpu = on_cpu(EVERY[name], dtype=dtype)
    assert gpu.recorder is not None
    assert gpu.recorder.recordings > 0
    assert apart(gpu, cpu) < tolerance
    for one, other in zip(mine, theirs, strict=True):
        assert one.terms.keys() == other.terms.keys()
        for term, value in other.terms.items():
            assert torch.allclose(one.terms[term].double(), value.double(), rtol=100 * tolerance, atol=100 * tolerance)


def test_replayed_steps_with_a_pool_are_the_eager_ones_to_the_bit():
    from federations import SEED, pair
    from fedsap.training.rounds import Judge, Presence, play

    _, recorded = on_cpu(BASE, dtype=torch.float32, device="cuda")
    simulation, *_ = pair(
        BASE, "small", rounds=2, more=3, sizes=(19, 40, 33, 5), pool=pools, dtype=torch.float32, device="cuda"
    )
    simulation.recorder = None
    list(play(BASE, simulation.task, simulation, seed=SEED, server=None, done=0, presence=Presence(), judge=Judge()))
    for k, v in recorded.state["model"].items():
        assert torch.equal(v, simulation.state["model"][k]), k
