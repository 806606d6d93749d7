"""Ditto against its equations, one client and one batch after another."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

import oracle
from federations import SEED, pair, played, same, server_model, weights_of
from fedsap.methods import Ditto


@pytest.mark.parametrize(("network", "sizes"), [("small", (19, 40, 33, 5)), ("resnet18", (9, 17))])
def test_rounds_are_those_of_the_slow_loop(network, sizes):
    simulation, models, mine, *_ = pair(Ditto(lam=0.6), network, sizes=sizes, rounds=3 if network == "small" else 2)
    personal = [deepcopy(m) for m in models]
    for outcome in played(simulation):
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            received = [p.detach().clone() for p in model.parameters()]
            one, two = (oracle.sgd(m.train().parameters()) for m in (personal[q], model))
            for b in oracle.batches(
                SEED, q, outcome.t, 0, len(y), 8
            ):  # both models on each batch, as the authors' code
                near = sum((p - r).square().sum() for p, r in zip(personal[q].parameters(), received, strict=True))
                one.zero_grad()
                (F.cross_entropy(personal[q](x[b])[1], y[b]) + 0.6 / 2 * near).backward()
                one.step()
                two.zero_grad()
                F.cross_entropy(model(x[b])[1], y[b]).backward()
                two.step()
            same(weights_of(simulation, q), model.state_dict())
            same(weights_of(simulation, q, "personal"), personal[q].state_dict())
        mean = oracle.average([deepcopy(m.state_dict()) for m in models], sizes)
        for model in models:
            oracle.put(model, mean)
        same(server_model(simulation, outcome.server), mean)


def test_the_personal_model_is_judged():
    simulation, models, _, theirs, _ = pair(Ditto(lam=0.1), "small", rounds=5)
    *_, last = played(simulation)
    for q, (x, y) in enumerate(theirs):
        models[q].load_state_dict(weights_of(simulation, q, "personal"))
        with torch.no_grad():
            guess = models[q].eval()(x)[1].argmax(1)
        assert float(last.scores.accuracy["head"][q]) == pytest.approx(float((guess == y).double().mean()))
