"""ProtoFSSL: prototypical networks; unlabelled samples learn from how other clients' prototypes would classify them."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsap import losses
from fedsap.losses import FAR
from fedsap.message import Message, PerClass, table
from fedsap.methods.fedavg import FedAvg
from fedsap.methods.method import Choice, Forward, Local, Round, Seen, Start, State, Step, Task, When, option
from fedsap.models.network import Features, Network
from fedsap.prototypes import class_sums, combine_replies, means, send


@dataclass(frozen=True)
class ProtoFSSL(FedAvg):
    """With p(c | h; P) = softmax_c( -|h - P_c|^2 ), L = L_lab + weight * L_unlab and

    L_lab   = mean over the batch's labelled samples without the support of  -log p(y_i | h_i; P)
    L_unlab = mean over its unlabelled samples of  -sum_c t_u(c) log p(c | h_u; P)
    t_u(c) ~ ( 1/H sum_i p(c | h_u; P^i) )^(1 / temperature)

    P_c is the mean embedding of the support, the first `support` samples of class c in the batch; P^i are the
    prototypes of the H helpers. What a batch or a helper has no prototype of is taken from the mean of all clients'.
    """

    name: ClassVar[str] = "protofssl"
    title: ClassVar[str] = "ProtoFSSL"
    paper: ClassVar[str] = "Kim et al. 2022"
    sends: ClassVar[str] = (
        "up: all weights but the output layer's, a prototype per own class; down: their means, the helpers' prototypes"
    )
    uses_pool: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = True

    weight: float = option(0.3, "weight of the loss of unlabelled samples")
    support: int = option(1, "samples of each class in a batch that prototypes are made of")
    helpers: int = option(5, "clients whose prototypes everybody gets")
    temperature: float = option(0.5, "what pseudo-labels are sharpened by")
    reduction: Literal["mean", "sum"] = option("sum", "squared distance as sum over the d dimensions, or their mean")
    pseudo_classes: Literal["own", "all"] = option("own", "pseudo-labels are of the client's classes, or of any")

    def degenerate(self) -> str | None:
        if self.weight == 0:
            return "with weight = 0 ProtoFSSL learns nothing from unlabelled samples"
        if 0 in (self.support, self.helpers, self.temperature):
            return "with support, helpers or temperature = 0 there is nothing to compare with"
        return None

    def init(self, task: Task, generator: torch.Generator) -> State:
        bank = {"rows": torch.zeros(task.classes, task.network.dim), "there": torch.zeros(task.classes)}
        return {**super().init(task, generator), "bank": bank}

    def private(self, network: Network) -> frozenset[str]:
        return super().private(network) | set(network.head_names)

    def receive(self, state: State, down: Message) -> State:
        state = super().receive(state, down)
        if "bank" in down:
            bank = table(down, "bank")
            state["bank"] = {"rows": bank.values, "there": bank.mask.to(bank.values)}
        return state

    def near(self, h: Tensor, rows: PerClass, among: Tensor | None) -> Tensor:
        """-|h - P_c|^2, [Q, B, C]; far away where there is no prototype, or not in `among`."""
        apart = h.square().sum(-1)[..., None] - 2 * h @ rows.values.mT + rows.values.square().sum(-1)[:, None]
        there = rows.mask if among is None else rows.mask & among
        return (-apart / (h.shape[-1] if self.reduction == "mean" else 1)).masked_fill(~there[:, None], FAR)

    def target(self, h: Tensor, down: Message, owned: Tensor) -> Tensor:
        """log of t_u(c), up to a constant of each u, [Q, U, C]."""
        bank, among = table(down, "bank"), owned if self.pseudo_classes == "own" else None
        votes = [
            self.near(h, completed(table(down, name), bank), among).log_softmax(-1)
            for name in down
            if name.startswith("helper ")
        ]
        return torch.stack(votes).logsumexp(0) / self.temperature

    def choose(self, start: Start) -> Choice:
        def facts(seen: Seen) -> dict[str, Tensor]:
            return {"label": self.target(seen.out.h, seen.down, seen.owned).argmax(-1)}

        return Choice(start.of_pool(facts)["label"], start.valid) if "bank" in start.down else super().choose(start)

    def loss(self, step: Step) -> dict[str, Tensor]:
        h, y = step.out.h, step.y
        place = F.one_hot(y, step.owned.shape[1]).cumsum(1).gather(2, y[..., None])[..., 0]  # 1 for a class's first
        support = place <= self.support
        rows = means(*class_sums(h, y, step.owned.shape[1], support))
        if "bank" in step.down:
            rows = completed(rows, table(step.down, "bank"))
        logits = self.near(h, rows, step.owned if self.ce == "own" else None)
        terms = {"ce": losses.pseudo(logits, y, ~support, None, "counted")}
        if step.pool is not None and "bank" in step.down:
            out = step.forward(step.state["model"], step.pool.weak())
            target = self.target(out.h.detach(), step.down, step.owned).softmax(-1)
            log_p = self.near(out.h, rows, step.owned if self.pseudo_classes == "own" else None).log_softmax(-1)
            each = torch.where(step.pool.valid, -(target * log_p).sum(-1), 0.0)
            terms["unlabelled"] = self.weight * each.mean(1)
        return terms

    def logits(self, out: Features, state: State, forward: Forward) -> Tensor:
        """The bank in the place of an output layer."""
        return self.near(out.h, PerClass(state["bank"]["rows"], state["bank"]["there"] > 0), None)

    def passes(self) -> dict[str, When]:
        return {"proto": "eval"}

    def reply(self, local: Local) -> Message:
        return super().reply(local) | send(local.means["proto"])

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        made, sent = super().combine(task, server, replies, t), table(replies, "proto")
        bank = combine_replies(replies, self.bank(server))
        chosen = torch.randperm(len(t.clients), generator=t.generator)[: self.helpers].tolist()
        for i in range(min(self.helpers, task.clients)):  # always as many: the mean stands for who is away
            values, mask = (
                (sent.values[chosen[i]], sent.mask[chosen[i]]) if i < len(chosen) else (bank.values, bank.mask)
            )
            made[f"helper {i}"] = PerClass(values.clone(), mask.clone())
        return made | {"bank": bank}

    def bank(self, server: Message) -> PerClass | None:
        return table(server, "bank") if "bank" in server else None


def completed(rows: PerClass, bank: PerClass) -> PerClass:
    """The rows, and the bank's for the classes that have none. [Q, C, d] each."""
    return PerClass(torch.where(rows.mask[..., None], rows.values, bank.values), rows.mask | bank.mask)
