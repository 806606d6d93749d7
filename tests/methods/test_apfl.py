"""APFL against its equations, one client and one batch after another."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import oracle
from federations import SEED, pair, played, same, server_model, weights_of
from fedsap.methods import APFL

LR, MOMENTUM = 0.05, 0.5


def mixture(alpha, personal, shared, statistics):
    return statistics | {k: alpha * v + (1 - alpha) * shared[k].detach() for k, v in personal.items()}


@pytest.mark.parametrize(
    ("network", "sizes", "mix", "adaptive"),
    [
        ("small", (19, 40, 33, 5), "weights", True),
        ("small", (19, 40, 33, 5), "logits", True),
        ("small", (19, 40, 33, 5), "weights", False),
        ("resnet18", (9, 17), "weights", True),
        ("resnet18", (9, 17), "logits", True),
    ],
)
def test_rounds_are_those_of_the_slow_loop(network, sizes, mix, adaptive):
    method = APFL(alpha=0.25, mix=mix, adaptive=adaptive)
    simulation, models, mine, *_ = pair(method, network, sizes=sizes, rounds=2)
    personal = [deepcopy(m) for m in models]
    alphas = [0.25] * len(sizes)
    for outcome in played(simulation):
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            own = personal[q].train()
            one, two = (oracle.sgd(m.train().parameters()) for m in (model, own))
            speed = 0.0
            for b in oracle.batches(SEED, q, outcome.t, 0, len(y), 8):
                alpha = torch.tensor(alphas[q], dtype=torch.float64, requires_grad=True)
                logits = model(x[b])[1]
                shared, v = dict(model.named_parameters()), dict(own.named_parameters())
                if mix == "weights":
                    mixed = functional_call(own, mixture(alpha, v, shared, dict(own.named_buffers())), (x[b],))[1]
                else:
                    mixed = alpha * own(x[b])[1] + (1 - alpha) * logits.detach()
                one.zero_grad()
                two.zero_grad()
                (F.cross_entropy(logits, y[b]) + F.cross_entropy(mixed, y[b])).backward()
                one.step()
                two.step()
                speed = MOMENTUM * speed + float(alpha.grad)
                alphas[q] -= LR * speed if adaptive else 0
            same(weights_of(simulation, q), model.state_dict())
            same(weights_of(simulation, q, "personal"), own.state_dict())
            if network == "resnet18":
                same(weights_of(simulation, q, "statistics"), own.state_dict())
            row = [k.client for k in simulation.stack.keys].index(q)
            assert float(simulation.state["mix"]["alpha"][row]) == pytest.approx(alphas[q], abs=1e-9)
        mean = oracle.average([deepcopy(m.state_dict()) for m in models], sizes)
        for model in models:
            oracle.put(model, mean)
        same(server_model(simulation, outcome.server), mean)


def test_the_slope_of_the_share_is_the_papers():
    """<v - w, grad L(m)>, with the gradient taken at the mixture."""
    simulation, models, mine, *_ = pair(APFL(alpha=0.375), "small", sizes=(8,), rounds=1)
    for v in simulation.state["personal"].values():
        v.add_(0.01 * torch.arange(v.numel(), dtype=v.dtype).view_as(v).sin())
    model, (x, y) = models[0], mine[0]
    shared = {k: p.detach() for k, p in model.named_parameters()}
    personal = weights_of(simulation, 0, "personal")
    mixed = {k: (0.375 * personal[k] + 0.625 * shared[k]).requires_grad_() for k in shared}
    F.cross_entropy(functional_call(model, mixed, (x,))[1], y).backward()
    slope = sum(float(((personal[k] - shared[k]) * mixed[k].grad).sum()) for k in shared)
    simulation.train(1, {}, {}, [0])
    assert float(simulation.state["mix"]["alpha"]) == pytest.approx(0.375 - LR * slope, abs=1e-12)


@pytest.mark.parametrize("mix", ["weights", "logits"])
def test_the_mixture_is_judged(mix):
    simulation, models, _, theirs, _ = pair(APFL(alpha=0.625, adaptive=False, mix=mix), "small", rounds=5)
    *_, last = played(simulation)
    shared = server_model(simulation, last.server)
    for q, (x, y) in enumerate(theirs):
        personal, model = weights_of(simulation, q, "personal"), models[q].eval()
        with torch.no_grad():
            if mix == "weights":
                logits = functional_call(model, {k: 0.625 * v + 0.375 * shared[k] for k, v in personal.items()}, (x,))[
                    1
                ]
            else:
                logits = sum(a * functional_call(model, w, (x,))[1] for a, w in ((0.625, personal), (0.375, shared)))
        right = float((logits.argmax(1) == y).double().mean())
        assert float(last.scores.accuracy["head"][q]) == pytest.approx(right)


def test_the_share_stays_within_its_bounds():
    simulation, *_ = pair(APFL(alpha=0.99), "small", rounds=2, lr=0.5)
    simulation.state["mix"]["alpha"].copy_(torch.tensor([1.4, -0.3, 0.5, 1.0]))
    assert (simulation.stack.method.model(simulation.state)["fc2.bias"] != 0).any()
    received = simulation.stack.method.receive(simulation.state, {})["mix"]["alpha"]
    assert received.tolist() == [1.0, 0.0, 0.5, 1.0]
