"""FedPPL against the equations on its page, one client and one batch after another."""

import math

import pytest
import torch
import torch.nn.functional as F

import oracle
import pooled
from federations import played, same, server_model, weights_of
from fedsap.message import table
from fedsap.methods import FedPPL

HIGH, LOW, SCALE = 0.6, 0.1, 3.0


def sure(h, z, own, bank):
    """The guess, and whether it counts: its probability against a threshold that prototypes lower."""
    label, p = pooled.guess(z, own)
    threshold = HIGH
    if bank:
        near = {c: math.exp(SCALE * float(torch.dot(oracle.unit(h), oracle.unit(bank[c])))) for c in own}
        threshold = HIGH - (HIGH - LOW) * near[label] / sum(near.values())
    return label, p >= threshold


@pytest.mark.parametrize(("network", "sizes", "rounds"), [("small", (19, 40, 33, 5), 0), ("resnet18", (9, 17), 1)])
def test_rounds_are_those_of_the_slow_loop(network, sizes, rounds):
    """With the pool from round 1 on, when there is no bank yet, and later."""
    method = FedPPL(consistency=0.7, confidence=HIGH, least=LOW, scale=SCALE)
    lr = 0.05 if network == "small" else 0.002
    simulation, models, mine, pool, owned = pooled.federation(method, network, sizes, lr=lr, rounds=rounds, more=3)
    counted, bank = [], {}
    for outcome in played(simulation, every=9):
        t, local = outcome.t, []
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            if t in pool.rounds:
                with torch.no_grad():
                    h, z, _ = model.eval()(pooled.survey(pool, q, t))
                said = [sure(*one, owned[q], bank) for one in zip(h, z, strict=True)]
                pooled.check_report(outcome, q, pool, said)
            optimiser, history = oracle.sgd(model.train().parameters(), lr), []
            for b, beside in pooled.epoch(pool, q, t, 0, len(y), range(len(pool.lists[q]))):
                terms = {"ce": F.cross_entropy(model(x[b])[1], y[b])}
                if t in pool.rounds:
                    with torch.no_grad():
                        h, z, _ = model.eval()(beside.weak)
                    strong = model.train()(beside.strong)[1]
                    total = strong.sum() * 0
                    for v, *one in zip(strong, h, z, strict=True):
                        c, ok = sure(*one, owned[q], bank)
                        counted.append(ok)
                        total = total + pooled.negative_log(v, c) * ok
                    terms["consistency"] = 0.7 * total / len(strong)
                optimiser.zero_grad()
                sum(terms.values()).backward()
                optimiser.step()
                history.append(terms)
            pooled.check_terms(outcome, q, history)
            same(weights_of(simulation, q), model.state_dict())
            with torch.no_grad():
                local.append(oracle.means(model.eval()(x)[0], y))
        bank = oracle.combine(local)
        for c, p in bank.items():
            torch.testing.assert_close(table(outcome.server, "bank").values[c], p)
        same(server_model(simulation, outcome.server), pooled.average(models, sizes))
    assert 0 < sum(counted) < len(counted)
