"""FedNH: a fixed output layer of unit vectors that the server owns and turns slowly towards the class means."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsap.message import Message, PerClass, tensor
from fedsap.methods.fedavg import FedAvg
from fedsap.methods.method import Forward, Local, Phase, Round, Share, State, Step, Task, When, option
from fedsap.models.network import Features, Network
from fedsap.prototypes import combine_replies, send


@dataclass(frozen=True)
class FedNH(FedAvg):
    """L = L_CE of the logits s cos(h, W_c), with W received and s learned; the body and s are averaged.

    W begins with orthonormal rows. With u_c the mean of the clients' class means of h / ||h||, each scaled to length
    one and weighed by its samples,

    W_c <- unit( rho W_c + (1 - rho) unit(u_c) )
    """

    name: ClassVar[str] = "fednh"
    title: ClassVar[str] = "FedNH"
    paper: ClassVar[str] = "Dai et al. 2023"
    sends: ClassVar[str] = "up: all weights but the output layer's, a prototype per own class; down: mean, output layer"
    averaged: ClassVar[tuple[str, ...]] = ("model", "scale")

    weighted: bool = option(False, "weigh clients by their number of samples, or all alike")
    rho: Share = option(0.9, "how much of the output layer stays in a round; 1: it never moves")
    scale: float = option(20.0, "s, by which cosines are multiplied, at first")
    learn_scale: bool = option(True, "train s, or leave it as it is")

    def begin(self, task: Task, generator: torch.Generator) -> Message:
        rows = torch.nn.init.orthogonal_(torch.empty(task.classes, task.network.dim), generator=generator)
        return {"head": F.normalize(rows, dim=-1)}

    def init(self, task: Task, generator: torch.Generator) -> State:
        head = {"rows": torch.zeros(task.classes, task.network.dim)}
        return {
            **super().init(task, generator),
            "scale": {"s": torch.tensor(self.scale)},
            "head": head,
        }

    def private(self, network: Network) -> frozenset[str]:
        return super().private(network) | set(network.head_names)

    def receive(self, state: State, down: Message) -> State:
        return {**super().receive(state, down), "head": {"rows": tensor(down, "head")}}

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.loss, trains=self.averaged if self.learn_scale else ("model",)),)

    def loss(self, step: Step) -> dict[str, Tensor]:
        return {"ce": self.cross_entropy(step, self.logits(step.out, step.state, step.forward))}

    def logits(self, out: Features, state: State, forward: Forward) -> Tensor:
        cosine = F.normalize(out.h, dim=-1) @ state["head"]["rows"].mT
        return state["scale"]["s"][:, None, None] * cosine

    def represent(self, out: Features) -> dict[str, Tensor]:
        return {"proto": F.normalize(out.h, dim=-1)}

    def passes(self) -> dict[str, When]:
        return {"proto": "eval"}

    def reply(self, local: Local) -> Message:
        means = local.means["proto"]
        unit = PerClass(F.normalize(means.values, dim=-1), means.mask)
        return super().reply(local) | send(unit, local.counts)

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        seen = combine_replies(replies).values  # zero where nobody has the class, which leaves its row as it is
        head = self.rho * tensor(server, "head").to(seen) + (1 - self.rho) * F.normalize(seen, dim=-1)
        return super().combine(task, server, replies, t) | {"head": F.normalize(head, dim=-1)}

    def bank(self, server: Message) -> PerClass | None:
        head = tensor(server, "head")
        return PerClass(head, torch.ones(len(head), dtype=torch.bool, device=head.device))
