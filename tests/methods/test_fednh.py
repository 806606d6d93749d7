"""FedNH against its equations, one client and one batch after another."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

import oracle
from federations import SEED, pair, played, same, server_model, weights_of
from fedsap.message import tensor
from fedsap.methods import FedNH
from fedsap.training.streams import generator


@pytest.mark.parametrize(
    ("network", "sizes", "learn"),
    [("small", (19, 40, 33, 5), True), ("small", (19, 40, 33, 5), False), ("resnet18", (9, 17), True)],
)
def test_rounds_are_those_of_the_slow_loop(network, sizes, learn):
    method = FedNH(rho=0.7, scale=5.0, learn_scale=learn)
    simulation, models, mine, *_ = pair(method, network, sizes=sizes, rounds=3 if network == "small" else 2)
    head = tensor(method.begin(simulation.task, generator(SEED, "server")), "head").double()
    scales = [torch.tensor(5.0, dtype=torch.float64, requires_grad=learn) for _ in models]
    for outcome in played(simulation):
        sums, counts = torch.zeros_like(head), torch.zeros(4, 1, dtype=torch.float64)
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            optimiser = oracle.sgd([*model.train().parameters(), *([scales[q]] if learn else [])])
            for b in oracle.batches(SEED, q, outcome.t, 0, len(y), 8):
                h = model(x[b])[0]
                logits = scales[q] * (h / h.norm(dim=1, keepdim=True)) @ head.T
                optimiser.zero_grad()
                F.cross_entropy(logits, y[b]).backward()
                optimiser.step()
            same(weights_of(simulation, q), model.state_dict())
            row = [k.client for k in simulation.stack.keys].index(q)
            assert float(simulation.state["scale"]["s"][row]) == pytest.approx(scales[q].item(), abs=1e-10)
            with torch.no_grad():
                h = model.eval()(x)[0]
            for c in y.unique():
                mean = (h / h.norm(dim=1, keepdim=True))[y == c].mean(0)
                sums[c] += int((y == c).sum()) * oracle.unit(mean)
                counts[c] += int((y == c).sum())
        for c in range(4):
            if counts[c] > 0:
                head[c] = oracle.unit(0.7 * head[c] + 0.3 * oracle.unit(sums[c] / counts[c]))
        mean = oracle.average([deepcopy(m.state_dict()) for m in models], [1] * len(models))
        with torch.no_grad():
            together = sum(s.item() for s in scales) / len(scales)
            for model, scale in zip(models, scales, strict=True):
                oracle.put(model, mean)
                scale.fill_(together)
        same(server_model(simulation, outcome.server), mean)
        torch.testing.assert_close(tensor(outcome.server, "head"), head, rtol=1e-7, atol=1e-7)


def test_the_output_layer_begins_with_orthonormal_rows():
    simulation, *_ = pair(FedNH(), "small")
    head = tensor(FedNH().begin(simulation.task, generator(SEED, "server")), "head")
    torch.testing.assert_close(head @ head.T, torch.eye(4))


def test_a_class_that_nobody_has_keeps_its_row():
    """With one client, which lacks class 3."""
    simulation, *_ = pair(FedNH(rho=0.2), "small", sizes=(24,), rounds=2)
    before = tensor(FedNH().begin(simulation.task, generator(SEED, "server")), "head")
    *_, last = played(simulation)
    after = tensor(last.server, "head")
    torch.testing.assert_close(after[3], before[3].double(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(after[0], before[0].double(), atol=1e-2)
    torch.testing.assert_close(after.norm(dim=1), torch.ones(4, dtype=torch.float64))


def test_head_inference_is_the_nearest_row():
    simulation, models, _, theirs, _ = pair(FedNH(), "small", rounds=4)
    *_, last = played(simulation)
    for q, (x, y) in enumerate(theirs):
        oracle.put(models[q], server_model(simulation, last.server))
        with torch.no_grad():
            cosine = F.normalize(models[q].eval()(x)[0], dim=1) @ tensor(last.server, "head").T
        assert float(last.scores.accuracy["head"][q]) == pytest.approx(float((cosine.argmax(1) == y).double().mean()))
