"""SemiFL against its equations, one client and one batch after another."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

import oracle
import pooled
from federations import played, same, server_model, weights_of
from fedsap.methods import SemiFL


def over(z, labels, places):
    """Mean cross-entropy over the samples that count; zero if there are none."""
    total = z.sum() * 0
    for v, c in zip(z, labels, strict=False) if places else ():
        total = total + pooled.negative_log(v, c)
    return total / len(z)


@pytest.mark.parametrize(
    ("network", "sizes", "sure", "options"),
    [
        ("small", (19, 40, 33, 5), 0.42, {"mix": 0.6}),
        ("small", (19, 40), 0.42, {"mix": 0.0, "server_momentum": 0.0}),
        ("resnet18", (9, 17), 0.4, {"fix": 0.3}),
    ],
)
def test_rounds_are_those_of_the_slow_loop(network, sizes, sure, options):
    method, lr = SemiFL(confidence=sure, **options), 0.05 if network == "small" else 0.002
    more = 3 if network == "small" else 2  # rounding grows from round to round
    simulation, models, mine, pool, owned = pooled.federation(method, network, sizes, lr=lr, more=more)
    trained = [k for k, _ in models[0].named_parameters()]
    before, last, seen = None, dict.fromkeys(trained, 0.0), []
    for outcome in played(simulation, every=9):
        t = outcome.t
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            optimiser, history = oracle.sgd(model.parameters(), lr), []
            if t in pool.rounds:
                with torch.no_grad():
                    guesses = [pooled.guess(z, owned[q]) for z in model.eval()(pooled.survey(pool, q, t))[1]]
                said = [(c, p >= sure) for c, p in guesses]
                pooled.check_report(outcome, q, pool, said)
                fix = [i for i, (_, ok) in enumerate(said) if ok]
                seen += [ok for _, ok in said]
                fed = (fix, range(len(said))) if method.mix else (fix,)
                for _, one, *rest in pooled.epoch(pool, q, t, 0, len(y), *fed, draw=method.draw):
                    terms = {}
                    if method.fix:
                        z = model.train()(one.strong)[1]
                        terms["fix"] = method.fix * over(z, [said[i][0] for i in one.places], one.places)
                    if method.mix:
                        other, share = rest
                        z = model.train()(share * one.weak + (1 - share) * other.weak)[1]
                        first, second = ([said[i][0] for i in v.places] for v in (one, other))
                        both = share * over(z, first, one.places) + (1 - share) * over(z, second, one.places)
                        terms["mix"] = method.mix * both
                    optimiser.zero_grad()
                    sum(terms.values()).backward()
                    optimiser.step()
                    history.append(terms)
            for b in oracle.batches(pooled.SEED, q, t, int(t in pool.rounds), len(y), 8):
                ce = F.cross_entropy(model.train()(x[b])[1], y[b])
                optimiser.zero_grad()
                ce.backward()
                optimiser.step()
                history.append({"ce": ce})
            pooled.check_terms(outcome, q, history)
            same(weights_of(simulation, q), model.state_dict())
        mean = deepcopy(pooled.average(models, sizes))
        if before is not None:
            for k in trained:
                last[k] = method.server_momentum * last[k] + mean[k] - before[k]
                mean[k] = before[k] + last[k]
        for model in models:
            oracle.put(model, mean)
        before = deepcopy(mean)
        same(server_model(simulation, outcome.server), mean)
    assert 0 < sum(seen) < len(seen)


def test_proportions_are_drawn_anew_for_every_batch():
    """And from another distribution where alpha says so."""
    import numpy as np

    draws = {a: SemiFL(alpha=a).draw(np.random.default_rng(0), 2000)["share"] for a in (0.1, 0.75, 50.0)}
    for a, share in draws.items():
        assert share.var() == pytest.approx(1 / (4 * (2 * a + 1)), rel=0.1)  # Beta(a, a)
        assert share.mean() == pytest.approx(0.5, abs=0.05)
