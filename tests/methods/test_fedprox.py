"""FedProx against its equations, one client and one batch after another."""

from copy import deepcopy

import pytest
import torch.nn.functional as F

import oracle
from federations import SEED, pair, played, same, server_model, weights_of
from fedsap.methods import FedProx


@pytest.mark.parametrize(("network", "sizes"), [("small", (19, 40, 33, 5)), ("resnet18", (9, 17))])
def test_rounds_are_those_of_the_slow_loop(network, sizes):
    simulation, models, mine, *_ = pair(FedProx(mu=0.7), network, sizes=sizes, rounds=2, epochs=2)
    for outcome in played(simulation):
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            received = [p.detach().clone() for p in model.parameters()]
            optimiser, terms = oracle.sgd(model.train().parameters()), []
            for e in range(2):
                for b in oracle.batches(SEED, q, outcome.t, e, len(y), 8):
                    near = sum((p - r).square().sum() for p, r in zip(model.parameters(), received, strict=True))
                    optimiser.zero_grad()
                    (F.cross_entropy(model(x[b])[1], y[b]) + 0.7 / 2 * near).backward()
                    optimiser.step()
                    terms.append(0.35 * float(near.detach()))
            assert float(outcome.terms["prox"][q]) == pytest.approx(sum(terms) / len(terms), rel=1e-7)
            same(weights_of(simulation, q), model.state_dict())
        mean = oracle.average([deepcopy(m.state_dict()) for m in models], sizes)
        for model in models:
            oracle.put(model, mean)
        same(server_model(simulation, outcome.server), mean)


def test_it_stays_nearer_to_where_it_began():
    far, near = (pair(FedProx(mu=mu), "small", rounds=1)[0] for mu in (0.01, 10.0))
    start = {k: v.clone() for k, v in far.state["model"].items()}
    moved = []
    for simulation in (far, near):
        simulation.train(1, {}, {}, [0, 1, 2, 3])
        moved.append(float(sum((v - start[k]).square().sum() for k, v in simulation.state["model"].items())))
    assert moved[1] < 0.7 * moved[0]
