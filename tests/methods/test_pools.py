"""What holds for every method that learns from unlabelled samples, and what such methods are without them."""

from dataclasses import replace

import pytest
import torch

import pooled
from federations import SEED, played, same
from fedsap.engines.simulate import Simulation
from fedsap.message import under
from fedsap.methods import METHODS, FedAvg, FedMatch, FedPPL, FedSAP, FixMatch, ProtoFSSL, SemiFed, SemiFL
from fedsap.training.rounds import Ask
from training.test_pool import played as run

EVERY = {
    "fixmatch": FixMatch(confidence=0.42),
    "fedmatch": FedMatch(confidence=0.42, lr=0.02, refresh=2, inter=0.1, agree=0.1, l2=0.1),
    "semifl": SemiFL(confidence=0.42),
    "protofssl": ProtoFSSL(),
    "semifed": SemiFed(confidence=0.37),
    "fedppl": FedPPL(confidence=0.6, least=0.1, scale=3.0),
}
every = pytest.mark.parametrize("name", EVERY)


def test_every_such_method_is_here():
    assert sorted(EVERY) == sorted(name for name, m in METHODS.items() if m.needs_pool)


@every
def test_labels_of_the_pool_change_nothing_but_the_accuracy_of_pseudo_labels(name):
    one, other = run(EVERY[name]), run(EVERY[name], scramble=True)
    same_state(one, other)
    assert not torch.equal(one[0][-1].figures["right_all"], other[0][-1].figures["right_all"])


@every
def test_clients_train_in_groups_as_they_do_at_once(name):
    same_state(run(EVERY[name], together=4), run(EVERY[name], together=1))


def same_state(one, other):
    for a, b in zip(one[0], other[0], strict=True):
        assert all(torch.equal(a.terms[k], b.terms[k]) for k in a.terms)
        assert all(torch.equal(v, b.scores.accuracy[k]) for k, v in a.scores.accuracy.items())
    for n, weights in one[1].state.items():
        assert all(torch.equal(v, other[1].state[n][k]) for k, v in weights.items()), n


@every
@pytest.mark.parametrize(("network", "sizes"), [("small", (19, 40, 33, 5)), ("resnet18", (9, 17))])
def test_a_client_in_a_stack_of_its_own_replies_the_same(name, network, sizes):
    lr = 0.05 if network == "small" else 0.002
    simulation, *_ = pooled.federation(EVERY[name], network, sizes, lr=lr)
    stack, pool = simulation.stack, simulation.stack.pool
    alone = []
    for row in range(len(sizes)):
        mine = replace(pool, lists=pool.lists[row : row + 1], truth=pool.truth[row : row + 1])
        images = replace(stack.train, lists=stack.train.lists[row : row + 1])
        one = replace(stack, train=images, keys=stack.keys[row : row + 1], owned=stack.owned[row : row + 1], pool=mine)
        tests = replace(simulation.test, lists=simulation.test.lists[row : row + 1])
        alone.append(Simulation(one, tests, simulation.task))
    server = None
    for outcome in played(simulation, every=9):
        if server is None:  # what it was before the first round
            server = stack.method.begin(simulation.task, torch.Generator())
        for row, key in enumerate(stack.keys):
            down = stack.method.broadcast(server, outcome.t)
            own = stack.method.address(server, outcome.t, torch.tensor([key.client]))
            said = alone[row].train_all(outcome.t, {SEED: Ask(down, own, [key.client])})[SEED]
            at = outcome.clients.index(key.client)
            for term, value in said.terms.items():
                torch.testing.assert_close(value[0], outcome.terms[term][at], rtol=1e-7, atol=1e-9)
            for n, weights in alone[row].state.items():
                same({k: v[0] for k, v in weights.items()}, {k: v[row] for k, v in simulation.state[n].items()}, 1e-8)
        server = outcome.server


@every
def test_every_term_is_at_work_in_rounds_with_a_pool(name):
    outcomes, _ = run(EVERY[name])
    last = outcomes[-1]
    assert len(last.terms) > 1
    for term, values in last.terms.items():
        assert (values > 0).any(), term
    assert set(outcomes[0].terms) == {"ce"}
    assert 0 < float(last.figures["accepted"].mean()) <= 1


