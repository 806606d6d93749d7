"""FedMatch against its equations with sigma and psi as they are printed, one client and one batch after another."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import oracle
import pooled
from federations import SEED, played, same, server_model, weights_of
from fedsap.message import tensor, under
from fedsap.methods import FedMatch
from fedsap.training.rounds import Presence
from fedsap.training.streams import generator

START, EVERY = 3, 2  # the first round with a pool, and how often helpers come


class Parts:
    """A module whose weights are the sum of two parts; running statistics are the module's own."""

    def __init__(self, module, psi):
        self.module = module
        theta = {k: v.detach().clone() for k, v in module.named_parameters()}
        self.psi = {k: v.clone().requires_grad_() for k, v in psi.items()}
        self.sigma = {k: (v - psi[k]).requires_grad_() for k, v in theta.items()}

    def __call__(self, x, train=True, sigma=None, psi=None):
        sigma, psi = sigma or self.sigma, psi or self.psi
        return functional_call(self.module.train(train), {k: v + psi[k] for k, v in sigma.items()}, x)[1]

    def theta(self):
        return {k: (v + self.psi[k]).detach() for k, v in self.sigma.items()}

    def buffers(self):
        return {k: v.clone() for k, v in self.module.named_buffers() if v.is_floating_point()}


def detached(part):
    return {k: v.detach() for k, v in part.items()}


def vote(own, helpers, classes):
    """The class with most votes; where none has more than another, the client's own."""
    votes = [max(classes, key=lambda c: float(z[c])) for z in (own, *helpers)]
    most = max(votes.count(c) for c in votes)
    return votes[0] if votes.count(votes[0]) == most else next(c for c in votes if votes.count(c) == most)


def nearest(models, noise, q):
    """The other clients in the order of the distance of what their models say of the noise."""
    with torch.no_grad():
        said = [torch.softmax(m(noise, train=False)[0], 0) for m in models]
    return sorted((i for i in range(len(models)) if i != q), key=lambda i: float((said[i] - said[q]).norm()))


@pytest.mark.parametrize(
    ("network", "sizes", "sure", "more", "l2", "l1"),
    [
        ("small", (19, 40, 33, 5), 0.4, 5, 0.2, 0.01),
        ("small", (19, 40), 0.36, 2, 0.0, 0.01),
        ("resnet18", (9, 17), 0.34, 2, 0.0, 0.0),  # some of its weights never meet data, and are in neither sum
    ],
)
def test_rounds_are_those_of_the_slow_loop(network, sizes, sure, more, l2, l1):
    lr = 0.02 if network == "small" else 0.002
    method = FedMatch(
        supervised=1.5, inter=0.3, agree=0.4, l2=l2, l1=l1, confidence=sure, refresh=EVERY, share=0.3, lr=lr
    )
    simulation, plain, mine, pool, owned = pooled.federation(method, network, sizes, more=more)
    shape = simulation.stack.network.shape
    noise = torch.randn(1, *shape, generator=generator(SEED, "server")).double().permute(0, 3, 1, 2)
    models = [Parts(m, weights_of(simulation, q, "psi")) for q, m in enumerate(plain)]
    helpers, chosen, counted = [[] for _ in sizes], None, []
    for outcome in played(simulation, every=9):
        t = outcome.t
        if chosen is not None:  # frozen: the sigma that has just come, the psi that they have sent, and the statistics
            sigma = detached(models[0].sigma)
            made = {c: [{k: v + psi[k] for k, v in sigma.items()} for psi in some] for c, some in chosen.items()}
            helpers = [[one | models[q].buffers() for one in made[q]] for q in range(len(sizes))]
            chosen = None
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):

            def others(images, module=model.module, some=helpers[q]):
                with torch.no_grad():
                    return [functional_call(module.eval(), w, images)[1] for w in some]

            if t in pool.rounds:
                images = pooled.survey(pool, q, t)
                with torch.no_grad():
                    own = model(images, train=False)
                said = [
                    (vote(z, rest, owned[q]), pooled.guess(z, owned[q])[1] >= sure)
                    for z, *rest in zip(own, *others(images), strict=True)
                ]
                pooled.check_report(outcome, q, pool, said)
            optimiser, history = oracle.sgd([*model.sigma.values(), *model.psi.values()], lr), []
            for b, beside in pooled.epoch(pool, q, t, 0, len(y), range(len(pool.lists[q]))):
                terms = {"ce": 1.5 * F.cross_entropy(model(x[b], psi=detached(model.psi)), y[b])}
                if t in pool.rounds:
                    sigma = detached(model.sigma)
                    weak, strong = (model(v, sigma=sigma) for v in (beside.weak, beside.strong))
                    looks = zip(weak.detach(), *others(beside.weak), strict=True)
                    inter = agree = weak.sum() * 0
                    a = 0
                    for z, s, (seen, *rest) in zip(weak, strong, looks, strict=True):
                        ok = pooled.guess(seen, owned[q])[1] >= sure
                        counted.append(ok)
                        a += ok
                        if ok:
                            agree = agree + pooled.negative_log(s, vote(seen, rest, owned[q]))
                            inter = inter + sum(pooled.divergence(p, z) for p in rest) / max(1, len(rest))
                    terms["inter"], terms["agree"] = 0.3 * inter / max(1, a), 0.4 * agree / max(1, a)
                    terms["l2"] = l2 * sum((v - model.psi[k]).square().sum() for k, v in sigma.items())
                    terms["l1"] = l1 * sum(v.abs().sum() for v in model.psi.values())
                optimiser.zero_grad()
                terms["ce"].backward()
                rest = sum(v for k, v in terms.items() if k != "ce")
                if t in pool.rounds:
                    rest.backward()
                optimiser.step()
                history.append(terms)
            pooled.check_terms(outcome, q, history)
            same(weights_of(simulation, q), model.theta() | model.module.state_dict() | model.theta())
            same(weights_of(simulation, q, "psi"), detached(model.psi))
        if t >= START and (t - START) % EVERY == 0:
            psis = [deepcopy(detached(m.psi)) for m in models]
            chosen = {q: [psis[i] for i in nearest(models, noise, q)[:2]] for q in range(len(sizes))}
            told = simulation.stack.method.address(outcome.server, t + 1, torch.arange(len(sizes)))
            for q, some in chosen.items():
                for i, psi in enumerate(some):
                    sent = {k: v[q] for k, v in under(f"helper {i}", told).items()}
                    same(simulation.stack.network.export(sent), psi)
        mean = {name: oracle.average([detached(getattr(m, name)) for m in models], sizes) for name in ("sigma", "psi")}
        statistics = oracle.average([m.buffers() for m in models], sizes) if models[0].buffers() else {}
        for model in models:
            with torch.no_grad():
                for name, part in mean.items():
                    for k, v in part.items():
                        getattr(model, name)[k].copy_(v)
            oracle.put(model.module, statistics)
        same(server_model(simulation, outcome.server), models[0].theta() | statistics)
    assert 0 < sum(counted) < len(counted)


