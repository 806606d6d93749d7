"""CFL against its equations, one client and one batch after another."""

from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import oracle
from federations import SEED, pair, played, same, server_model, weights_of
from fedsap.message import tensor
from fedsap.methods import CFL, FedAvg
from fedsap.training.rounds import Presence

SIZES = (19, 40, 33, 24, 16, 32)


def two_parts(updates):
    """Complete linkage by hand: the two parts that are least unlike at their worst are merged until two are left."""
    unlike = [[-float(torch.dot(u, v) / (u.norm() * v.norm())) for v in updates] for u in updates]
    parts = [{i} for i in range(len(updates))]
    while len(parts) > 2:
        pairs = [(max(unlike[i][j] for i in a for j in b), a, b) for a in parts for b in parts if a is not b]
        _, a, b = min(pairs, key=lambda found: found[0])
        parts = [p for p in parts if p is not a and p is not b] + [a | b]
    return parts


@pytest.mark.parametrize(
    ("network", "sizes", "options"),
    [
        ("small", SIZES, {"after": 1}),
        ("small", SIZES, {"after": 2, "eps1": 0.5, "eps2": 0.1}),
        ("resnet18", (8, 9, 8), {"after": 1, "eps1": 100.0}),
    ],
)
def test_rounds_are_those_of_the_slow_loop(network, sizes, options):
    simulation, models, mine, *_ = pair(CFL(**options), network, sizes=sizes, rounds=4 if network == "small" else 2)
    clusters = [set(range(len(sizes)))]
    for outcome in played(simulation):
        updates = []
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            start = torch.cat([p.detach().flatten() for p in model.parameters()])
            optimiser = oracle.sgd(model.train().parameters())
            for b in oracle.batches(SEED, q, outcome.t, 0, len(y), 8):
                optimiser.zero_grad()
                F.cross_entropy(model(x[b])[1], y[b]).backward()
                optimiser.step()
            updates.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - start)
            same(weights_of(simulation, q), model.state_dict())
        after = []
        for members in clusters:
            some = [updates[q] for q in sorted(members)]
            longest = max(float(u.norm()) for u in some)
            still = float(torch.stack(some).mean(0).norm()) < options.get("eps1", longest / 4)
            if outcome.t > options["after"] and len(some) > 2 and still and longest > options.get("eps2", 0.0):
                after += [{sorted(members)[i] for i in part} for part in two_parts(some)]
            else:
                after.append(members)
        clusters = after
        found = tensor(outcome.server, "cluster").numpy()
        assert sorted(map(sorted, clusters)) == sorted(np.flatnonzero(found == c).tolist() for c in set(found))
        for members in clusters:
            mean = oracle.average([deepcopy(models[q].state_dict()) for q in members], [1] * len(members))
            same(server_model(simulation, outcome.server, found[min(members)]), mean)
            for q in members:
                oracle.put(models[q], mean)
    assert len(clusters) > 1


def test_with_thresholds_that_are_never_met_it_is_fedavg():
    one, other = pair(CFL(after=0, eps2=1e9), "small")[0], pair(FedAvg(weighted=False), "small")[0]
    for a, b in zip(played(one), played(other), strict=True):
        for k, v in b.server.items():
            assert torch.equal(a.server[k][0], v)
        assert torch.equal(a.scores.accuracy["head"], b.scores.accuracy["head"])
        assert (a.up, a.down) == (b.up, b.down)


def test_a_cluster_is_not_split_without_the_updates_of_all_its_members():
    simulation, *_ = pair(CFL(after=0, eps1=1e9), "small", sizes=SIZES, rounds=4)
    for outcome in played(simulation, presence=Presence(share=0.7)):
        assert tensor(outcome.server, "cluster").max() == 0


def test_a_cluster_without_an_answer_keeps_its_model():
    method = CFL(after=0, eps1=1e9)
    simulation, *_ = pair(method, "small", sizes=SIZES, rounds=2)
    *_, last = played(simulation)
    cluster = tensor(last.server, "cluster")
    some = [c for c in range(len(SIZES)) if cluster[c] == 0]
    away = int(cluster.max())
    sent = simulation.train(3, {}, method.address(last.server, 3, torch.tensor(some)), some)
    from fedsap.methods.method import Round

    info = Round(3, torch.Generator(), torch.tensor(some))
    after = method.combine(simulation.task, last.server, sent.message, info)
    for k in ("model/fc1.weight", "model/fc2.bias"):
        assert torch.equal(after[k][away], last.server[k][away])
        assert not torch.equal(after[k][0], last.server[k][0])


def test_the_defaults_split_on_the_digits():
    """The thresholds of the authors' code would not: no update of this protocol is as long as 1.6."""
    from fedsap.config import resolve
    from fedsap.federation import build_federation, dataset

    (config,) = resolve({"train": {"rounds": 22}, "eval": {"every": 100}}, ["cfl"])
    federation = build_federation([config], dataset(config))
    *_, last = played(federation.clients, every=100)
    assert tensor(last.server, "cluster").max() > 0
