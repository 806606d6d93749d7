"""FixMatch against its equations, one client and one batch after another."""

import pytest
import torch
import torch.nn.functional as F

import oracle
import pooled
from federations import played, same, server_model, weights_of
from fedsap.methods import FixMatch


@pytest.mark.parametrize(("network", "sizes", "sure"), [("small", (19, 40, 33, 5), 0.42), ("resnet18", (9, 17), 0.4)])
def test_rounds_are_those_of_the_slow_loop(network, sizes, sure):
    method, lr = FixMatch(consistency=0.7, confidence=sure), 0.05 if network == "small" else 0.002
    simulation, models, mine, pool, owned = pooled.federation(method, network, sizes, lr=lr)
    counted = []
    for outcome in played(simulation, every=9):
        t = outcome.t
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            said = []
            if t in pool.rounds:
                with torch.no_grad():
                    guesses = [pooled.guess(z, owned[q]) for z in model.eval()(pooled.survey(pool, q, t))[1]]
                said = [(c, p >= sure) for c, p in guesses]
                pooled.check_report(outcome, q, pool, said)
            optimiser, history = oracle.sgd(model.train().parameters(), lr), []
            for b, beside in pooled.epoch(pool, q, t, 0, len(y), range(len(pool.lists[q]))):
                terms = {"ce": F.cross_entropy(model(x[b])[1], y[b])}
                if t in pool.rounds:
                    with torch.no_grad():
                        guesses = [pooled.guess(z, owned[q]) for z in model.eval()(beside.weak)[1]]
                    strong = model.train()(beside.strong)[1]
                    total = strong.sum() * 0
                    for z, (c, p) in zip(strong, guesses, strict=True):
                        counted.append(p >= sure)
                        total = total + pooled.negative_log(z, c) * (p >= sure)
                    terms["consistency"] = 0.7 * total / len(strong)
                optimiser.zero_grad()
                sum(terms.values()).backward()
                optimiser.step()
                history.append(terms)
            pooled.check_terms(outcome, q, history)
            same(weights_of(simulation, q), model.state_dict())
        same(server_model(simulation, outcome.server), pooled.average(models, sizes))
    assert 0 < sum(counted) < len(counted)
