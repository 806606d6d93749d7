"""ProtoFSSL against its equations, one client, one batch and one sample after another."""

import pytest
import torch

import oracle
import pooled
from federations import SEED, pair, played, same, server_model, weights_of
from fedsap.message import table
from fedsap.methods import ProtoFSSL
from fedsap.training.streams import generator


def probabilities(h, rows, among, mean):
    """softmax( -|h - P_c|^2 ) over the classes of `among` that have a prototype."""
    scale = len(h) if mean else 1
    near = {c: -(h - rows[c]).square().sum() / scale for c in among if c in rows}
    p = torch.softmax(torch.stack(list(near.values())), 0)
    return dict(zip(near, p, strict=True))


def pseudo_label(h, helpers, bank, among, method):
    votes = [probabilities(h, bank | one, among, method.reduction == "mean") for one in helpers]
    mean = {c: sum(v[c] for v in votes) / len(votes) for c in votes[0]}
    sharp = {c: p ** (1 / method.temperature) for c, p in mean.items()}
    return {c: p / sum(sharp.values()) for c, p in sharp.items()}


def episode(h, y, support, bank):
    """Prototypes of a batch, and the places of its queries."""
    first, queries = {}, []
    for i, c in enumerate(y.tolist()):
        if len(first.setdefault(c, [])) < support:
            first[c].append(h[i])
        else:
            queries.append(i)
    return bank | {c: sum(v) / len(v) for c, v in first.items()}, queries


@pytest.mark.parametrize(
    ("network", "sizes", "options"),
    [
        ("small", (19, 40, 33, 5), {}),
        ("small", (19, 40, 33, 5), {"support": 2, "reduction": "mean", "pseudo_classes": "all", "ce": "own"}),
        ("resnet18", (9, 17), {"reduction": "mean"}),
    ],
)
def test_rounds_are_those_of_the_slow_loop(network, sizes, options):
    method, lr = ProtoFSSL(helpers=3, weight=0.6, temperature=0.4, **options), 0.02 if network == "small" else 0.002
    simulation, models, mine, pool, owned = pooled.federation(method, network, sizes, lr=lr)
    bank, helpers, mean = {}, [], method.reduction == "mean"
    for outcome in played(simulation, every=9):
        t, local = outcome.t, []
        for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
            labels = owned[q] if method.pseudo_classes == "own" else range(4)
            if t in pool.rounds:
                with torch.no_grad():
                    h = model.eval()(pooled.survey(pool, q, t))[0]
                made = [pseudo_label(v, helpers, bank, labels, method) for v in h]
                pooled.check_report(outcome, q, pool, [(max(p, key=p.get), True) for p in made])
            optimiser, history = oracle.sgd(model.train().parameters(), lr), []
            for b, beside in pooled.epoch(pool, q, t, 0, len(y), range(len(pool.lists[q]))):
                h = model(x[b])[0]
                rows, queries = episode(h, y[b], method.support, bank)
                total = h.sum() * 0
                for i in queries:
                    p = probabilities(h[i], rows, owned[q] if method.ce == "own" else range(4), mean)
                    total = total - torch.log(p[int(y[b][i])])
                terms = {"ce": total / max(1, len(queries))}
                if t in pool.rounds:
                    h = model(beside.weak)[0]
                    total = h.sum() * 0
                    for v in h:
                        target = pseudo_label(v.detach(), helpers, bank, labels, method)
                        p = probabilities(v, rows, labels, mean)
                        total = total - sum(target[c] * torch.log(p[c]) for c in target)
                    terms["unlabelled"] = 0.6 * total / len(h)
                optimiser.zero_grad()
                sum(terms.values()).backward()
                optimiser.step()
                history.append(terms)
            pooled.check_terms(outcome, q, history)
            same(weights_of(simulation, q), model.state_dict())
            with torch.no_grad():
                local.append(oracle.means(model.eval()(x)[0], y))
        bank = oracle.combine(local)
        chosen = torch.randperm(len(sizes), generator=generator(SEED, "server", t=t))[:3].tolist()
        helpers = [local[i] for i in chosen]
        for i in range(min(3, len(sizes))):
            sent = table(outcome.server, f"helper {i}")
            assert sent.mask.nonzero().flatten().tolist() == sorted(helpers[i])
            for c, p in helpers[i].items():
                torch.testing.assert_close(sent.values[c], p, rtol=1e-8, atol=1e-8)
        heads = [deep(m, simulation) for m in models]
        body = pooled.average(models, sizes)
        for model, head in zip(models, heads, strict=True):
            oracle.put(model, head)  # stays with the client, and has no part in anything
        same(server_model(simulation, outcome.server), body)


def deep(model, simulation):
    """A copy of the output layer."""
    return {k: v.clone() for k, v in model.state_dict().items() if k in simulation.stack.network.head_names}


def test_the_head_is_the_nearest_prototype_of_the_bank():
    simulation, models, _, theirs, _ = pair(ProtoFSSL(), "small", rounds=2)
    *_, outcome = played(simulation)
    bank = table(outcome.server, "bank")
    weights = server_model(simulation, outcome.server)
    for q, (model, (x, y)) in enumerate(zip(models, theirs, strict=True)):
        oracle.put(model, weights)
        with torch.no_grad():
            h = model.eval()(x)[0]
        right = [int((v - bank.values).square().sum(1).argmin()) == int(c) for v, c in zip(h, y, strict=True)]
        assert bank.mask.all()
        assert float(outcome.scores.accuracy["head"][q]) == pytest.approx(sum(right) / len(right))


def test_a_helper_that_is_away_is_stood_in_for_by_the_mean():
    from fedsap.training.rounds import Presence

    simulation, *_ = pair(ProtoFSSL(helpers=4), "small", rounds=2)
    for outcome in played(simulation, presence=Presence(share=0.5)):
        bank = table(outcome.server, "bank")
        assert len(outcome.clients) == 2
        for i in (2, 3):
            assert torch.equal(table(outcome.server, f"helper {i}").values, bank.values)
