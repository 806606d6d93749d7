"""Clients with different networks and one bank: prototype methods need the same d and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from federations import data
from fedsap.engines.simulate import Simulation
from fedsap.message import joined, table
from fedsap.methods import FedMPS, FedProto, FedSAP
from fedsap.methods.method import Round, Task
from fedsap.models import CNN, ResNet18, Small
from fedsap.training.feed import Images, Key, Look
from fedsap.training.local import Hyper, Stack
from fedsap.training.streams import generator

SHAPE = (16, 16, 3)
NETWORKS = (Small(4, SHAPE, dim=20), CNN(4, SHAPE, dim=20), ResNet18(4, SHAPE, dim=20))


def alone(method, network, client, split, places):
    """A client as a stack of one."""
    owned = torch.zeros(1, 4, dtype=torch.bool)
    owned[0, split.labels[places]] = True
    images = Images.of(split, [places], torch.device("cpu"))
    look = Look((0.5,) * 3, (0.25,) * 3, "none", 1)
    stack = Stack(network, method, images, (Key(7, client),), owned, look, Hyper(batch=8, lr=0.01))
    return Simulation(stack, images, Task(network, 4, len(NETWORKS), 3))


def rounds(method, networks):
    """Three rounds of clients that know each other by their messages alone: loss terms by round and client, bank."""
    split, lists = data(np.random.default_rng(3), (24, 24, 24), 4, 16, 3)
    clients = [alone(method, n, c, split, lists[c]) for c, n in enumerate(networks)]
    server = method.begin(clients[0].task, generator(7, "server"))
    terms = []
    for t in (1, 2, 3):
        down = method.broadcast(server, t)
        found = [one.train(t, down, {}, [c]) for c, one in enumerate(clients)]
        terms.append([r.terms for r in found])
        info = Round(t, generator(7, "server", t=t), torch.arange(len(clients)))
        server = method.combine(clients[0].task, server, joined([r.message for r in found]), info)
    return terms, server


@pytest.mark.parametrize("method", [FedProto(), FedSAP(align_start=0)], ids=lambda m: m.name)
def test_different_networks_share_a_bank(method):
    terms, server = rounds(method, NETWORKS)
    bank = table(server, "bank")
    assert bank.values.shape == (4, 20)
    assert bank.mask.all()
    assert all("align" not in own for own in terms[0])
    for own in (*terms[1], *terms[2]):
        assert float(own["align"]) > 0


def test_early_maps_of_different_networks_do_not_meet():
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        rounds(FedMPS(), NETWORKS)


def test_another_dimension_does_not_meet():
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        rounds(FedProto(), (*NETWORKS[:2], replace(NETWORKS[2], dim=512)))
