"""Small federations on random images, as a stack and as the oracle's loop, from the same weights."""

import numpy as np
import torch

import oracle
from fedsap.data import Split
from fedsap.engines.simulate import Simulation
from fedsap.methods.method import Task
from fedsap.models import ResNet18, Small
from fedsap.models import client as one_client
from fedsap.training.feed import Images, Key, Look
from fedsap.training.local import Hyper, Stack

SEED = 7


def data(rng, sizes, classes, side, channels):
    """Ragged clients: [(labels, places)], and one pool of images; every client lacks some class."""
    total = sum(sizes)
    images = rng.integers(0, 256, (total, side, side, channels), dtype=np.uint8)
    labels = np.zeros(total, np.int64)
    lists, start = [], 0
    for q, n in enumerate(sizes):
        own = [(q + i) % classes for i in range(classes - 1)]
        labels[start : start + n] = [own[i % len(own)] for i in range(n)]
        lists.append(np.arange(start, start + n))
        start += n
    return Split(images, labels), lists


def pair(
    method,
    name,
    *,
    sizes=(19, 40, 33, 5),
    dtype=torch.float64,
    epochs=1,
    momentum=0.5,
    rounds=3,
    network=None,
    lr=0.05,
    device="cpu",
    together=0,
    pool=None,
    more=0,
):
    """(Simulation, oracle models, oracle images, oracle labels, test images of the oracle). `pool`, if given, makes a
    training.feed.Pool of the device; it is used in the `more` rounds after the first."""
    rng = np.random.default_rng(3)
    classes = 4
    side, channels = (8, 1) if name == "small" else (16, 3)
    split, lists = data(rng, sizes, classes, side, channels)
    tests, test_lists = data(rng, [len(s) + 3 for s in lists], classes, side, channels)
    network = network or (
        Small(classes, (side, side, channels)) if name == "small" else ResNet18(classes, (side, side, channels))
    )
    look = Look((0.5,) * channels, (0.25,) * channels, "none", 1, dtype)
    owned = torch.zeros(len(sizes), classes, dtype=torch.bool)
    for q, places in enumerate(lists):
        owned[q, split.labels[places]] = True
    order = sorted(range(len(sizes)), key=lambda c: -(sizes[c] // 8))
    stack = Stack(
        network,
        method,
        Images.of(split, [lists[c] for c in order], torch.device(device)),
        tuple(Key(SEED, c) for c in order),
        owned[order].to(device),
        look,
        Hyper(batch=8, lr=lr, momentum=momentum, epochs=epochs),
        pool(order, classes, look, range(rounds + 1, rounds + more + 1)) if pool else None,
    )
    test = Images.of(tests, [test_lists[c] for c in order], torch.device(device))
    task = Task(network, classes, len(sizes), rounds, more, stack.pool.size if pool else 0)
    simulation = Simulation(stack, test, task, chunk=7, together=together)
    models = []
    for c in range(len(sizes)):
        plain = oracle.Small(classes, channels, side) if name == "small" else oracle.ResNet18(classes)
        plain = plain.to(dtype)
        weights = network.export(one_client(simulation.state["model"], order.index(c)))
        plain.load_state_dict(weights, strict=name == "small")
        models.append(plain)

    def plainly(some, places):
        x = torch.from_numpy(some.images[places]).to(dtype) / 255
        return ((x - 0.5) / 0.25).permute(0, 3, 1, 2), torch.from_numpy(some.labels[places])

    mine = [plainly(split, p) for p in lists]
    theirs = [plainly(tests, p) for p in test_lists]
    return simulation, models, mine, theirs, [sorted(set(split.labels[p].tolist())) for p in lists]


def weights_of(simulation, client):
    """One client's weights under torch's names and in its layout."""
    row = [k.client for k in simulation.stack.keys].index(client)
    return simulation.stack.network.export(one_client(simulation.state["model"], row))
