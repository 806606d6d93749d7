"""FedProto: class means are exchanged, and embeddings pulled towards them."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Interval
from torch import Tensor

from fedsap import losses
from fedsap.message import Message, PerClass, table
from fedsap.methods.method import Local, Method, Pass, Round, Step, Task, option
from fedsap.models.network import Features
from fedsap.prototypes import combine_replies, send
from fedsap.robust import Rule, clash


@dataclass(frozen=True)
class FedProto(Method):
    """L = L_CE + align * L_Proto, with L_Proto the distance of embeddings to the global prototype of their class."""

    name: ClassVar[str] = "fedproto"
    title: ClassVar[str] = "FedProto"
    paper: ClassVar[str] = "Tan et al. 2022"
    sends: ClassVar[str] = "up: a prototype per own class; down: the bank"
    means_only: ClassVar[bool] = True

    align: float = option(1.0, "weight of the distance to the prototypes")
    reduction: Literal["mean", "sum"] = option("mean", "squared distance as mean over the d dimensions, or their sum")
    proto_pass: Pass = option("running", "local prototypes: running along with the last epoch, or in a pass afterwards")
    weighted: bool = option(False, "weigh local prototypes by their number of samples, or all alike")
    rule: Rule = option("mean", "the server's mean of local prototypes, one by `confidence`, or a centre few can move")
    trim: Annotated[float, Interval(ge=0, lt=0.5)] = option(0.2, "share left out at either end with rule = trimmed")
    limit: float = option(0.0, "shorten prototypes to so many times the clients' median length; 0: not")

    def degenerate(self) -> str | None:
        if self.align == 0:
            return "with align = 0 FedProto is local training"
        return clash(self.rule, weighted=self.weighted)

    def broadcast(self, server: Message, t: int) -> Message:
        return server

    def loss(self, step: Step) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(step)}
        if "bank" in step.down:
            bank = table(step.down, "bank")
            terms["align"] = self.align * losses.align(step.out.h, step.y, bank, self.reduction)
        return terms

    def represent(self, out: Features) -> dict[str, Tensor]:
        return super().represent(out) | ({"probability": out.logits.softmax(-1)} if self.rule == "confidence" else {})

    def passes(self) -> dict[str, Pass]:
        return {"proto": self.proto_pass} | ({"probability": "eval"} if self.rule == "confidence" else {})

    def reply(self, local: Local) -> Message:
        return send(local.means["proto"], local.counts if self.weighted else None, local.means.get("probability"))

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        bank = combine_replies(replies, self.bank(server), rule=self.rule, trim=self.trim, limit=self.limit)
        return {"bank": bank}

    def bank(self, server: Message) -> PerClass | None:
        return table(server, "bank") if "bank" in server else None
