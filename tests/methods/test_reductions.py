"""Invariant 3: with some of its parts switched off, a method is another one, to the bit."""

import pytest
import torch

from federations import SEED, pair, played
from fedsap.methods import APFL, CFL, MOON, Ditto, FedAvg, FedMPS, FedPAC, FedProto, FedProx, FedRep, FedSAP, LocalOnly
from fedsap.training.rounds import Judge, Presence, play


def final(method, sizes=(19, 40, 33, 5)):
    simulation, *_ = pair(method, "small", sizes=sizes, rounds=4)
    rounds = play(
        method, simulation.task, simulation, seed=SEED, server=None, done=0, presence=Presence(), judge=Judge(every=9)
    )
    *_, last = rounds
    weights = simulation.stack.method.receive(simulation.state, _as_down(method, last.server, len(sizes)))["model"]
    return weights, last


def _as_down(method, server, clients):
    from fedsap.message import expand

    return expand(method.broadcast(server, 5), clients)


def same(one, other):
    return all(torch.equal(one[k], other[k]) for k in one)


def test_fedsap_with_constant_weight_and_no_proxy_is_fedproto():
    sap = FedSAP(schedule_shape="constant", align_top=0.7, proxy=0.0, proto_pass="running")
    assert same(final(sap)[0], final(FedProto(align=0.7, proto_pass="running"))[0])


def test_fedproto_without_weight_is_local_training():
    assert same(final(FedProto(align=0.0))[0], final(LocalOnly())[0])


def test_fedproto_with_weight_is_not_local_training():
    assert not same(final(FedProto(align=1.0))[0], final(LocalOnly())[0])


def test_one_client_of_fedavg_trains_alone():
    assert same(final(FedAvg(), sizes=(40,))[0], final(LocalOnly(), sizes=(40,))[0])


def test_fedmps_without_its_terms_is_local_training():
    assert same(final(FedMPS(high=0.0, low=0.0, soft=0.0))[0], final(LocalOnly())[0])


@pytest.mark.parametrize("method", [FedProx(mu=0.0), Ditto(), MOON(mu=0.0, projection=0)])
def test_what_is_shared_is_fedavgs_without_the_terms_of(method):
    """Of Ditto it always is: its personal model changes nothing for others."""
    assert same(final(method)[1].server, final(FedAvg())[1].server)


@pytest.mark.parametrize("method", [FedProx(), MOON(projection=0)])
def test_with_its_term_it_is_not_fedavg(method):
    assert not same(final(method)[1].server, final(FedAvg())[1].server)


@pytest.mark.parametrize("mix", ["weights", "logits"])
def test_apfl_with_the_whole_share_is_local_training(mix):
    simulation, *_ = pair(APFL(alpha=1.0, adaptive=False, mix=mix), "small", rounds=4)
    *_, last = played(simulation)
    assert same(final(LocalOnly(start="common"))[0], simulation.state["personal"])
    alone = final(LocalOnly(start="common"))[1].scores
    assert torch.equal(last.scores.accuracy["head"], alone.accuracy["head"])


@pytest.mark.parametrize("method", [FedProto(align=0.5), FedSAP(align_start=0), FedMPS()])
def test_every_term_is_at_work_from_round_two_and_reaches_the_first_layer(method):
    """Invariant 7."""
    with_terms, last = final(method)
    for name, values in last.terms.items():
        assert (values > 0).all(), name
    assert not torch.equal(with_terms["conv1.weight"], final(LocalOnly())[0]["conv1.weight"])


def test_round_one_has_no_prototypes_to_align_with():
    simulation, *_ = pair(FedSAP(), "small", rounds=2)
    terms = simulation.train(1, {}, {}, [0, 1, 2, 3]).terms
    assert set(terms) == {"ce"}


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (FedProto(align=0.0), "local"),
        (FedSAP(align_top=0.0, proxy=0.0), "local"),
        (FedMPS(high=0.0, low=0.0, soft=0.0), "local"),
        (FedProx(mu=0.0), "FedAvg"),
        (MOON(mu=0.0), "FedAvg"),
        (Ditto(lam=0.0), "local"),
        (APFL(alpha=1.0, adaptive=False), "local"),
        (APFL(alpha=0.0, adaptive=False), "FedAvg"),
        (CFL(eps1=0.0), "FedAvg"),
        (FedRep(head_epochs=0), "never"),
        (FedPAC(head_epochs=0), "never"),
    ],
)
def test_options_that_make_another_method_are_named(method, words):
    """Invariant 8."""
    assert words in method.degenerate()
