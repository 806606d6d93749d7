"""Invariant 1: the stack does what one client at a time does with plain torch.nn modules and torch.optim.SGD."""

import pytest
import torch

import oracle
from federations import SEED, pair, weights_of
from fedsap.methods import FedAvg, FedMPS, FedProto, FedSAP, LocalOnly
from fedsap.training.rounds import Judge, Presence, play

ROUNDS = 3
METHODS = {
    "local": (LocalOnly(), {}),
    "fedavg": (FedAvg(), {}),
    "fedproto": (FedProto(align=0.6), {"align": 0.6}),
    "fedsap": (
        FedSAP(align_start=0, align_end=3, align_top=0.9, proxy_scale=8.0),
        {"align": lambda t: 0.9 * t / 3, "proxy": 1.0, "scale": 8.0},
    ),
    "fedmps": (FedMPS(low=0.3), {"high": 1.0, "low": 0.3, "soft": 5.0, "temperature": 5.0}),
}


def play_both(name, network, dtype, **more):
    """Yields (outcome, oracle, simulation, test data, owned classes) after each round."""
    method, options = METHODS[name]
    simulation, models, mine, theirs, owned = pair(method, network, dtype=dtype, rounds=ROUNDS, **more)
    if name == "fedmps":
        head = simulation.stack.method.begin(simulation.task, _server_stream())
        names = simulation.stack.network.head_names
        layer = torch.nn.Linear(simulation.stack.network.dim, 4).to(dtype)
        layer.load_state_dict(
            {"weight": head[f"head/{names[0]}"].to(dtype), "bias": head[f"head/{names[1]}"].to(dtype)}
        )
        options = options | {"head": layer}
    slow = oracle.Federation(
        name,
        models,
        [x for x, _ in mine],
        [y for _, y in mine],
        seed=SEED,
        batch=8,
        lr=simulation.stack.hyper.lr,
        momentum=simulation.stack.hyper.momentum,
        epochs=simulation.stack.hyper.epochs,
        **options,
    )
    fast = play(
        method, simulation.task, simulation, seed=SEED, server=None, done=0, presence=Presence(), judge=Judge(every=1)
    )
    for outcome in fast:
        slow.round(outcome.t)
        yield outcome, slow, simulation, theirs, owned


def _server_stream():
    from fedsap.training.streams import generator

    return generator(SEED, "server")


def close(one, other, tolerance):
    assert one.shape == other.shape
    if not one.is_floating_point():
        return
    assert (one - other).norm() <= tolerance * (1 + other.norm()), float((one - other).norm())


def compare(outcome, slow, simulation, theirs, owned, tolerance):
    for row, client in enumerate(outcome.clients):
        for term, value in slow.losses[client].items():
            assert float(outcome.terms[term][row]) == pytest.approx(value, rel=100 * tolerance, abs=100 * tolerance), (
                term
            )
        if slow.method != "fedavg":
            state = slow.models[client].state_dict()
            for k, v in weights_of(simulation, client).items():
                close(v, state[k], tolerance)
    if slow.method == "fedavg":
        mean = slow.models[0].state_dict()
        for k, v in outcome.server.items():
            close(
                simulation.stack.network.export({k.removeprefix("model/"): v})[k.removeprefix("model/")],
                mean[k[6:]],
                tolerance,
            )
    for name, bank in slow.banks.items():
        table = outcome.server["bank" if name == "proto" else name]
        assert table.mask.nonzero().flatten().tolist() == sorted(bank)
        for c, p in bank.items():
            close(table.values[c], p, tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_small_network_in_float64(name):
    for outcome, *rest in play_both(name, "small", torch.float64):
        compare(outcome, *rest, 1e-9)
    assert outcome.t == ROUNDS


@pytest.mark.parametrize("name", METHODS)
def test_small_network_in_float32(name):
    for outcome, *rest in play_both(name, "small", torch.float32):
        compare(outcome, *rest, 1e-4)


@pytest.mark.parametrize("name", ["fedproto", "fedsap", "fedavg"])
def test_resnet_with_its_batch_statistics_in_float64(name):
    for outcome, *rest in play_both(name, "resnet18", torch.float64, sizes=(9, 17), lr=0.02):
        compare(outcome, *rest, 1e-9)


def test_several_local_epochs():
    for outcome, *rest in play_both("fedsap", "small", torch.float64, epochs=3):
        compare(outcome, *rest, 1e-9)


@pytest.mark.parametrize("name", ["fedproto", "fedsap"])
def test_accuracies_are_those_of_one_sample_at_a_time(name):
    for outcome, slow, _simulation, theirs, owned in play_both(name, "small", torch.float64):
        found = slow.accuracy([x for x, _ in theirs], [y for _, y in theirs], owned, slow.banks["proto"])
        for client, right in enumerate(found):
            for measure, share in right.items():
                assert float(outcome.scores.accuracy[measure][client]) == pytest.approx(share, abs=1e-6), measure


def test_a_row_of_the_stack_does_not_depend_on_the_others():
    method = FedProto(align=0.5)
    whole, *_ = pair(method, "small", rounds=2)
    for outcome in play(
        method, whole.task, whole, seed=SEED, server=None, done=0, presence=Presence(), judge=Judge(every=9)
    ):
        assert len(outcome.clients) == 4
    alone, *_ = pair(method, "small", rounds=2)
    server = {}
    for t in (1, 2):
        replies = [alone.train(t, method.broadcast(server, t), {}, [c]) for c in range(4)]
        from fedsap.message import PerClass

        tables = [r.message["proto"] for r in replies]
        joined = PerClass(torch.cat([p.values for p in tables]), torch.cat([p.mask for p in tables]))
        server = method.combine(alone.task, server, {"proto": joined}, None)
    for k, v in whole.state["model"].items():
        close(alone.state["model"][k], v, 1e-12)