def test_sigma_and_psi_add_up_to_the_network_that_others_begin_with():
    simulation, *_ = pooled.federation(FedMatch())
    for k, v in simulation.state["psi"].items():
        torch.testing.assert_close(v * 6, simulation.state["model"][k])


def test_votes_that_split_leave_the_client_its_own():
    assert (
        vote(torch.tensor([0.0, 1.0, 2.0]), [torch.tensor([3.0, 0.0, 0.0]), torch.tensor([0.0, 3.0, 0.0])], range(3))
        == 2
    )
    from fedsap.models.network import Features

    z = torch.tensor([[[0.0, 1.0, 2.0]]])
    owned, state = torch.ones(1, 3, dtype=torch.bool), {"helpers": {"there": torch.ones(1)}}
    helper = [Features(z, torch.tensor([[v]]), z) for v in ([3.0, 0.0, 0.0], [0.0, 3.0, 0.0])]
    own = Features(z, z, z)
    assert FedMatch().guess(own, helper, state, owned)[0].item() == 2
    assert FedMatch().guess(own, [helper[0], helper[0]], state, owned)[0].item() == 0
    assert FedMatch().guess(own, [helper[0]], {"helpers": {"there": torch.zeros(1)}}, owned)[0].item() == 2


def test_helpers_come_at_their_rounds_and_are_of_clients_that_answer():
    """Who has not answered stands for the mean of the first that did."""
    simulation, *_ = pooled.federation(FedMatch(refresh=2), rounds=2, more=5)
    told = {}
    for outcome in played(simulation, every=9, presence=Presence(share=0.5)):
        told[outcome.t + 1] = simulation.stack.method.address(outcome.server, outcome.t + 1, torch.arange(4))
        if outcome.t == 3:
            away = [c for c in range(4) if c not in outcome.clients]
            sent = tensor(outcome.server, "theirs/fc2.bias")
            rows = {k.client: i for i, k in enumerate(simulation.stack.keys)}
            mean = simulation.state["psi"]["fc2.bias"][[rows[c] for c in outcome.clients]].mean(0)
            assert all(torch.allclose(sent[c], mean) for c in away)
    assert [t for t, own in told.items() if own] == [4, 6, 8]