@every
def test_statistics_may_stay_with_the_clients(name):
    simulation, *_ = pooled.federation(
        replace(EVERY[name], statistics=False), "resnet18", (9, 17), lr=0.002, rounds=1, more=2
    )
    *_, last = played(simulation, every=9)
    assert all(torch.isfinite(v).all() for v in last.terms.values())
    assert not [k for k in last.server if k.startswith(("model/", "sent/")) and "running" in k]
    one, other = simulation.state["model"]["bn1.running_mean"]
    assert not torch.allclose(one, other)


def server_of(method, more=0):
    """The shared weights after two rounds, and `more` with a pool."""
    simulation, *_ = pooled.federation(method, rounds=2, more=more)
    *_, last = played(simulation, every=9)
    return under("model", last.server)


@pytest.mark.parametrize(
    "method",
    [FixMatch(), SemiFL(server_momentum=0.0), SemiFed(), FedPPL(), FedMatch(lr=0.05, supervised=1.0)],
    ids=lambda m: m.name,
)
def test_in_rounds_without_a_pool_it_is_fedavg(method):
    one, other = server_of(method), server_of(FedAvg())
    assert all(torch.equal(v, one[k]) for k, v in other.items())


@pytest.mark.parametrize(
    "method",
    [
        FixMatch(consistency=0.0),
        FixMatch(confidence=1.0),
        FedPPL(consistency=0.0),
        SemiFed(consistency=0.0, agreement=0.0),
        SemiFed(consistency=0.0, confidence=1.0),
        FedMatch(lr=0.05, supervised=1.0, inter=0.0, agree=0.0, l2=0.0, l1=0.0),
    ],
    ids=lambda m: m.name,
)
def test_without_what_the_pool_brings_it_is_fedavg(method):
    one, other = server_of(method, more=3), server_of(FedAvg(), more=3)
    assert all(torch.equal(v, one[k]) for k, v in other.items())


@every
def test_with_a_pool_it_is_not_fedavg_and_the_first_layer_feels_it(name):
    one, other = server_of(EVERY[name], more=3), server_of(FedAvg(), more=3)
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])


def test_fedppl_with_one_threshold_is_fixmatch():
    one, other = server_of(FedPPL(confidence=0.42, least=0.42), more=3), server_of(FixMatch(confidence=0.42), more=3)
    assert all(torch.equal(v, one[k]) for k, v in other.items())


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (FixMatch(consistency=0.0), "FedAvg"),
        (FedMatch(inter=0.0, agree=0.0, l2=0.0, l1=0.0), "FedAvg"),
        (FedMatch(supervised=0.0), "nothing from labelled"),
        (FedMatch(helpers=0), "no helpers"),
        (SemiFL(fix=0.0, mix=0.0), "FedAvg"),
        (SemiFL(alpha=0.0), "mix = 0"),
        (ProtoFSSL(weight=0.0), "nothing from unlabelled"),
        (ProtoFSSL(support=0), "nothing to compare"),
        (SemiFed(consistency=0.0, agreement=0.0), "FedAvg"),
        (SemiFed(members=0), "agree"),
        (FedPPL(consistency=0.0), "FedAvg"),
        (FedPPL(least=0.95), "FixMatch"),
    ],
)
def test_options_that_make_another_method_are_named(method, words):
    assert words in method.degenerate()


@pytest.mark.parametrize("method", [FedSAP(align_start=0), *EVERY.values()], ids=lambda m: m.name)
def test_with_nothing_to_be_fed_a_client_looks_at_images_of_its_own(method):
    """Whose pool gives nothing depends on no one else's, BatchNorm's statistics included."""
    strict = replace(method, **({"confidence": 1.0} if hasattr(method, "confidence") else {}))
    if method.name == "fedsap":
        strict = replace(method, accept="confidence", confidence=1.0)
    found = []
    for other in (False, True):
        simulation, *_ = pooled.federation(strict, "resnet18", (9, 17), lr=0.002, rounds=1, more=1)
        pool = simulation.stack.pool
        if other:  # other images for the second row alone
            images = pool.images.clone()
            images[pool.lists[1]] = 255 - images[pool.lists[1]]
            simulation.stack = replace(simulation.stack, pool=replace(pool, images=images))
        list(played(simulation, every=9))
        found.append({k: v[0] for k, v in simulation.state["model"].items()})
    assert all(torch.equal(v, found[1][k]) for k, v in found[0].items())
