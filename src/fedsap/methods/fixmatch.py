"""FixMatch on FedAvg: what the network is sure of in a weak view is the label of a strong view of the same image."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsap import losses, pseudo
from fedsap.methods.fedavg import FedAvg
from fedsap.methods.method import Choice, Share, Start, Step, option


@dataclass(frozen=True)
class FixMatch(FedAvg):
    """L = L_CE + consistency * 1/U sum_u [p_u >= confidence] * -log softmax(z(strong x_u))[c_u]

    with the guess c_u = argmax_c softmax(z(weak x_u))[c] of the network as it stands, a constant, and its probability
    p_u; the sum runs over the U unlabelled samples of a batch, and only in rounds with such samples.
    """

    name: ClassVar[str] = "fixmatch"
    title: ClassVar[str] = "FixMatch"
    paper: ClassVar[str] = "Sohn et al. 2020"
    uses_pool: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = True

    consistency: float = option(1.0, "weight of the pseudo-labels' cross-entropy")
    confidence: Share = option(0.95, "the least probability of a guess that counts")
    pseudo_classes: Literal["own", "all"] = option("own", "guesses are of the client's classes, or of any")

    def degenerate(self) -> str | None:
        return "with consistency = 0 FixMatch is FedAvg" if self.consistency == 0 else None

    def guess(self, logits: Tensor, owned: Tensor) -> tuple[Tensor, Tensor]:
        """c_u and p_u, [Q, U] each."""
        return pseudo.guess(logits, owned if self.pseudo_classes == "own" else None)

    def choose(self, start: Start) -> Choice:
        """For the report: guesses are made anew in every step."""
        found = start.of_pool(
            lambda seen: dict(zip(("label", "p"), self.guess(seen.out.logits, seen.owned), strict=True))
        )
        return Choice(found["label"], (found["p"] >= self.confidence) & start.valid, fed=start.valid)

    def loss(self, step: Step) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(step)}
        if step.pool is not None:
            with torch.no_grad():
                weak = step.forward(step.state["model"], step.pool.weak(), train=False)
                label, p = self.guess(weak.logits, step.owned)
            strong = step.forward(step.state["model"], step.pool.strong())
            counted, classes = step.pool.valid & (p >= self.confidence), step.owned if self.ce == "own" else None
            terms["consistency"] = self.consistency * losses.pseudo(strong.logits, label, counted, classes, "all")
        return terms
