"""What the slow loops of the methods with unlabelled samples share: views of one client's pool, a batch at a time."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import oracle
from federations import SEED, pair
from fedsap.training.streams import numbers
from training.test_pool import MORE, POOLS, SIZES, SUPERVISED, pools


def federation(method, network="small", sizes=SIZES, *, rounds=SUPERVISED, more=MORE, **options):
    """(Simulation, oracle models, oracle images and labels, pool of clients in their order, own classes)."""
    side, channels = (8, 1) if network == "small" else (16, 3)

    def make(order, classes, look, used):
        return pools(order, classes, look, used, channels=channels, side=side, sizes=POOLS[: len(sizes)])

    simulation, models, mine, _, owned = pair(
        method, network, sizes=sizes, rounds=rounds, more=more, pool=make, **options
    )
    pool = make(range(len(sizes)), 4, simulation.stack.look, simulation.stack.pool.rounds)
    return simulation, models, mine, pool, owned


@dataclass
class Beside:
    """What of a pool goes with one batch: places in the pool (none: nothing counts), and both views of the images."""

    places: list
    weak: torch.Tensor
    strong: torch.Tensor


def picture(pool, q, places, look, draws):
    raw = pool.images[pool.lists[q][places]]
    return look(raw, {k: torch.from_numpy(v) for k, v in draws.items()}).permute(0, 3, 1, 2)


def survey(pool, q, t):
    """The weak view of the whole pool that pseudo-labels of a round are made from."""
    n = len(pool.lists[q])
    draws = pool.weak.draw(numbers(SEED, "survey", q, t), n, pool.images.shape[1:3])
    return picture(pool, q, np.arange(n), pool.weak, draws)


def epoch(pool, q, t, number, n, *fed, draw=None):
    """For each batch of 8 of n labelled samples: their indices, what comes from each of the streams `fed` (lists of
    places), and what `draw` has made for it."""
    labelled = oracle.batches(SEED, q, t, number, n, 8)
    rng = numbers(SEED, "pool", q, t * 1000 + number)
    streams = [stream(pool, q, list(some), len(labelled), rng) for some in fed]
    drawn = draw(rng, len(labelled)) if draw else {}
    for s, b in enumerate(labelled):
        yield b, *[one[s] for one in streams], *[float(v[s]) for v in drawn.values()]


def stream(pool, q, fed, steps, rng):
    width, size = pool.batch, pool.images.shape[1:3]
    turns = []
    while fed and len(turns) < steps * width:
        turns += [fed[i] for i in rng.permutation(len(fed))]
    places = np.array((turns or [0] * (steps * width))[: steps * width])
    weak, strong = (
        picture(pool, q, places, look, look.draw(rng, len(places), size)) for look in (pool.weak, pool.strong)
    )
    cut = [slice(s * width, (s + 1) * width) for s in range(steps)]
    return [Beside(places[c].tolist() if fed else [], weak[c], strong[c]) for c in cut]


def guess(z, own):
    """The likeliest of the client's classes, and its probability among them."""
    p = torch.softmax(torch.stack([z[c] for c in own]), 0)
    return own[int(p.argmax())], float(p.max())


def negative_log(z, c):
    return -torch.log_softmax(z, 0)[c]


def divergence(target, z, own=None):
    """KL( softmax(target) || softmax(z) ), term by term."""
    p, q = torch.softmax(target.detach(), 0), torch.softmax(z, 0)
    return sum(a * (torch.log(a) - torch.log(b)) for a, b in zip(p, q, strict=True))


def check_report(outcome, q, pool, said):
    """`said`: pseudo-label and whether it counts, for each sample of the pool of client q."""
    truth = pool.truth[q].tolist()
    accepted = [c == y for (c, ok), y in zip(said, truth, strict=True) if ok]
    row = outcome.clients.index(q)
    assert float(outcome.figures["accepted"][row]) == pytest.approx(len(accepted) / len(said))
    right = float(outcome.figures["right"][row])
    assert right == pytest.approx(np.mean(accepted)) if accepted else math.isnan(right)


def check_terms(outcome, q, history):
    """`history`: the terms of each step, those of phases that have them."""
    row = outcome.clients.index(q)
    for name, values in outcome.terms.items():
        steps = [h[name] for h in history if name in h]
        mean = sum(float(torch.as_tensor(v).detach()) for v in steps) / len(steps)
        assert float(values[row]) == pytest.approx(mean, rel=1e-8, abs=1e-10), name


def average(models, sizes):
    """Every model becomes the mean, as in FedAvg; which is returned."""
    mean = oracle.average([m.state_dict() for m in models], sizes)
    mean = {k: v.clone() for k, v in mean.items()}
    for model in models:
        oracle.put(model, mean)
    return mean
