"""MOON: FedAvg with a contrast that draws representations to those of the received model, away from the previous."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsap.message import Message, under
from fedsap.methods.fedavg import FedAvg
from fedsap.methods.method import Forward, Phase, State, Step, Task, option
from fedsap.models import layers, layout
from fedsap.models.network import Features, Network, Weights


@dataclass(frozen=True)
class MOON(FedAvg):
    """L = L_CE + mu * L_con with, for z of the trained model, z' of the received one, z" of the client's last one,

    L_con = -1/B sum_i log( e^(cos(z_i, z'_i) / tau) / (e^(cos(z_i, z'_i) / tau) + e^(cos(z_i, z"_i) / tau)) )

    z = W2 relu(W1 h + b1) + b2 is a projection of the embedding, which the output layer reads. Only z has a gradient.
    """

    name: ClassVar[str] = "moon"
    title: ClassVar[str] = "MOON"
    paper: ClassVar[str] = "Li et al. 2021"
    sends: ClassVar[str] = "up: all weights, the projection's too; down: their mean"
    averaged: ClassVar[tuple[str, ...]] = ("model", "projection")

    mu: float = option(1.0, "weight of the contrast")
    tau: float = option(0.5, "its temperature")
    projection: int = option(256, "size of z; 0: no projection, z is the embedding")

    def degenerate(self) -> str | None:
        return "with mu = 0 MOON is FedAvg" if self.mu == 0 else None

    def init(self, task: Task, generator: torch.Generator) -> State:
        state, d, size = super().init(task, generator), task.network.dim, self.projection
        shapes = {"project1": (d, d), "project2": (size, d), "output": (task.classes, size)} if size else {}
        named = {f"{k}.{what}": s for k, v in shapes.items() for what, s in (("weight", v), ("bias", v[:1]))}
        projection = layout.uniform(named, generator)
        return {**state, "projection": projection, "last": state["model"], "last projection": projection}

    def private(self, network: Network) -> frozenset[str]:
        """With a projection, the network's own output layer has no part in anything."""
        return super().private(network) | set(network.head_names if self.projection else ())

    def receive(self, state: State, down: Message) -> State:
        last = {"last": state["model"], "last projection": state["projection"]}
        return {**super().receive(state, down), **last}

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.loss, trains=self.averaged),)

    def loss(self, step: Step) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(step, self.logits(step.out, step.state, step.forward))}
        received = under("model", step.down)
        if received:  # in round 1 there is none
            with torch.no_grad():
                near = _z(under("projection", step.down), step.forward(step.state["model"] | received, train=False))
                far = _z(step.state["last projection"], step.forward(step.state["last"], train=False))
            z = _z(step.state["projection"], step.out)
            alike = torch.stack([F.cosine_similarity(z, other, dim=-1) for other in (near, far)], -1)
            terms["contrast"] = -self.mu * (alike / self.tau).log_softmax(-1)[..., 0].mean(1)
        return terms

    def logits(self, out: Features, state: State, forward: Forward) -> Tensor:
        return _layer(state["projection"], "output", _z(state["projection"], out)) if self.projection else out.logits


def _z(projection: Weights, out: Features) -> Tensor:
    return _layer(projection, "project2", F.relu(_layer(projection, "project1", out.h))) if projection else out.h


def _layer(weights: Weights, name: str, x: Tensor) -> Tensor:
    return layers.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
