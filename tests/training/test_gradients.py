"""Gradients of the loss terms and distances to prototypes, against plain modules one client at a time."""

import copy

import pytest
import torch

import oracle
from federations import SEED, pair
from fedsap.methods import FedSAP
from fedsap.training.rounds import Judge, Presence, play
from fedsap.training.streams import numbers

METHOD = FedSAP(align_start=0, align_end=3, align_top=0.9, proxy_scale=8.0)
OPTIONS = {"align": lambda t: 0.9 * min(t / 3, 1), "proxy": 1.0, "scale": 8.0}


def norm_of(term, model):
    if not term.requires_grad:
        return 0.0
    found = torch.autograd.grad(term, list(model.parameters()), retain_graph=True, allow_unused=True)
    return sum(float(g.square().sum()) for g in found if g is not None) ** 0.5


@pytest.mark.parametrize(("network", "sizes"), [("small", (19, 40, 33, 5)), ("resnet18", (9, 17))])
def test_norms_are_those_of_the_first_batch_of_the_next_round(network, sizes):
    simulation, models, mine, theirs, _ = pair(METHOD, network, sizes=sizes, rounds=2, lr=0.02)
    slow = oracle.Federation(
        "fedsap",
        models,
        [x for x, _ in mine],
        [y for _, y in mine],
        seed=SEED,
        batch=8,
        lr=0.02,
        momentum=0.5,
        **OPTIONS,
    )
    judge = Judge(every=1, gradients=True)
    before = {k: v.clone() for k, v in simulation.state["model"].items()}
    for outcome in play(
        METHOD, simulation.task, simulation, seed=SEED, server=None, done=0, presence=Presence(), judge=judge
    ):
        slow.round(outcome.t)
        noted = outcome.scores.noted
        for q, model in enumerate(models):
            x, y = mine[q]
            batch = torch.from_numpy(numbers(SEED, "batches", q, (outcome.t + 1) * 1000).permutation(len(y))[:8])
            fresh = copy.deepcopy(model).train()
            h, logits, low = fresh(x[batch])
            for name, term in slow.loss(outcome.t + 1, h, logits, low, y[batch]).items():
                assert float(noted[f"gradient {name}"][q]) == pytest.approx(norm_of(term, fresh), rel=1e-6), name
            with torch.no_grad():
                images, labels = theirs[q]
                h = copy.deepcopy(model).eval()(images)[0]
                apart = [float((v - slow.banks["proto"][int(c)]).norm()) for v, c in zip(h, labels, strict=True)]
            assert float(noted["distance"][q]) == pytest.approx(sum(apart) / len(apart), rel=1e-5)
            assert float(noted["length"][q]) == pytest.approx(float(h.norm(dim=1).mean()), rel=1e-5)
    assert any(not torch.equal(before[k], v) for k, v in simulation.state["model"].items())


def test_measuring_changes_nothing():
    states = []
    for gradients in (False, True):
        simulation, *_ = pair(METHOD, "resnet18", sizes=(9, 17), rounds=2)
        judge = Judge(every=1, gradients=gradients)
        list(
            play(METHOD, simulation.task, simulation, seed=SEED, server=None, done=0, presence=Presence(), judge=judge)
        )
        states.append(simulation.state["model"])
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
