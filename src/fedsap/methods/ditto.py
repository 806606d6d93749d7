"""Ditto: beside FedAvg's model every client trains one of its own, kept near the received one."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsap.methods.fedavg import FedAvg
from fedsap.methods.fedprox import distance
from fedsap.methods.method import Phase, State, Step, Task, option
from fedsap.models.network import Weights


@dataclass(frozen=True)
class Ditto(FedAvg):
    """The personal model v, which stays with the client and is the one judged, minimises

    L_CE(v) + lam / 2 * ||v - w_t||^2

    with w_t the received model; after that FedAvg goes on with w_t, as if v were not there.
    """

    name: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto"
    paper: ClassVar[str] = "Li et al. 2021"
    sends: ClassVar[str] = "up: all weights; down: their mean"

    lam: float = option(1.0, "weight of the personal model's distance to the received one")

    def degenerate(self) -> str | None:
        return "with lam = 0 Ditto's personal model is that of local training" if self.lam == 0 else None

    def init(self, task: Task, generator: torch.Generator) -> State:
        state = super().init(task, generator)
        return {**state, "personal": state["model"]}

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.personal, trains=("personal",)), Phase(self.loss))

    def personal(self, step: Step) -> dict[str, Tensor]:
        """The personal model's terms; "model" holds the received weights while it trains."""
        mine = {k: v for k, v in step.state["personal"].items() if v.requires_grad}
        return {"personal": self.cross_entropy(step), "near": self.lam / 2 * distance(step.state["model"], mine)}

    def model(self, state: State) -> Weights:
        return state["personal"]
