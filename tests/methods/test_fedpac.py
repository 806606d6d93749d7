"""FedPAC against its equations, one client and one batch after another, and its programme against brute force."""

from copy import deepcopy
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import oracle
from federations import SEED, pair, played, same, server_model, weights_of
from fedsap.message import table, tensor, under
from fedsap.methods import FedPAC
from fedsap.methods.fedpac import mixtures
from fedsap.training.rounds import Presence


def best(matrix):
    """argmin a^T M a over the simplex: on every face the minimum in closed form, the best of those inside."""
    n, found = len(matrix), None
    for size in range(1, n + 1):
        for face in combinations(range(n), size):
            inside = np.linalg.solve(matrix[np.ix_(face, face)], np.ones(size))
            a = np.zeros(n)
            a[list(face)] = inside / inside.sum()
            if (a >= 0).all() and (found is None or a @ matrix @ a < found @ matrix @ found):
                found = a
    return found


def matrix_of(h, v, i):
    """diag(v) + D_i with D_i[j, k] = sum_c <h_i,c - h_j,c , h_i,c - h_k,c>, entry by entry."""
    n = len(h)
    return np.array(
        [[float(((h[i] - h[j]) * (h[i] - h[k])).sum()) + (v[j] if j == k else 0) for k in range(n)] for j in range(n)]
    )


@pytest.mark.parametrize("clients", [1, 2, 5, 8])
@pytest.mark.parametrize("spread", [0.01, 0.3, 3.0])
def test_mixtures_are_the_best_of_all_faces(clients, spread):
    g = torch.Generator().manual_seed(clients)
    h = 1 + spread * torch.randn(clients, 3, 4, generator=g, dtype=torch.float64)
    v = torch.rand(clients, generator=g, dtype=torch.float64) + 0.1
    for i, row in enumerate(mixtures(h, v).numpy()):
        a = best(matrix_of(h, v.tolist(), i))
        a = np.where(a > 1e-3, a, 0)
        np.testing.assert_allclose(row, a / a.sum(), atol=1e-7)


def test_identical_clients_get_equal_weights():
    h = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)).expand(6, 3, 4)
    torch.testing.assert_close(mixtures(h, torch.full((6,), 0.2)), torch.full((6, 6), 1 / 6, dtype=torch.float64))
    torch.testing.assert_close(mixtures(h, torch.zeros(6)), torch.full((6, 6), 1 / 6, dtype=torch.float64))


def test_a_client_unlike_all_others_keeps_its_own():
    h = torch.zeros(3, 2, 4)
    h[2, 1] = 100.0
    shares = mixtures(h, torch.full((3,), 0.1))
    assert shares[2].tolist() == [0.0, 0.0, 1.0]
    assert shares[0].tolist() == pytest.approx([0.5, 0.5, 0.0])


@pytest.mark.parametrize(("network", "sizes", "head"), [("small", (19, 40, 33, 5), "fc2"), ("resnet18", (9, 17), "fc")])
def test_rounds_are_those_of_the_slow_loop(network, sizes, head):
    method = FedPAC(align=0.8, head_lr=0.02)
    simulation, models, mine, *_ = pair(method, network, sizes=sizes, rounds=3 if network == "small" else 2)
    bank = {}
    for outcome in played(simulation):
        h, v, protos = [], [], []
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            with torch.no_grad():
                features = model.eval()(x)[0]
            rows, variance = torch.zeros(4, features.shape[1], dtype=torch.float64), 0.0
            for c in y.unique():
                of = features[y == c]
                p, mean = len(of) / len(y), of.mean(0)
                rows[c] = p * mean
                variance += p * float(torch.trace(of.T @ of / len(of))) - p**2 * float(mean.square().sum())
            h.append(rows)
            v.append(variance / len(y))
            names = dict(model.train().named_parameters())
            parts = [[w for k, w in names.items() if k.startswith(f"{head}.") == first] for first in (True, False)]
            optimiser = oracle.sgd(parts[0], lr=0.02)
            for b in oracle.batches(SEED, q, outcome.t, 0, len(y), 8):
                optimiser.zero_grad()
                F.cross_entropy(model(x[b])[1], y[b]).backward()
                optimiser.step()
            optimiser = oracle.sgd(parts[1])
            for b in oracle.batches(SEED, q, outcome.t, 1, len(y), 8):
                f, logits, _ = model(x[b])
                loss = F.cross_entropy(logits, y[b])
                if bank:
                    loss = loss + 0.8 * F.mse_loss(f, torch.stack([bank[int(c)] for c in y[b]]))
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            same(weights_of(simulation, q), model.state_dict())
            with torch.no_grad():
                protos.append(oracle.means(model.eval()(x)[0], y))
        for c in {c for p in protos for c in p}:
            have = [(int((mine[q][1] == c).sum()), p[c]) for q, p in enumerate(protos) if c in p]
            bank[c] = sum(n * p for n, p in have) / sum(n for n, _ in have)
            torch.testing.assert_close(table(outcome.server, "bank").values[c], bank[c], rtol=1e-8, atol=1e-8)
        states = [deepcopy(m.state_dict()) for m in models]
        body = {k: w for k, w in oracle.average(states, sizes).items() if not k.startswith(f"{head}.")}
        same(server_model(simulation, outcome.server), body)
        for q, model in enumerate(models):
            a = best(matrix_of(h, v, q))
            a = np.where(a > 1e-3, a, 0)
            own = {k: w for k, w in oracle.average(states, a).items() if k.startswith(f"{head}.")}
            same({k: w[q] for k, w in under("head", outcome.server).items()}, own, 1e-7)
            oracle.put(model, body | own)


def test_who_has_not_answered_yet_gets_the_mean_layer_and_who_is_away_keeps_its_own():
    simulation, *_ = pair(FedPAC(), "small", rounds=4)
    before = None
    for outcome in played(simulation, presence=Presence(share=0.5)):
        heads = tensor(outcome.server, "head/fc2.bias")
        away = [c for c in range(4) if c not in outcome.clients]
        if before is None:
            rows = [[k.client for k in simulation.stack.keys].index(c) for c in outcome.clients]
            mean = simulation.state["model"]["fc2.bias"][rows].mean(0)
            for c in away:
                torch.testing.assert_close(heads[c], mean)
        else:
            assert torch.equal(heads[away], before[away])
        before = heads
