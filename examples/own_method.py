"""A method of your own beside FedProto, on the built-in digits: prototypes are compared by angle, not by distance.

L = L_CE + align * 1/B sum_i (1 - cos(h_i, p_{y_i})),    p_c = mean of the local prototypes of class c

cd examples && fedsap run --method own_method:Angle --method fedproto --set train.rounds=20
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedsap.losses import of_labels
from fedsap.methods import Local, Message, Method, Pass, PerClass, Round, Step, Task, option, table
from fedsap.prototypes import combine


@dataclass(frozen=True)
class Angle(Method):
    name: ClassVar[str] = "angle"
    title: ClassVar[str] = "Angle"
    paper: ClassVar[str] = "yours"
    sends: ClassVar[str] = "up: a prototype per own class; down: the bank"

    align: float = option(3.0, "weight of the angle to the prototypes")

    def broadcast(self, server: Message, t: int) -> Message:  # noqa: ARG002
        return server

    def loss(self, step: Step) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(step)}
        if "bank" in step.down:  # round 1 has none
            prototype, known = of_labels(table(step.down, "bank"), step.y)  # [Q, B, d], [Q, B]
            angle = 1 - F.cosine_similarity(step.out.h, prototype, dim=-1)
            terms["angle"] = self.align * (angle * known).mean(1)
        return terms

    def passes(self) -> dict[str, Pass]:
        return {"proto": "eval"}

    def reply(self, local: Local) -> Message:
        return {"proto": local.means["proto"]}

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:  # noqa: ARG002
        return {"bank": combine(table(replies, "proto"))}

    def bank(self, server: Message) -> PerClass | None:
        return table(server, "bank") if "bank" in server else None
