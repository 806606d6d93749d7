"""FedSAP with every kind of proxy loss, one client and one batch after another."""

import pytest
import torch
import torch.nn.functional as F

import oracle
from federations import SEED, pair, played, same, weights_of
from fedsap.message import table
from fedsap.methods import FedSAP

SCALE = 3.0
BY_HAND = {
    "softmax": lambda h, y, bank: oracle.proxy(h, y, bank, SCALE),
    "learned": lambda h, y, bank: oracle.proxy(h, y, bank, SCALE),
    "nca": lambda h, y, bank: oracle.proxy_nca(h, y, bank, SCALE),
    "nca++": lambda h, y, bank: oracle.proxy(h, y, bank, 2 * SCALE),
    "anchor": lambda h, y, bank: oracle.proxy_anchor(h, y, bank, SCALE),
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_rounds_are_those_of_the_slow_loop(kind):
    method = FedSAP(align_top=0.0, proxy=0.7, proxy_loss=kind, proxy_scale=SCALE)
    simulation, models, mine, *_ = pair(method, "small", sizes=(19, 33, 5), rounds=3)
    bank = {}
    for outcome in played(simulation):
        local = []
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            rows = {c: p.clone().requires_grad_() for c, p in bank.items()}
            optimiser = oracle.sgd([*model.train().parameters(), *(rows.values() if kind == "learned" else [])])
            for b in oracle.batches(SEED, q, outcome.t, 0, len(y), 8):
                h, logits, _ = model(x[b])
                loss = F.cross_entropy(logits, y[b])
                if bank:
                    loss = loss + 0.7 * BY_HAND[kind](h, y[b], rows)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            same(weights_of(simulation, q), model.state_dict())
            if kind == "learned" and bank:
                row = [k.client for k in simulation.stack.keys].index(q)
                for c, p in rows.items():
                    torch.testing.assert_close(simulation.state["proxies"]["rows"][row, c], p.detach())
                    assert not torch.equal(p.detach(), bank[c])
            with torch.no_grad():
                local.append(oracle.means(model.eval()(x)[0], y))
        bank = oracle.combine(local)
        for c, p in bank.items():
            torch.testing.assert_close(table(outcome.server, "bank").values[c], p)


def test_the_kinds_differ():
    losses = []
    for kind in BY_HAND:
        simulation, *_ = pair(FedSAP(align_start=0, proxy_loss=kind), "small", rounds=3)
        *_, last = played(simulation)
        losses.append(float(last.terms["ce"].sum()))
    assert len(set(losses)) == len(BY_HAND)
