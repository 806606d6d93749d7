"""FedSAP: FedProto's exchange with a scheduled alignment weight and a cosine-softmax loss over the same prototypes."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from fedsap import losses
from fedsap.message import Message, PerClass, table
from fedsap.methods.method import Local, Method, Pass, Round, Step, Task, option
from fedsap.prototypes import combine_replies, send, steadied
from fedsap.schedules import Schedule, Shape


@dataclass(frozen=True)
class FedSAP(Method):
    """L = L_CE + lambda_t * L_Proto + proxy * L_Proxy, with lambda_t rising from 0 after round `align_start` to
    `align_top`
    at round `align_end`. Both terms use the bank received at the start of the round; in round 1 there is none."""

    name: ClassVar[str] = "fedsap"
    title: ClassVar[str] = "FedSAP"
    paper: ClassVar[str] = "Casado-Diez et al. 2026"
    sends: ClassVar[str] = "up: a prototype per own class; down: the bank"

    schedule_shape: Shape = option("linear", "how the alignment weight rises")
    align_start: int | None = option(None, "last round without alignment; unset: a fifth of the rounds (20 of 100)")
    align_end: int | None = option(None, "round from which the weight is full; unset: the last round")
    align_top: float = option(0.7, "the full alignment weight (the paper's M)")
    reduction: Literal["mean", "sum"] = option("mean", "squared distance as mean over the d dimensions, or their sum")
    proxy: float = option(1.0, "weight of the proxy loss; 0 leaves it out")
    proxy_start: int = option(1, "first round with the proxy loss (round 1 has no prototypes yet)")
    proxy_rise: int = option(0, "rounds over which the proxy loss comes to its full weight; 0: at once")
    proxy_scale: float = option(32.0, "s, by which cosines are multiplied before the softmax")
    proxy_classes: Literal["bank", "own"] = option(
        "bank", "the softmax runs over all prototypes, or the client's classes"
    )
    proto_pass: Pass = option(
        "eval", "local prototypes: in a pass after training, or running along with the last epoch"
    )
    weighted: bool = option(False, "weigh local prototypes by their number of samples, or all alike")
    agreement: float = option(0.0, "weigh them by exp(agreement * cosine with their plain mean); 0: not")
    inertia: Annotated[float, Field(ge=0, lt=1)] = option(0.0, "share of the old prototype in a new one of the bank")

    def degenerate(self) -> str | None:
        if self.align_top == 0 and self.proxy == 0:
            return "with align_top = 0 and proxy = 0 FedSAP is local training"
        return None

    def schedule(self, t: int, rounds: int) -> dict[str, float]:
        start = rounds // 5 if self.align_start is None else self.align_start
        end = rounds if self.align_end is None else self.align_end
        rise = Schedule(self.schedule_shape, start, end, self.align_top)
        come = min(max((t - self.proxy_start + 1) / (self.proxy_rise + 1), 0.0), 1.0)
        return {"align": rise(t), "proxy": self.proxy * come}

    def broadcast(self, server: Message, t: int) -> Message:
        return server

    def loss(self, step: Step) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(step)}
        if "bank" in step.down:
            bank, h = table(step.down, "bank"), step.out.h
            terms["align"] = step.weight["align"] * losses.align(h, step.y, bank, self.reduction)
            own = step.owned if self.proxy_classes == "own" else None
            terms["proxy"] = step.weight["proxy"] * losses.proxy(h, step.y, bank, self.proxy_scale, own)
        return terms

    def passes(self) -> dict[str, Pass]:
        return {"proto": self.proto_pass}

    def reply(self, local: Local) -> Message:
        return send(local.means["proto"], local.counts if self.weighted else None)

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        before = self.bank(server)
        return {"bank": steadied(combine_replies(replies, before, self.agreement), before, self.inertia)}

    def bank(self, server: Message) -> PerClass | None:
        return table(server, "bank") if "bank" in server else None
