import pytest
import torch

from fedsap.config import resolve
from fedsap.engines.flower.protocol import Answer, Bad, Figures, packed_for
from fedsap.engines.flower.trust import check_record, checked, template
from fedsap.evaluate import MEASURES
from fedsap.federation import build_network, task_of
from fedsap.message import PerClass

RUN, OTHER = "a" * 32, "b" * 32


def expected(method="fedproto"):
    config = resolve({"method": {"weighted": True}} if method == "fedproto" else {}, [method])[0]
    network = build_network(config, 10, (8, 8, 1))
    return template(config.made_method(), task_of(config, network, 4, 0), (8, 8, 1))


def reply(classes=(1, 3), length=64, scale=1.0, dtype=torch.float32, counts=5.0):
    mask = torch.zeros(10, dtype=torch.bool)
    mask[list(classes)] = True
    values = torch.where(mask[:, None], scale * torch.ones(10, length, dtype=dtype), 0)
    return {"proto": PerClass(values, mask), "count": PerClass(counts * mask[:, None].to(torch.float32), mask)}


def look(message, owned=(1, 3), longest=1e6):
    return checked(packed_for("2", message), expected(), 2, owned, longest)


def test_what_the_method_sends_is_taken():
    assert look(reply()).keys() == {"proto", "count"}


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (reply(length=65), r"'proto' has torch.float32 \[65\] per class; takes torch.float32 \[64\]"),
        (reply(dtype=torch.float64), "takes torch.float32"),
        (reply(scale=float("nan")), "'proto' has numbers that are not finite"),
        (reply(scale=float("inf")), "'proto' has numbers that are not finite"),
        (reply(scale=1e6), "'proto' has a vector of length 8e"),
        (reply(classes=(1, 4)), r"'proto' has rows for the classes \[4\], which it does not hold"),
        (reply(counts=-3.0), "'count' has numbers of samples outside"),
        ({"proto": reply()["proto"]}, "it sent proto; takes count, proto"),
        (reply() | {"images": torch.zeros(3)}, "it sent count, images, proto"),
        (reply() | {"proto": torch.zeros(10, 64)}, "'proto' is not one row per class"),
        ({}, "it sent nothing"),
    ],
)
def test_anything_else_is_refused_with_a_reason(message, why):
    with pytest.raises(Bad, match=why):
        look(message)


@pytest.mark.parametrize("method", ["fedavg", "fedmps", "fedpac", "fednh", "moon", "apfl", "local"])
def test_a_template_is_what_the_method_really_sends(method):
    from fedsap.federation import build_federation, dataset
    from fedsap.message import select
    from fedsap.training.streams import generator

    config = resolve({"partition": {"clients": 2}}, [method])[0]
    federation = build_federation([config], dataset(config))
    task, clients = federation.task, federation.clients
    server = federation.method.begin(task, generator(config.seed, "server"))
    ids = torch.arange(2)
    down, own = federation.method.broadcast(server, 1), federation.method.address(server, 1, ids)
    sent = select(clients.train(1, down, own, [0, 1]).message, torch.tensor(1))
    held = federation.partitions[config.seed].classes[1]
    assert (
        checked(packed_for("1", sent), template(federation.method, task, (8, 8, 1)), 1, held, 1e6).keys() == sent.keys()
    )


def answer(**more):
    return Answer(**({"run": RUN, "round": 3, "clients": [1, 2], "terms": {"ce": [0.5, 0.5]}} | more))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (answer(run=OTHER), "an answer to round 3 of run bbbbbbbb; this is round 3 of aaaaaaaa"),
        (answer(round=2), "an answer to round 2"),
        (answer(clients=[1, 7], terms={}), "it speaks of the clients"),
        (answer(clients=[2, 1]), "it speaks of the clients"),
        (answer(clients=[1, 1]), "it speaks of the clients"),
        (answer(terms={"ce": [0.5]}), "takes a number for each"),
        (answer(terms={"ce": [0.5, float("nan")]}), "takes a number for each"),
        (answer(lost=[2]), "are lost"),
        (answer(judged=[1], figures=Figures(accuracy={"head": [0.5]})), "accuracies named head"),
        (answer(judged=[5], figures=Figures(accuracy={})), "accuracies of the clients"),
        (answer(judged=[1], figures=Figures(accuracy={m: [0.5] * 2 for m in MEASURES})), "2 numbers for 1 clients"),
    ],
)
def test_an_answer_to_something_else_is_refused(said, why):
    check_record(answer(), RUN, 3, [0, 1, 2], [1])
    with pytest.raises(Bad, match=why):
        check_record(said, RUN, 3, [0, 1, 2], [1])
