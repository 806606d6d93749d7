"""FedPPL, as far as one sentence about it goes: pseudo-labels whose confidence threshold follows global prototypes."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsap import losses, pseudo
from fedsap.message import Message, PerClass, table
from fedsap.methods.fedavg import FedAvg
from fedsap.methods.method import Choice, Local, Round, Seen, Share, Start, Step, Task, When, option
from fedsap.prototypes import combine_replies, scores, send


@dataclass(frozen=True)
class FedPPL(FedAvg):
    """L = L_CE + consistency * 1/U sum_u [p_u >= tau_u] * -log softmax(z(strong x_u))[c_u]

    with the head's guess c_u of a weak view, its probability p_u, and a threshold that is the lower, the clearer the
    global prototypes p_c say the same:

    tau_u = confidence - (confidence - least) * softmax_c( scale cos(h_u, p_c) )[c_u]
    """

    name: ClassVar[str] = "fedppl"
    title: ClassVar[str] = "FedPPL"
    paper: ClassVar[str] = "Pan et al. 2025"
    sends: ClassVar[str] = "up: all weights, a prototype per own class; down: their means"
    uses_pool: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = True

    consistency: float = option(1.0, "weight of the pseudo-labels' cross-entropy")
    confidence: Share = option(0.95, "the threshold where prototypes speak against the guess")
    least: Share = option(0.5, "the threshold where they leave no doubt")
    scale: float = option(10.0, "what cosines with prototypes are multiplied by")
    pseudo_classes: Literal["own", "all"] = option("own", "guesses are of the client's classes, or of any")

    def degenerate(self) -> str | None:
        if self.consistency == 0:
            return "with consistency = 0 FedPPL is FedAvg with prototypes that nobody uses"
        if self.scale == 0 or self.least == self.confidence:
            return "with scale = 0 or least = confidence FedPPL is FixMatch"
        return None

    def guess(self, seen: Seen) -> dict[str, Tensor]:
        """c_u and p_u - tau_u of some samples; without prototypes tau_u is `confidence`."""
        among = seen.owned if self.pseudo_classes == "own" else None
        label, p = pseudo.guess(seen.out.logits, among)
        threshold = torch.full_like(p, self.confidence)
        if "bank" in seen.down:
            cosine = scores(seen.out.h, table(seen.down, "bank"), "cosine", among)
            near = (self.scale * cosine).clamp(min=losses.FAR).softmax(-1).gather(-1, label[..., None])[..., 0]
            threshold = threshold - (self.confidence - self.least) * near
        return {"label": label, "above": p - threshold}

    def choose(self, start: Start) -> Choice:
        """For the report: guesses are made anew in every step."""
        found = start.of_pool(self.guess)
        return Choice(found["label"], (found["above"] >= 0) & start.valid, fed=start.valid)

    def loss(self, step: Step) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(step)}
        if step.pool is not None:
            with torch.no_grad():
                weak = step.forward(step.state["model"], step.pool.weak(), train=False)
                found = self.guess(Seen(weak, step.down, step.owned, step.state, None, step.forward))
            strong = step.forward(step.state["model"], step.pool.strong())
            counted, classes = step.pool.valid & (found["above"] >= 0), step.owned if self.ce == "own" else None
            ce = losses.pseudo(strong.logits, found["label"], counted, classes, "all")
            terms["consistency"] = self.consistency * ce
        return terms

    def passes(self) -> dict[str, When]:
        return {"proto": "eval"}

    def reply(self, local: Local) -> Message:
        return super().reply(local) | send(local.means["proto"])

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        return super().combine(task, server, replies, t) | {"bank": combine_replies(replies, self.bank(server))}

    def bank(self, server: Message) -> PerClass | None:
        return table(server, "bank") if "bank" in server else None
