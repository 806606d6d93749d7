"""What can be added to FedSAP at the same communication, each part against its equation written out."""

import math

import pytest
import torch

from fedsap.config import resolve
from fedsap.errors import UserError
from fedsap.federation import build_federation, dataset
from fedsap.message import PerClass, table
from fedsap.methods import METHODS, FedProto, FedSAP
from fedsap.prototypes import send
from fedsap.training.rounds import play_all


def replies(seed, clients=5, classes=4, dim=3):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(clients, classes, generator=g) < 0.6
    mask[0] = True
    values = torch.randn(clients, classes, dim, generator=g, dtype=torch.float64) * mask[..., None]
    return PerClass(values, mask), torch.randint(1, 9, (clients, classes), generator=g)


def cosine(u, v):
    return sum(a * b for a, b in zip(u, v, strict=True)) / math.sqrt(sum(a * a for a in u) * sum(b * b for b in v))


def by_hand(local, sharpness, counts, before, inertia):
    """Class by class and client by client."""
    bank = {}
    for c in range(local.mask.shape[1]):
        sent = {q: local.values[q, c].tolist() for q in range(len(local.mask)) if local.mask[q, c]}
        plain = [sum(p[i] for p in sent.values()) / len(sent) for i in range(3)]
        weight = {q: math.exp(sharpness * cosine(p, plain)) * (counts[q, c].item() if counts is not None else 1)
                  for q, p in sent.items()}  # fmt: skip
        total = sum(weight.values())
        new = [sum(weight[q] * p[i] for q, p in sent.items()) / total for i in range(3)]
        bank[c] = [inertia * old + (1 - inertia) * x for old, x in zip(before[c], new, strict=True)] if before else new
    return bank


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("sharpness", "inertia"), [(0.0, 0.0), (3.0, 0.0), (0.0, 0.4), (5.0, 0.9)])
def test_the_servers_mean(sharpness, inertia, weighted):
    method = FedSAP(agreement=sharpness, inertia=inertia, weighted=weighted)
    server, before = {}, None
    for round_ in range(3):
        local, counts = replies(round_)
        server = method.combine(None, server, send(local, counts if weighted else None), None)
        before = by_hand(local, sharpness, counts if weighted else None, before, inertia)
        for c, expected in before.items():
            assert server["bank"].values[c].tolist() == pytest.approx(expected, rel=1e-9)


def test_a_class_that_is_new_has_no_past_and_one_that_is_absent_keeps_its_prototype():
    one = torch.ones(1, 3, 2)
    first = PerClass(one * torch.tensor([1.0, 1.0, 0.0])[:, None], torch.tensor([[True, True, False]]))
    second = PerClass(one * torch.tensor([0.0, 3.0, 3.0])[:, None], torch.tensor([[False, True, True]]))
    method = FedSAP(inertia=0.5)
    server = method.combine(None, method.combine(None, {}, {"proto": first}, None), {"proto": second}, None)
    assert table(server, "bank").values[:, 0].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("start", "rise", "expected"),
    [(1, 0, [1, 1, 1, 1, 1]), (3, 0, [0, 0, 1, 1, 1]), (2, 3, [0, 0.25, 0.5, 0.75, 1]), (1, 1, [0.5, 1, 1, 1, 1])],
)
def test_the_proxy_loss_comes_gradually(start, rise, expected):
    method = FedSAP(proxy=2.0, proxy_start=start, proxy_rise=rise)
    assert [method.schedule(t, 5)["proxy"] for t in range(1, 6)] == pytest.approx([2.0 * e for e in expected])


def test_all_parts_together_cost_what_fedproto_costs():
    """Numbers and bytes of every client in every round, up and down."""
    parts = {"agreement": 4.0, "inertia": 0.5, "proxy_rise": 2, "proto_pass": "train"}
    keys = {"partition": {"clients": 5}, "train": {"rounds": 3}, "model": {"head_input": "cosine"}}
    sent = []
    for name, options in (("fedproto", {}), ("fedsap", parts)):
        (config,) = resolve({**keys, "method": {"name": name, **options}})
        f = build_federation([config], dataset(config))
        rounds = play_all(
            f.method, f.task, f.clients, servers={config.seed: None}, done=0, presence=f.presence, judge=f.judge
        )
        sent.append([(o[config.seed].up, o[config.seed].down) for o in rounds])
    assert sent[0] == sent[1]
    assert METHODS["fedproto"] is FedProto


def test_inertia_takes_a_share_below_one():
    with pytest.raises(UserError, match=r"method\.inertia: got 1"):
        resolve({"method": {"inertia": 1.0}})
