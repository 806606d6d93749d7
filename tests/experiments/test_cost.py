"""Estimates, against the runs of docs/speed.md that they were made from and others that were measured."""

import pytest

from fedsap.config import resolve
from fedsap.experiments.cost import seconds

CIFAR = {"data": {"name": "cifar10"}}


@pytest.mark.parametrize(
    ("layer", "seeds", "device", "measured"),
    [
        (CIFAR, (1, 2, 3), "cuda", 51.6 - 9.1),  # without what a process does once
        (CIFAR, (1,), "cuda", 36.6 - 8.7),
        ({}, (1, 2, 3), "cpu", 6.6),  # digits: 2.2 s a seed
    ],
)
def test_estimates_are_near_what_was_measured(layer, seeds, device, measured):
    found = seconds(resolve(layer, ["fedsap"], seeds), device)
    assert measured / 1.6 < found < 1.6 * measured


def test_more_of_anything_takes_longer():
    def cost(**train):
        return seconds(resolve({**CIFAR, "train": train}, (), (1,)), "cpu")

    base = cost(rounds=20)
    assert cost(rounds=40) > 1.8 * base
    assert cost(rounds=20, epochs=2) > base
    for more in ({"model": {"resolution": 64}}, {"model": {"stem_stride": 2}}, {"partition": {"ways": 5}}):
        assert seconds(resolve({**CIFAR, "train": {"rounds": 20}, **more}, (), (1,)), "cpu") > base
