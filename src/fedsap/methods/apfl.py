"""APFL: every client mixes FedAvg's model with one of its own, in a proportion that it learns."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsap.message import Message
from fedsap.methods.fedavg import FedAvg
from fedsap.methods.method import Forward, Phase, Share, State, Step, Task, option
from fedsap.models.network import Features, Weights


@dataclass(frozen=True)
class APFL(FedAvg):
    """With the model w of FedAvg, a personal one v and the mixture m = a v + (1 - a) w, in every step

    w <- w - lr grad_w L_CE(w)        v <- v - lr grad_v L_CE(m)        a <- a - lr <v - w, grad L_CE(m)>

    all from the values before the step. The mixture is judged. Or, with `mix` = logits, m stands for a network with
    the logits a v(x) + (1 - a) w(x).
    """

    name: ClassVar[str] = "apfl"
    title: ClassVar[str] = "APFL"
    paper: ClassVar[str] = "Deng et al. 2020"
    sends: ClassVar[str] = "up: all weights; down: their mean"

    alpha: Share = option(0.5, "share of the personal model in the mixture, at first")
    adaptive: bool = option(True, "let every client learn its share, or leave it as it is")
    mix: Literal["weights", "logits"] = option("weights", "mix the two models' weights (paper), or their logits (code)")

    def degenerate(self) -> str | None:
        if self.adaptive or 0 < self.alpha < 1:
            return None
        return f"with alpha = {self.alpha:g} for good APFL is {'FedAvg' if self.alpha == 0 else 'local training'}"

    def init(self, task: Task, generator: torch.Generator) -> State:
        state = super().init(task, generator)
        model, buffers = state["model"], task.network.buffers
        personal = {k: v for k, v in model.items() if k not in buffers}
        statistics = {k: v for k, v in model.items() if k in buffers}
        return {
            **state,
            "personal": personal,
            "statistics": statistics,
            "mix": {"alpha": torch.tensor(self.alpha)},
        }

    def receive(self, state: State, down: Message) -> State:
        return {**super().receive(state, down), "mix": {"alpha": state["mix"]["alpha"].clamp(0, 1)}}

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.loss, trains=("model", "personal", *(["mix"] if self.adaptive else []))),)

    def loss(self, step: Step) -> dict[str, Tensor]:
        logits = step.forward(self.model(step.state)).logits
        if self.mix == "logits":
            logits = _mix(step.state, logits, step.out.logits.detach())
        return {"ce": self.cross_entropy(step), "personal": self.cross_entropy(step, logits)}

    def model(self, state: State) -> Weights:
        """The mixture, in which w is a constant; or, where logits are mixed, the personal model."""
        if self.mix == "logits":
            return state["statistics"] | state["personal"]
        mixed = {k: _mix(state, v, state["model"][k].detach()) for k, v in state["personal"].items()}
        return state["statistics"] | mixed

    def logits(self, out: Features, state: State, forward: Forward) -> Tensor:
        return out.logits if self.mix == "weights" else _mix(state, out.logits, forward(state["model"]).logits)


def _mix(state: State, personal: Tensor, shared: Tensor) -> Tensor:
    """a v + (1 - a) w, [Q, ...] each; outside [0, 1] the share counts as the nearer end."""
    alpha = state["mix"]["alpha"].clamp(0, 1).view(-1, *[1] * (personal.dim() - 1))
    return alpha * personal + (1 - alpha) * shared
