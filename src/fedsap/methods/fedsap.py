"""FedSAP: FedProto's exchange with a scheduled alignment weight and a cosine-softmax loss over the same prototypes."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsap import losses
from fedsap.message import Message, PerClass, table
from fedsap.methods.method import Local, Method, Pass, Phase, Round, State, Step, Task, option
from fedsap.prototypes import combine_replies, send
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
    proxy_loss: Literal["softmax", "learned", "nca", "nca++", "anchor"] = option(
        "softmax", "over cosines with the prototypes, or with proxies trained from there; ProxyNCA(++), Proxy Anchor"
    )
    proxy_scale: float = option(32.0, "s, by which cosines (nca, nca++: squared distances) are multiplied")
    proxy_classes: Literal["bank", "own"] = option("bank", "the loss runs over all prototypes, or the client's classes")
    proto_pass: Pass = option(
        "eval", "local prototypes: in a pass after training, or running along with the last epoch"
    )
    weighted: bool = option(False, "weigh local prototypes by their number of samples, or all alike")

    def degenerate(self) -> str | None:
        if self.align_top == 0 and self.proxy == 0:
            return "with align_top = 0 and proxy = 0 FedSAP is local training"
        return None

    def schedule(self, t: int, rounds: int) -> dict[str, float]:
        start = rounds // 5 if self.align_start is None else self.align_start
        end = rounds if self.align_end is None else self.align_end
        rise = Schedule(self.schedule_shape, start, end, self.align_top)
        return {"align": rise(t), "proxy": self.proxy if t >= self.proxy_start else 0.0}

    def broadcast(self, server: Message, t: int) -> Message:
        return server

    def init(self, task: Task, generator: torch.Generator) -> State:
        state = super().init(task, generator)
        if self.proxy_loss == "learned":
            state["proxies"] = {"rows": torch.zeros(task.classes, task.network.dim)}
        return state

    def receive(self, state: State, down: Message) -> State:
        """Learned proxies begin every round at the bank."""
        if "proxies" in state and "bank" in down:
            return {**state, "proxies": {"rows": table(down, "bank").values}}
        return state

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.loss, trains=("model", "proxies") if self.proxy_loss == "learned" else ("model",)),)

    def loss(self, step: Step) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(step)}
        if "bank" in step.down:
            bank, h = table(step.down, "bank"), step.out.h
            terms["align"] = step.weight["align"] * losses.align(h, step.y, bank, self.reduction)
            terms["proxy"] = step.weight["proxy"] * self.separate(step, bank)
        return terms

    def separate(self, step: Step, bank: PerClass) -> Tensor:
        """L_Proxy, or what `proxy_loss` puts in its place."""
        h, y, own = step.out.h, step.y, step.owned if self.proxy_classes == "own" else None
        if self.proxy_loss == "nca":
            return losses.proxy_nca(h, y, bank, self.proxy_scale, own)
        if self.proxy_loss == "anchor":
            return losses.proxy_anchor(h, y, bank, self.proxy_scale, own)
        if self.proxy_loss == "learned":
            bank = PerClass(step.state["proxies"]["rows"], bank.mask)
        return losses.proxy(h, y, bank, self.proxy_scale * (2 if self.proxy_loss == "nca++" else 1), own)

    def passes(self) -> dict[str, Pass]:
        return {"proto": self.proto_pass}

    def reply(self, local: Local) -> Message:
        return send(local.means["proto"], local.counts if self.weighted else None)

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        return {"bank": combine_replies(replies, self.bank(server))}

    def bank(self, server: Message) -> PerClass | None:
        return table(server, "bank") if "bank" in server else None
