"""Small federations on random images, as a stack and as the oracle's loop, from the same weights."""

from dataclasses import replace

import numpy as np
import torch

import oracle
from fedsap.data import Split
from fedsap.engines.simulate import Simulation
from fedsap.message import under
from fedsap.methods.method import Task
from fedsap.models import ResNet18, Small
from fedsap.models import client as one_client
from fedsap.training.feed import Images, Key, Look
from fedsap.training.local import Hyper, Stack
from fedsap.training.rounds import Judge, Presence, play

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
        None if pool is None else _on(device, pool(order, classes, look, range(rounds + 1, rounds + more + 1))),
    )
    test = Images.of(tests, [test_lists[c] for c in order], torch.device(device))
    used = stack.pool.rounds if stack.pool else range(0)
    task = Task(network, classes, len(sizes), rounds, more, stack.pool.size if stack.pool else 0, used)
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


def played(simulation, rounds=None, presence=None, every=1):
    """The rounds of a federation, one after the other."""
    stack, task = simulation.stack, simulation.task
    task = task if rounds is None else replace(task, rounds=rounds)
    presence = presence or Presence()
    return play(
        stack.method,
        task,
        simulation,
        seed=stack.keys[0].seed,
        server=None,
        done=0,
        presence=presence,
        judge=Judge(every=every),
    )


def _on(device, pool):
    return replace(pool, images=pool.images.to(device))


def weights_of(simulation, client, name="model"):
    """One client's weights under torch's names and in its layout."""
    row = [k.client for k in simulation.stack.keys].index(client)
    return simulation.stack.network.export(one_client(simulation.state[name], row))


def server_model(simulation, server, cluster=None):
    """The weights that the server has, under torch's names and in its layout."""
    weights = {k: v if cluster is None else v[cluster] for k, v in under("model", server).items()}
    return simulation.stack.network.export(weights)


def same(weights, other, tolerance=1e-9):
    """That each of `weights` is what `other`, such as a module's state_dict, has under its name."""
    assert weights
    for k, v in weights.items():
        if v.is_floating_point():
            expected = other[k].detach()
            assert v.shape == expected.shape, k
            assert (v - expected).norm() <= tolerance * (1 + expected.norm()), (k, float((v - expected).norm()))
