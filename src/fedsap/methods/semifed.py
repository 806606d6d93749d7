"""SemiFed, as far as its abstract goes: consistency, and pseudo-labels that several clients' models agree on."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsap import losses, pseudo
from fedsap.message import Message, tensor, under
from fedsap.methods.fedavg import FedAvg
from fedsap.methods.method import Choice, Round, Seen, Share, Start, Step, Task, option


@dataclass(frozen=True)
class SemiFed(FedAvg):
    """L = L_CE + consistency * mean_u KL( softmax(z(weak x_u)) || softmax(z(strong x_u)) )
             + agreement * mean_{u in A} -log softmax(z(strong x_u))[c_u]

    Before training, the received model and those that `members` other clients sent last look at a weak view of each
    unlabelled sample; it is in A, with the label c_u, if all of them guess c_u with at least `confidence`.
    """

    name: ClassVar[str] = "semifed"
    title: ClassVar[str] = "SemiFed"
    paper: ClassVar[str] = "Lin et al. 2021"
    sends: ClassVar[str] = "up: all weights; down: their mean, other clients' weights"
    uses_pool: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = True

    consistency: float = option(1.0, "weight of the divergence of strong from weak views")
    agreement: float = option(1.0, "weight of the pseudo-labels' cross-entropy")
    members: int = option(2, "other clients whose models have to agree")
    confidence: Share = option(0.95, "the least probability with which each of the models guesses")
    pseudo_classes: Literal["own", "all"] = option("own", "guesses are of the client's classes, or of any")

    def degenerate(self) -> str | None:
        if self.consistency == self.agreement == 0:
            return "with consistency = agreement = 0 SemiFed is FedAvg"
        return "with members = 0 nobody has to agree; takes at least 1" if self.members == 0 else None

    def broadcast(self, server: Message, t: int) -> Message:
        return {k: v for k, v in server.items() if k.startswith("model/")}

    def address(self, server: Message, t: int, clients: Tensor) -> Message:
        if "members" not in server:
            return {}
        chosen = tensor(server, "members")[clients]
        sent = under("sent", server)
        return {
            f"member {i}/{k}": v[chosen[:, i].to(v.device)] for i in range(chosen.shape[1]) for k, v in sent.items()
        }

    def choose(self, start: Start) -> Choice:
        found = start.of_pool(self.guess)
        accepted = (found["p"] >= self.confidence) & start.valid
        return Choice(torch.where(accepted, found["label"], -1), accepted, fed=start.valid)

    def guess(self, seen: Seen) -> dict[str, Tensor]:
        """The received model's guess, and the least probability that a model gives it; 0 if one guesses otherwise, or
        there are no other models."""
        among = seen.owned if self.pseudo_classes == "own" else None
        label, p = pseudo.guess(seen.out.logits, among)
        names = dict.fromkeys(k.partition("/")[0] for k in seen.down if k.startswith("member "))
        for name in names:
            theirs, sure = pseudo.guess(seen.forward(seen.state["model"] | under(name, seen.down)).logits, among)
            p = torch.where(theirs == label, torch.minimum(p, sure), 0.0)
        return {"label": label, "p": p if names else torch.zeros_like(p)}

    def loss(self, step: Step) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(step)}
        if step.pool is not None:
            with torch.no_grad():
                weak = step.forward(step.state["model"], step.pool.weak(), train=False).logits
            strong = step.forward(step.state["model"], step.pool.strong()).logits
            labels, valid, classes = step.pool.labels, step.pool.valid, step.owned if self.ce == "own" else None
            terms["consistency"] = self.consistency * losses.divergence(weak, strong, valid)
            terms["agreement"] = self.agreement * losses.pseudo(strong, labels, valid, classes, "counted")
        return terms

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        made = super().combine(task, server, replies, t)
        if t.number + 1 in task.pool_rounds:
            mean, theirs = under("model", made), under("model", replies)
            made |= {f"sent/{k}": torch.cat([v, mean[k][None]]) for k, v in theirs.items()}
            made["members"] = self.drawn(task.clients, t)
        return made

    def drawn(self, clients: int, t: Round) -> Tensor:
        """For each client, others that replied at random, [N, members]; where there are too few, R: the mean."""
        rank = torch.rand(clients, len(t.clients), generator=t.generator)
        rank[t.clients, torch.arange(len(t.clients))] = 2.0  # itself
        some = min(self.members, clients - 1)
        rank = torch.cat([rank, torch.ones(clients, some)], 1)  # the mean before itself
        return rank.argsort(1)[:, :some].clamp(max=len(t.clients))
