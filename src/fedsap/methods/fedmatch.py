"""FedMatch: one part of the weights learns from labelled, another from unlabelled samples and other clients' models."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsap import losses, pseudo
from fedsap.message import Message, prefixed, tensor, under
from fedsap.methods.fedavg import FedAvg
from fedsap.methods.fedprox import distance
from fedsap.methods.method import Choice, Phase, Round, Seen, Share, Start, State, Step, Task, option
from fedsap.models.network import Features, Weights


@dataclass(frozen=True)
class FedMatch(FedAvg):
    """theta = sigma + psi. Labelled samples move sigma, unlabelled ones psi:

    L_s(sigma) = supervised * L_CE
    L_u(psi)   = inter * mean_{u in A} 1/H sum_i KL( p_i(x_u) || p(x_u) )
               + agree * mean_{u in A} -log p(strong x_u)[c_u]  +  l2 * |sigma - psi|^2  +  l1 * |psi|_1

    p_i are the predictions of the H helpers; A are the samples that p gives some class at least `confidence`, and c_u
    has most of the votes of p and the p_i. A client's helpers are those whose models say the most similar of an image
    of noise.
    """

    name: ClassVar[str] = "fedmatch"
    title: ClassVar[str] = "FedMatch"
    paper: ClassVar[str] = "Jeong et al. 2021"
    sends: ClassVar[str] = "up: both parts of all weights; down: their means, at times two other clients' psi"
    averaged: ClassVar[tuple[str, ...]] = ("model", "psi")
    uses_pool: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = True

    supervised: float = option(10.0, "weight of the cross-entropy of labelled samples (lambda_s)")
    inter: float = option(0.01, "weight of the divergence from the helpers (lambda_i)")
    agree: float = option(0.01, "weight of the pseudo-labels' cross-entropy (lambda_a)")
    l2: float = option(10.0, "weight of the distance between sigma and psi (lambda_l2)")
    l1: float = option(1e-4, "weight of the sum of psi's absolute values (lambda_l1)")
    confidence: Share = option(0.75, "the least probability of a guess that counts")
    helpers: int = option(2, "other clients that have a say")
    refresh: int = option(10, "rounds with unlabelled samples until helpers are chosen anew")
    share: Share = option(0.2, "psi over sigma at first")
    lr: float = option(0.001, "learning rate, of both parts")
    pseudo_classes: Literal["own", "all"] = option("own", "guesses are of the client's classes, or of any")

    def degenerate(self) -> str | None:
        if self.inter == self.agree == self.l2 == self.l1 == 0:
            return "with inter = agree = l2 = l1 = 0 FedMatch is FedAvg"
        if 0 in (self.supervised, self.lr):
            return "with supervised = 0 or lr = 0 FedMatch learns nothing from labelled samples"
        return "with helpers = 0 or refresh = 0 there are no helpers" if 0 in (self.helpers, self.refresh) else None

    def begin(self, task: Task, generator: torch.Generator) -> Message:
        return {"noise": torch.randn(1, *task.network.shape, generator=generator)}

    def broadcast(self, server: Message, t: int) -> Message:
        return {k: v for k, v in server.items() if k.partition("/")[0] in self.averaged}

    def address(self, server: Message, t: int, clients: Tensor) -> Message:
        if "nearest" not in server:
            return {}
        chosen, theirs = tensor(server, "nearest")[clients], under("theirs", server)
        return {f"helper {i}/{k}": v[chosen[:, i]] for i in range(chosen.shape[1]) for k, v in theirs.items()}

    def init(self, task: Task, generator: torch.Generator) -> State:
        state = super().init(task, generator)
        part = self.share / (1 + self.share)
        psi = {k: part * v for k, v in state["model"].items() if k not in task.network.buffers}
        helpers = {f"helper {i}": state["model"] for i in range(min(self.helpers, task.clients - 1))}
        return {**state, **helpers, "psi": psi, "helpers": {"there": torch.tensor(0.0)}}

    def receive(self, state: State, down: Message) -> State:
        """Helpers stay what they were when they came: the sigma of then and their own psi."""
        state = super().receive(state, down)
        for name in [n for n in state if n.startswith("helper ")]:
            if theirs := under(name, down):
                model, psi = state["model"], state["psi"]
                state[name] = {k: v - psi[k] + theirs[k] if k in psi else v for k, v in model.items()}
                state["helpers"] = {"there": torch.ones_like(state["helpers"]["there"])}
        return state

    def guess(self, out: Features, others: list[Features], state: State, owned: Tensor) -> tuple[Tensor, Tensor]:
        """c_u, [Q, U], and whether u is in A. The client's own vote counts a little more than another."""
        among = owned if self.pseudo_classes == "own" else None
        label, p = pseudo.guess(out.logits, among)
        votes = 1.5 * F.one_hot(label, owned.shape[1])
        for other in others:
            there = state["helpers"]["there"][:, None, None]
            votes = votes + there * F.one_hot(pseudo.guess(other.logits, among)[0], owned.shape[1])
        return votes.argmax(-1), p >= self.confidence

    def choose(self, start: Start) -> Choice:
        """For the report: guesses are made anew in every step."""

        def facts(seen: Seen) -> dict[str, Tensor]:
            others = [seen.forward(w) for n, w in seen.state.items() if n.startswith("helper ")]
            label, sure = self.guess(seen.out, others, seen.state, seen.owned)
            return {"label": label, "sure": sure}

        found = start.of_pool(facts)
        return Choice(found["label"], found["sure"] & start.valid, fed=start.valid)

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.loss, trains=self.averaged, lr=self.lr),)

    def loss(self, step: Step) -> dict[str, Tensor]:
        """The state has theta and psi. What moves theta alone moves sigma; what is to move psi has to move both."""
        theta, psi = step.state["model"], step.state["psi"]
        terms = {"ce": self.supervised * self.cross_entropy(step)}
        if step.pool is not None:
            both = {**theta, **{k: theta[k] + (v - v.detach()) for k, v in psi.items()}}
            view = step.pool.weak()
            weak, strong = step.forward(both, view), step.forward(both, step.pool.strong())
            with torch.no_grad():
                others = [step.forward(w, view, train=False) for n, w in step.state.items() if n.startswith("helper ")]
                labels, sure = self.guess(weak, others, step.state, step.owned)
            sure, classes = sure & step.pool.valid, step.owned if self.ce == "own" else None
            apart = [losses.divergence(other.logits, weak.logits, sure) for other in others]
            zero = torch.zeros_like(terms["ce"])
            terms["inter"] = self.inter * step.state["helpers"]["there"] * sum(apart, zero) / max(1, len(apart))
            terms["agree"] = self.agree * losses.pseudo(strong.logits, labels, sure, classes, "counted")
            sigma = {k: (theta[k] - v).detach() for k, v in psi.items()}
            moved = {k: v + (theta[k] - theta[k].detach()) for k, v in psi.items()}
            terms["l2"] = self.l2 * distance(sigma, moved)
            terms["l1"] = self.l1 * sum((v.abs().flatten(1).sum(1) for v in moved.values()), zero)
        return terms

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        made = super().combine(task, server, replies, t) | {"noise": server["noise"]}
        if t.number in task.pool_rounds:
            model, psi = under("model", replies), under("psi", replies)
            known = {k: self.known(server, f"theirs/{k}", v, task, t) for k, v in psi.items()}
            said = self.known(server, "said", self.look(task, model, tensor(server, "noise")), task, t)
            made |= prefixed("theirs", known) | {"said": said}
            if (t.number - task.pool_rounds.start) % self.refresh == 0:
                apart = (said[:, None] - said).square().sum(-1).fill_diagonal_(torch.inf)
                made["nearest"] = apart.argsort(dim=1, stable=True)[:, : min(self.helpers, task.clients - 1)]
        return made

    def known(self, server: Message, name: str, sent: Tensor, task: Task, t: Round) -> Tensor:
        """What every client has sent last, [N, ...]; of who has not answered yet, the mean of the first to do so."""
        old = tensor(server, name) if name in server else sent.mean(0).expand(task.clients, *sent.shape[1:])
        return old.index_copy(0, t.clients.to(sent.device), sent)

    def look(self, task: Task, model: Weights, noise: Tensor) -> Tensor:
        """What the clients' models say of the noise, [R, C] probabilities."""
        first = next(iter(model.values()))
        fixed = {} if self.statistics else task.network.init(torch.Generator().manual_seed(0))
        fresh = {k: v.to(first).expand(len(first), *v.shape) for k, v in fixed.items() if k in task.network.buffers}
        x = noise.to(first).expand(len(first), *noise.shape)
        return task.network(fresh | model, x).logits[:, 0].softmax(-1)
