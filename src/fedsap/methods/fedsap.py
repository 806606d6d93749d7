"""FedSAP: FedProto's exchange with a scheduled alignment weight and a cosine-softmax loss over the same prototypes; in
rounds with unlabelled samples, these learn from the prototype that they are nearest to."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Interval
from pydantic import Field
from torch import Tensor

from fedsap import losses, pseudo
from fedsap.message import Message, PerClass, table
from fedsap.methods.method import (
    Choice,
    Local,
    Method,
    Pass,
    Phase,
    Round,
    Seen,
    Share,
    Start,
    State,
    Step,
    Task,
    Unlabelled,
    option,
)  # fmt: skip
from fedsap.models.network import Features, Weights
from fedsap.prototypes import combine_replies, mixed, send, steadied
from fedsap.robust import Rule, clash
from fedsap.schedules import Schedule, Shape


@dataclass(frozen=True)
class FedSAP(Method):
    """L = L_CE + lambda_t * L_Proto + proxy * L_Proxy + consistency * L_Cons

    lambda_t rises from 0 after round `align_start` to `align_top` at round `align_end`. All terms use the bank received
    at the start of the round; in round 1 there is none. L_Cons is there in rounds with unlabelled samples.
    """

    name: ClassVar[str] = "fedsap"
    title: ClassVar[str] = "FedSAP"
    paper: ClassVar[str] = "Casado-Diez et al. 2026"
    sends: ClassVar[str] = "up: a prototype per own class; down: the bank"
    uses_pool: ClassVar[bool] = True
    means_only: ClassVar[bool] = True

    schedule_shape: Shape = option("linear", "how the alignment weight rises")
    align_start: int | None = option(None, "last round without alignment; unset: a fifth of the rounds (20 of 100)")
    align_end: int | None = option(None, "round from which the weight is full; unset: the last round")
    align_top: float = option(0.7, "the full alignment weight (the paper's M)")
    reduction: Literal["mean", "sum"] = option("mean", "squared distance as mean over the d dimensions, or their sum")
    proxy: float = option(1.0, "weight of the proxy loss; 0 leaves it out")
    proxy_start: int = option(1, "first round with the proxy loss (round 1 has no prototypes yet)")
    proxy_rise: int = option(0, "rounds over which the proxy loss comes to its full weight; 0: at once")
    proxy_loss: Literal["softmax", "learned", "nca", "nca++", "anchor"] = option(
        "softmax", "over cosines with the prototypes, or with proxies trained from there; ProxyNCA(++), Proxy Anchor"
    )
    proxy_scale: float = option(32.0, "s, by which cosines (nca, nca++: squared distances) are multiplied")
    proxy_classes: Literal["bank", "own"] = option("bank", "the loss runs over all prototypes, or the client's classes")
    proto_pass: Pass = option(
        "eval", "local prototypes: in a pass after training, or running along with the last epoch"
    )
    weighted: bool = option(False, "weigh local prototypes by their number of samples, or all alike")
    rule: Rule = option("mean", "the server's mean of local prototypes, one by `confidence`, or a centre few can move")
    trim: Annotated[float, Interval(ge=0, lt=0.5)] = option(0.2, "share left out at either end with rule = trimmed")
    limit: float = option(0.0, "shorten prototypes to so many times the clients' median length; 0: not")
    agreement: float = option(0.0, "weigh them by exp(agreement * cosine with their plain mean); 0: not")
    inertia: Annotated[float, Field(ge=0, lt=1)] = option(0.0, "share of the old prototype in a new one of the bank")

    consistency: float = option(1.0, "weight of the consistency loss of unlabelled samples")
    accept: Literal["margin", "fixed", "confidence", "all"] = option(
        "margin",
        "unlabelled samples count by margin and distance, calibrated; by `least_margin`; by `confidence`; or all",
    )
    margin_quantile: Share = option(0.1, "the least margin: this quantile of those of labelled samples")
    distance_quantile: Share = option(0.9, "the largest distance: this quantile of those of labelled samples")
    calibrate: Literal["once", "round"] = option("once", "both are taken when unlabelled samples come, or every round")
    least_margin: float = option(0.1, "the least margin with accept = fixed")
    confidence: Share = option(0.95, "the least probability of the head's guess with accept = confidence")
    pseudo_classes: Literal["own", "bank"] = option("own", "pseudo-labels are of the client's classes, or of any")
    refresh: Literal["round", "batch", "once"] = option("round", "how often pseudo-labels are given anew")
    mix: float = option(0.5, "weight of an accepted sample in a local prototype (the paper's alpha)")
    unit: bool = option(True, "mixed local prototypes are divided by their length")

    def degenerate(self) -> str | None:
        if self.align_top == 0 and self.proxy == 0:
            return "with align_top = 0 and proxy = 0 FedSAP is local training"
        return clash(self.rule, weighted=self.weighted, agreement=self.agreement)

    def schedule(self, t: int, rounds: int) -> dict[str, float]:
        start = rounds // 5 if self.align_start is None else self.align_start
        end = rounds if self.align_end is None else self.align_end
        rise = Schedule(self.schedule_shape, start, end, self.align_top)
        come = min(max((t - self.proxy_start + 1) / (self.proxy_rise + 1), 0.0), 1.0)
        return {"align": rise(t), "proxy": self.proxy * come}

    def broadcast(self, server: Message, t: int) -> Message:
        return server

    def init(self, task: Task, generator: torch.Generator) -> State:
        state = super().init(task, generator)
        if self.proxy_loss == "learned":
            state["proxies"] = {"rows": torch.zeros(task.classes, task.network.dim)}
        if task.pool:  # NaN: not known yet
            state["pool"] = {k: torch.tensor(torch.nan) for k in ("margin", "distance")}
            if self.refresh == "once":
                state["pool"]["labels"] = torch.full((task.pool,), torch.nan)
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
            if step.pool is not None:
                labels, counts = self._guesses(step, step.pool)
                strong = self.represent(step.forward(step.state["model"], step.pool.strong()))["proto"]
                terms["consistency"] = self.consistency * losses.consistency(strong, labels, counts, bank)
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

    def choose(self, start: Start) -> Choice:
        if "bank" not in start.down:
            return Method.choose(self, start)
        known = start.state["pool"]
        new = torch.isnan(known["margin"]) | (self.calibrate == "round")
        if self.accept == "margin" and bool(new.any()):
            found = start.of_labelled(self.facts)
            quantiles = self.margin_quantile, self.distance_quantile
            made = pseudo.calibrate(found["margin"], found["right"], found["own"], start.labelled, *quantiles)
            limits = zip(("margin", "distance"), made, strict=True)
            known = known | {name: torch.where(new, limit, known[name]) for name, limit in limits}
        found = start.of_pool(self.facts)
        labels, accepted = found["label"], self.accepted(found, known) & start.valid
        if self.refresh == "once":  # the label of an accepted sample, or -1; NaN until there are some
            old = known["labels"]
            kept = torch.where(torch.isnan(old).all(1, keepdim=True), torch.where(accepted, labels, -1).to(old), old)
            known = known | {"labels": kept}
            accepted, labels = kept >= 0, torch.where(kept >= 0, kept.long(), labels)
        shown = {k: known[k] for k in ("margin", "distance")} if self.accept == "margin" else {}
        return Choice(labels, accepted, {"pool": known}, shown, start.valid if self.refresh == "batch" else None)

    def facts(self, seen: Seen) -> dict[str, Tensor]:
        """What is known of each sample: its pseudo-label, and what `accept` goes by."""
        h, among = self.represent(seen.out)["proto"], seen.owned if self.pseudo_classes == "own" else None
        distance = pseudo.distances(h, table(seen.down, "bank"), among)
        label, near, margin = pseudo.nearest_two(distance)
        found = {"label": label, "near": near, "margin": margin}
        if self.accept == "confidence":
            found["label"], found["confidence"] = pseudo.guess(seen.out.logits, among)
        if seen.y is not None:
            found |= {"right": label == seen.y, "own": distance.gather(-1, seen.y[..., None])[..., 0]}
        return found

    def accepted(self, facts: dict[str, Tensor], known: Weights) -> Tensor:
        """Which samples [Q, B] count."""
        if self.accept == "margin":
            return (facts["margin"] > known["margin"][:, None]) & (facts["near"] < known["distance"][:, None])
        if self.accept == "fixed":
            return facts["margin"] > self.least_margin
        if self.accept == "confidence":
            return facts["confidence"] >= self.confidence
        return facts["label"] >= 0

    def _guesses(self, step: Step, pool: Unlabelled) -> tuple[Tensor, Tensor]:
        """Pseudo-labels of the unlabelled samples of a batch, and which of them count."""
        if self.refresh != "batch":
            return pool.labels, pool.valid
        with torch.no_grad():
            out = step.forward(step.state["model"], pool.weak(), train=False)
            found = self.facts(Seen(out, step.down, step.owned, step.state, None, step.forward))
            return found["label"], self.accepted(found, step.state["pool"]) & pool.valid

    def represent(self, out: Features) -> dict[str, Tensor]:
        return super().represent(out) | ({"probability": out.logits.softmax(-1)} if self.rule == "confidence" else {})

    def passes(self) -> dict[str, Pass]:
        return {"proto": self.proto_pass} | ({"probability": "eval"} if self.rule == "confidence" else {})

    def pool_passes(self) -> tuple[str, ...]:
        return ("proto",) if self.mix else ()

    def reply(self, local: Local) -> Message:
        proto, counts = local.means["proto"], local.counts
        if local.pool_counts is not None:
            nothing = PerClass(torch.zeros_like(proto.values), torch.zeros_like(proto.mask))
            accepted = local.pool_means.get("proto", nothing)
            proto = mixed(proto, counts, accepted, local.pool_counts, self.mix, self.unit)
            counts = counts + self.mix * local.pool_counts
        return send(proto, counts if self.weighted else None, local.means.get("probability"))

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        before = self.bank(server)
        made = combine_replies(replies, before, self.agreement, rule=self.rule, trim=self.trim, limit=self.limit)
        return {"bank": steadied(made, before, self.inertia)}

    def bank(self, server: Message) -> PerClass | None:
        return table(server, "bank") if "bank" in server else None
