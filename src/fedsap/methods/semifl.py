"""SemiFL: the received model labels the pool once a round; clients train on that, then on their labelled samples."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsap import losses, pseudo
from fedsap.message import Message, tensor
from fedsap.methods.fedavg import FedAvg
from fedsap.methods.method import Choice, Phase, Round, Seen, Share, Start, Step, Task, View, option


@dataclass(frozen=True)
class SemiFL(FedAvg):
    """Before training, the received model gives every unlabelled sample its likeliest class c_u, with probability p_u.
    Training goes over samples u with p_u >= confidence, each beside any other sample v of the pool, by

    L = fix * -log softmax(z(strong x_u))[c_u]  +  mix * ( -l log softmax(z(m))[c_u] - (1 - l) log softmax(z(m))[c_v] )

    with m = l weak x_u + (1 - l) weak x_v and one l ~ Beta(alpha, alpha) for a batch; and after that over the labelled
    samples by L_CE. The server moves on with momentum: s <- server_momentum s + (mean_q w_q - w), w <- w + s.
    """

    name: ClassVar[str] = "semifl"
    title: ClassVar[str] = "SemiFL"
    paper: ClassVar[str] = "Diao et al. 2022"
    uses_pool: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = True

    fix: float = option(1.0, "weight of the cross-entropy of strong views with their pseudo-labels")
    mix: float = option(1.0, "weight of that of mixed images")
    alpha: float = option(0.75, "mixing proportions are drawn from Beta(alpha, alpha)")
    confidence: Share = option(0.95, "the least probability of a pseudo-label that counts")
    pseudo_classes: Literal["own", "all"] = option("own", "pseudo-labels are of the client's classes, or of any")
    server_momentum: Share = option(0.5, "how much of its last step the server's model makes again")

    def degenerate(self) -> str | None:
        if self.fix == self.mix == 0:
            return "with fix = mix = 0 SemiFL is FedAvg with momentum on the server"
        return "with alpha = 0 nothing is mixed; takes mix = 0 for that" if self.alpha == 0 else None

    def broadcast(self, server: Message, t: int) -> Message:
        return {k: v for k, v in server.items() if not k.startswith("step/")}

    def choose(self, start: Start) -> Choice:
        found = start.of_pool(self.guess)
        accepted = (found["p"] >= self.confidence) & start.valid
        return Choice(found["label"], accepted, other=start.valid if self.mix else None)

    def guess(self, seen: Seen) -> dict[str, Tensor]:
        """c_u and p_u of some samples."""
        label, p = pseudo.guess(seen.out.logits, seen.owned if self.pseudo_classes == "own" else None)
        return {"label": label, "p": p}

    def draw(self, rng: np.random.Generator, batches: int) -> dict[str, NDArray[np.float64]]:
        return {"share": rng.beta(self.alpha, self.alpha, batches)}

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.without_labels, pool=True), Phase(self.loss))

    def without_labels(self, step: Step) -> dict[str, Tensor]:
        """The two terms of the pool, [Q] each."""
        pool, model, classes = step.pool, step.state["model"], step.owned if self.ce == "own" else None
        assert pool is not None
        terms = {}
        if self.fix:
            z = step.forward(model, pool.strong()).logits
            terms["fix"] = self.fix * losses.pseudo(z, pool.labels, pool.valid, classes, "counted")
        if pool.other is not None:
            one, other, share = pool.weak(), pool.other.weak(), pool.drawn["share"]
            part = share.view(-1, 1, 1, 1, 1)
            z = step.forward(model, View(part * one.x + (1 - part) * other.x, one.noise)).logits
            first, second = (
                losses.pseudo(z, labels, pool.valid, classes, "counted") for labels in (pool.labels, pool.other.labels)
            )
            terms["mix"] = self.mix * (share * first + (1 - share) * second)
        return terms

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        made = super().combine(task, server, replies, t)
        for k in list(made) if server and self.server_momentum else ():
            if k.partition("/")[2] not in task.network.buffers:
                before, mean = tensor(server, k), tensor(made, k)
                last = tensor(server, f"step/{k}") if f"step/{k}" in server else torch.zeros_like(before)
                made[f"step/{k}"] = self.server_momentum * last + (mean - before)
                made[k] = before + tensor(made, f"step/{k}")
        return made
