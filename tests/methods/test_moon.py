"""MOON against its equations, one client and one batch after another."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import oracle
from federations import SEED, pair, played, same, server_model, weights_of
from fedsap.methods import MOON


class Projected(nn.Module):
    """A network of the oracle with MOON's projection between its embedding and an output layer of its own."""

    def __init__(self, network, projection, width):
        super().__init__()
        self.network = network
        if projection:
            self.project1, self.project2 = nn.Linear(width, width), nn.Linear(width, projection)
            self.output = nn.Linear(projection, 4)

    def forward(self, x):
        h, logits, _ = self.network(x)
        if not hasattr(self, "output"):
            return h, logits
        z = self.project2(F.relu(self.project1(h)))
        return z, self.output(z)


def contrast(z, near, far, tau):
    """-1/B sum log( e^(cos(z, z') / tau) / (e^(cos(z, z') / tau) + e^(cos(z, z") / tau)) ), sample by sample."""
    total = 0
    for a, b, c in zip(z, near, far, strict=True):
        one, two = (torch.exp(torch.dot(a, v) / (a.norm() * v.norm()) / tau) for v in (b, c))
        total = total - torch.log(one / (one + two))
    return total / len(z)


@pytest.mark.parametrize(
    ("network", "sizes", "projection", "rounds"),
    [("small", (19, 40, 33, 5), 7, 3), ("small", (19, 40), 0, 3), ("resnet18", (9, 17), 7, 2)],
)
def test_rounds_are_those_of_the_slow_loop(network, sizes, projection, rounds):
    method = MOON(mu=2.0, tau=0.3, projection=projection)
    simulation, plain, mine, *_ = pair(method, network, sizes=sizes, rounds=rounds)
    width = simulation.stack.network.dim
    models = [Projected(m, projection, width).double() for m in plain]
    for q, model in enumerate(models):
        oracle.put(model, weights_of(simulation, q, "projection"))
    last, received = [None] * len(sizes), None
    for outcome in played(simulation):
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            optimiser, terms = oracle.sgd(model.train().parameters()), []
            for b in oracle.batches(SEED, q, outcome.t, 0, len(y), 8):
                z, logits = model(x[b])
                loss = F.cross_entropy(logits, y[b])
                if received is not None:
                    with torch.no_grad():
                        near, far = received.eval()(x[b])[0], last[q].eval()(x[b])[0]
                    terms.append(2.0 * contrast(z, near, far, 0.3))
                    loss = loss + terms[-1]
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            if received is not None:
                expected = float(sum(terms).detach()) / len(terms)
                assert float(outcome.terms["contrast"][q]) == pytest.approx(expected)
            own = {k.removeprefix("network."): v for k, v in model.state_dict().items()}
            same(weights_of(simulation, q), own)
            if projection:
                same(weights_of(simulation, q, "projection"), own)
        last = [deepcopy(m) for m in models]
        mean = oracle.average([deepcopy(m.state_dict()) for m in models], sizes)
        for model in models:
            oracle.put(model, mean)
        received = deepcopy(models[0])
        same(server_model(simulation, outcome.server), {k.removeprefix("network."): v for k, v in mean.items()})


def test_the_first_round_has_no_contrast():
    simulation, *_ = pair(MOON(), "small", rounds=1)
    assert set(simulation.train(1, {}, {}, [0, 1, 2, 3]).terms) == {"ce"}


def test_the_projection_is_common_and_its_layers_decide():
    simulation, _, _, theirs, _ = pair(MOON(projection=5), "small", rounds=3)
    layers = simulation.state["projection"]
    assert all(torch.equal(v[0], v[1]) for v in layers.values())
    assert {k: tuple(v.shape[1:]) for k, v in layers.items() if k.endswith("weight")} == {
        "project1.weight": (64, 64),
        "project2.weight": (5, 64),
        "output.weight": (4, 5),
    }
    *_, outcome = played(simulation)
    assert "model/fc2.weight" not in outcome.server
    network = Projected(oracle.Small(4), 5, 64).double()
    made = server_model(simulation, outcome.server)
    made |= {k.removeprefix("projection/"): v for k, v in outcome.server.items() if k.startswith("projection/")}
    oracle.put(network, {k if k in layers else f"network.{k}": v for k, v in made.items()})
    for q, (x, y) in enumerate(theirs):
        with torch.no_grad():
            right = (network.eval()(x)[1].argmax(1) == y).double().mean()
        assert float(outcome.scores.accuracy["head"][q]) == pytest.approx(float(right))
