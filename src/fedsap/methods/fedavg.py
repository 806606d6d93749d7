"""FedAvg: all weights are averaged."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedsap.message import Message, tensor, under
from fedsap.methods.method import Local, Method, Round, State, Task, option
from fedsap.models.network import Network


@dataclass(frozen=True)
class FedAvg(Method):
    """Every round the clients start from the mean of the weights they sent:

    w = sum_q n_q w_q / sum_q n_q        (n_q = 1 where `weighted` is off)
    """

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"
    paper: ClassVar[str] = "McMahan et al. 2017"
    sends: ClassVar[str] = "up: all weights; down: their mean"
    averaged: ClassVar[tuple[str, ...]] = ("model",)  # names in the state

    start: Literal["common", "independent"] = option("common", "round 1 begins from one network, or from one for each")
    weighted: bool = option(True, "weigh clients by their number of samples, or all alike")
    statistics: bool = option(True, "average BatchNorm's running statistics too, or leave each client its own")

    def private(self, network: Network) -> frozenset[str]:
        """Weights that every client keeps for itself."""
        return frozenset() if self.statistics else network.buffers

    def broadcast(self, server: Message, t: int) -> Message:
        return server

    def receive(self, state: State, down: Message) -> State:
        return {**state, **{name: state[name] | under(name, down) for name in self.averaged}}

    def reply(self, local: Local) -> Message:
        kept = self.private(local.task.network)
        sent: Message = {f"{s}/{k}": v for s in self.averaged for k, v in local.state[s].items() if k not in kept}
        return sent | {"samples": local.counts.sum(1).double()} if self.weighted else sent

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        n = tensor(replies, "samples") if self.weighted else torch.ones(len(t.clients), dtype=torch.float64)
        sent = {k: tensor(replies, k) for k in replies if k.split("/")[0] in self.averaged}
        return {k: torch.tensordot((n / n.sum()).to(v), v, 1) for k, v in sent.items()}
