"""FedProx: FedAvg with a term that keeps local weights near the received ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsap.message import Message
from fedsap.methods.fedavg import FedAvg
from fedsap.methods.method import State, Step, Task, option
from fedsap.models.network import Weights


@dataclass(frozen=True)
class FedProx(FedAvg):
    """L = L_CE + mu / 2 * ||w - w_t||^2, with w_t the weights that the client began the round with."""

    name: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "FedProx"
    paper: ClassVar[str] = "Li et al. 2020"
    sends: ClassVar[str] = "up: all weights; down: their mean"

    mu: float = option(1.0, "weight of the distance to the received weights")

    def degenerate(self) -> str | None:
        return "with mu = 0 FedProx is FedAvg" if self.mu == 0 else None

    def init(self, task: Task, generator: torch.Generator) -> State:
        state = super().init(task, generator)
        return {**state, "received": {k: v for k, v in state["model"].items() if k not in task.network.buffers}}

    def receive(self, state: State, down: Message) -> State:
        state = super().receive(state, down)
        return {**state, "received": {k: state["model"][k] for k in state["received"]}}

    def loss(self, step: Step) -> dict[str, Tensor]:
        near = distance(step.state["model"], step.state["received"])
        return {"ce": self.cross_entropy(step), "prox": self.mu / 2 * near}


def distance(weights: Weights, others: Weights) -> Tensor:
    """||w - v||^2 of each client, over the weights that are in `others`: [Q, ...] each -> [Q]

    >>> distance({"a": torch.ones(2, 3), "mean": torch.ones(2, 1)}, {"a": torch.zeros(2, 3)})
    tensor([3., 3.])
    """
    each = [(weights[k] - v).square().flatten(1).sum(1) for k, v in others.items()]
    return sum(each[1:], each[0])  # one after another: the same bits for any number of clients
