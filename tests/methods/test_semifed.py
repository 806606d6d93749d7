"""SemiFed against the equations on its page, one client and one batch after another."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

import oracle
import pooled
from federations import SEED, played, same, server_model, weights_of
from fedsap.methods import SemiFed
from fedsap.training.rounds import Presence
from fedsap.training.streams import generator


def drawn(t, present, clients, some):
    """For each client, in the order of random numbers, others that have replied."""
    numbers = torch.rand(clients, len(present), generator=generator(SEED, "server", t=t)).tolist()
    ranked = [sorted(zip(row, present, strict=True)) for row in numbers]
    return [[c for _, c in row if c != q][:some] for q, row in enumerate(ranked)]


@pytest.mark.parametrize(
    ("network", "sizes", "sure", "options"),
    [
        ("small", (19, 40, 33, 5), 0.37, {}),
        ("small", (19, 40, 33), 0.27, {"pseudo_classes": "all", "ce": "own", "members": 1}),
        ("resnet18", (9, 17), 0.34, {}),
    ],
)
def test_rounds_are_those_of_the_slow_loop(network, sizes, sure, options):
    method, lr = (
        SemiFed(consistency=0.7, agreement=0.4, confidence=sure, **options),
        0.05 if network == "small" else 0.002,
    )
    more = 3 if network == "small" else 2  # rounding grows from round to round
    simulation, models, mine, pool, owned = pooled.federation(method, network, sizes, lr=lr, more=more)
    sent, counted = None, []
    for outcome in played(simulation, every=9):
        t = outcome.t
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            said, among = [], owned[q] if method.pseudo_classes == "own" else range(4)
            if t in pool.rounds:
                chosen = drawn(t - 1, range(len(sizes)), len(sizes), method.members)[q]
                images = pooled.survey(pool, q, t)
                with torch.no_grad():
                    looks = [m.eval()(images)[1] for m in (model, *(sent[c] for c in chosen))]
                for views in zip(*looks, strict=True):
                    guesses = [pooled.guess(z, among) for z in views]
                    ok = len({c for c, _ in guesses}) == 1 and min(p for _, p in guesses) >= sure
                    said.append((guesses[0][0] if ok else -1, ok))
                    counted.append(ok)
                pooled.check_report(outcome, q, pool, said)
            optimiser, history = oracle.sgd(model.train().parameters(), lr), []
            for b, beside in pooled.epoch(pool, q, t, 0, len(y), range(len(pool.lists[q]))):
                if method.ce == "own":
                    ce = oracle.cross_entropy(
                        model(x[b])[1][:, owned[q]], torch.tensor([owned[q].index(c) for c in y[b]])
                    )
                else:
                    ce = F.cross_entropy(model(x[b])[1], y[b])
                terms = {"ce": ce}
                if t in pool.rounds:
                    with torch.no_grad():
                        weak = model.eval()(beside.weak)[1]
                    strong = model.train()(beside.strong)[1]
                    apart = sum(pooled.divergence(w, z) for w, z in zip(weak, strong, strict=True))
                    terms["consistency"] = 0.7 * apart / len(strong)
                    total, agreed = strong.sum() * 0, 0
                    for z, i in zip(strong, beside.places, strict=True):
                        label, ok = said[i]
                        if ok and (method.ce == "all" or label in owned[q]):
                            over = owned[q] if method.ce == "own" else list(range(4))
                            total = total + pooled.negative_log(z[over], over.index(label))
                            agreed += 1
                    terms["agreement"] = 0.4 * total / max(1, agreed)
                optimiser.zero_grad()
                sum(terms.values()).backward()
                optimiser.step()
                history.append(terms)
            pooled.check_terms(outcome, q, history)
            same(weights_of(simulation, q), model.state_dict())
        sent = [deepcopy(m) for m in models]
        same(server_model(simulation, outcome.server), pooled.average(models, sizes))
    assert 0 < sum(counted) < len(counted)


def test_who_is_away_is_stood_in_for_by_the_mean():
    simulation, *_ = pooled.federation(SemiFed(members=2), rounds=1, more=2)
    clients = torch.arange(4)
    for outcome in played(simulation, every=9, presence=Presence(share=0.5)):
        if outcome.t + 1 not in simulation.stack.pool.rounds:
            continue
        assert len(outcome.clients) == 2
        told = simulation.stack.method.address(outcome.server, outcome.t + 1, clients)
        rows = {k.client: i for i, k in enumerate(simulation.stack.keys)}
        theirs = {c: simulation.state["model"]["fc2.bias"][rows[c]] for c in outcome.clients}
        mean = outcome.server["model/fc2.bias"]
        for q in range(4):
            got = [told[f"member {i}/fc2.bias"][q] for i in range(2)]
            others = [c for c in outcome.clients if c != q]
            assert all(any(torch.equal(v, theirs[c]) for c in others) or torch.equal(v, mean) for v in got)
            assert sum(torch.equal(v, mean) for v in got) == 2 - len(others)
