"""Models of one client with random weights, as if some federation had trained them."""

import torch

from fedsap.config import ModelKeys
from fedsap.data import Pixels
from fedsap.message import PerClass
from fedsap.methods.method import Task
from fedsap.models import build
from fedsap.saved import judged

CLASSES = ("ant", "bee", "cat", "dog", "eel")


def model(method, keys, shape, *, owned=(0, 2, 3), seen=(0, 1, 2, 4)):
    """`seen`: classes with a prototype; None: there is no bank."""
    draw = torch.Generator().manual_seed(5)
    keys = ModelKeys(**keys)
    options = keys.model_dump(exclude={"name", "weights"}, exclude_none=True)
    network = build(keys.name, classes=len(CLASSES), shape=shape, **options)
    state = {}
    for name, part in method.init(Task(network, len(CLASSES), 4, 3), draw).items():
        state[name] = {k: _random(k, v, draw)[None] for k, v in part.items()}
    bank = None
    if seen is not None:
        mask = torch.zeros(len(CLASSES), dtype=torch.bool)
        mask[list(seen)] = True
        values = torch.randn(len(CLASSES), network.dim, generator=draw).abs()
        bank = PerClass(values * mask[:, None], mask)
    channels = shape[2]
    return judged(
        method,
        network,
        state,
        bank=bank,
        classes=CLASSES,
        owned=owned,
        pixels=Pixels(shape, (0.4, 0.5, 0.6)[:channels], (0.2, 0.3, 0.4)[:channels], 255),
        keys=keys,
        about={"client": 3, "round": 7},
    )


def _random(name, value, draw):
    """Weights as drawn, with something in the running statistics and in what begins with zeros."""
    if name.endswith("running_var"):
        return torch.rand(value.shape, generator=draw) + 0.5
    if name.endswith("running_mean") or not value.any():
        return 0.1 * torch.randn(value.shape, generator=draw)
    return value


def images(shape, n=6):
    return torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(6))
