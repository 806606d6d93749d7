"""FedRep against its equations, one client and one batch after another."""

from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import oracle
from federations import SEED, pair, played, same, server_model, weights_of
from fedsap.methods import FedAvg, FedRep
from fedsap.methods.method import Method


@pytest.mark.parametrize(("network", "sizes", "head"), [("small", (19, 40, 33, 5), "fc2"), ("resnet18", (9, 17), "fc")])
def test_rounds_are_those_of_the_slow_loop(network, sizes, head):
    simulation, models, mine, *_ = pair(FedRep(head_epochs=2), network, sizes=sizes, rounds=2)
    for outcome in played(simulation):
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            names = dict(model.train().named_parameters())
            parts = [[p for k, p in names.items() if k.startswith(f"{head}.") == first] for first in (True, False)]
            losses = []
            for part, epochs in zip(parts, ((0, 1), (2,)), strict=True):
                optimiser = oracle.sgd(part)
                for e in epochs:
                    for b in oracle.batches(SEED, q, outcome.t, e, len(y), 8):
                        loss = F.cross_entropy(model(x[b])[1], y[b])
                        optimiser.zero_grad()
                        loss.backward()
                        optimiser.step()
                        losses.append(float(loss.detach()))
            third = len(losses) // 3
            assert float(outcome.terms["head"][q]) == pytest.approx(sum(losses[: 2 * third]) / (2 * third))
            assert float(outcome.terms["ce"][q]) == pytest.approx(sum(losses[2 * third :]) / third)
            same(weights_of(simulation, q), model.state_dict())
        mean = oracle.average([deepcopy(m.state_dict()) for m in models], sizes)
        mean = {k: v for k, v in mean.items() if not k.startswith(f"{head}.")}
        for model in models:
            oracle.put(model, mean)
        made = server_model(simulation, outcome.server)
        assert {k for k in made if "num_batches" not in k} == set(mean)
        same(made, mean)


@dataclass(frozen=True)
class Whole(FedRep):
    """FedRep that shares all layers, and trains them in one phase."""

    def private(self, network):
        return FedAvg.private(self, network)

    def phases(self):
        return Method.phases(self)


def test_with_all_layers_shared_in_one_phase_it_is_fedavg():
    one, other = pair(Whole(), "small")[0], pair(FedAvg(), "small")[0]
    for a, b in zip(played(one), played(other), strict=True):
        assert all(torch.equal(v, b.server[k]) for k, v in a.server.items())
        assert a.up == b.up
