"""Invariant 6: what FedProto and FedSAP send up in a round when every client has exactly n classes."""

import pytest
import torch

from fedsap.message import Cost, cost, select
from fedsap.methods import FedMPS, FedProto, FedSAP
from fedsap.methods.method import Local, Task
from fedsap.models import CNN, ResNet18
from fedsap.prototypes import means

SETTINGS = {
    "FEMNIST n=3": (CNN(62, (128, 128, 1)), 62, 3, 3_000),
    "CIFAR-10 n=3": (ResNet18(10, (32, 32, 3)), 10, 3, 30_720),
    "CIFAR-100 n=10": (ResNet18(100, (32, 32, 3)), 100, 10, 102_400),
}


def replies(method, network, classes, ways):
    counts = torch.zeros(20, classes)
    for q in range(20):
        counts[q, [(q + i) % classes for i in range(ways)]] = 100
    found = {"proto": network.dim, "high": network.dim, "low": network.low_dim}
    local = {n: means(torch.ones(20, classes, d) * (counts > 0)[..., None], counts) for n, d in found.items()}
    return method.reply(Local(Task(network, classes, 20, 100), {}, {}, local, counts))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", [FedProto(), FedSAP()])
def test_numbers_up(setting, method):
    network, classes, ways, expected = SETTINGS[setting]
    sent = replies(method, network, classes, ways)
    total = sum((cost(select(sent, torch.tensor(q))) for q in range(20)), Cost(0, 0))
    assert total.numbers == expected
    assert total.bytes == 4 * expected + 2 * 20 * ways


def test_fedmps_sends_both_levels():
    network, classes, ways, _ = SETTINGS["CIFAR-10 n=3"]
    sent = replies(FedMPS(), network, classes, ways)
    assert cost(select(sent, torch.tensor(0))).numbers == 3 * (512 + 4096)
