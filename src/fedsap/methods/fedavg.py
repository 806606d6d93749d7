"""FedAvg: all weights are averaged."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedsap.message import Message, prefixed, tensor, under
from fedsap.methods.method import Local, Method, Round, State, Task, option


@dataclass(frozen=True)
class FedAvg(Method):
    """Every round the clients start from the mean of the weights they sent:

    w = sum_q n_q w_q / sum_q n_q        (n_q = 1 where `weighted` is off)
    """

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"
    paper: ClassVar[str] = "McMahan et al. 2017"
    sends: ClassVar[str] = "up: all weights; down: their mean"

    start: Literal["common", "independent"] = option(
        "common", "round 1 begins from one network, or averages networks that each began alone"
    )
    weighted: bool = option(True, "weigh clients by their number of samples, or all alike")
    statistics: bool = option(True, "average BatchNorm's running statistics too, or leave each client its own")

    def broadcast(self, server: Message, t: int) -> Message:
        return server

    def receive(self, state: State, down: Message) -> State:
        return {**state, "model": state["model"] | under("model", down)}

    def reply(self, local: Local) -> Message:
        model = local.state["model"]
        shared = model if self.statistics else {k: v for k, v in model.items() if not k.endswith(STATISTICS)}
        message = prefixed("model", shared)
        return message | {"samples": local.counts.sum(1).double()} if self.weighted else message

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        sent = under("model", replies)
        samples = tensor(replies, "samples") if self.weighted else torch.ones(len(t.clients), dtype=torch.float64)
        return prefixed("model", {k: torch.tensordot((samples / samples.sum()).to(v), v, 1) for k, v in sent.items()})


STATISTICS = ("running_mean", "running_var")
