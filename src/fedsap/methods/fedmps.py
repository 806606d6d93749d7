"""FedMPS: prototypes of two levels in contrastive terms, and soft labels from an output layer trained on the server."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor

from fedsap import losses
from fedsap.message import Message, PerClass, prefixed, table, under
from fedsap.methods.method import Local, Method, Pass, Round, Step, Task, option
from fedsap.models.network import Features
from fedsap.prototypes import combine, confidence, kept, weights_of
from fedsap.robust import Rule, limited
from fedsap.training.server import fit


@dataclass(frozen=True)
class FedMPS(Method):
    """L = L_CE + high * L_con(h, bank_h) + low * L_con(l, bank_l) + soft * L_KL

    h and l are the embedding and an early feature map, each of unit length; their prototypes are means of unit
    vectors. The
    server trains an output layer on the local prototypes of h and sends back, for each class, the mean of its logits.
    """

    name: ClassVar[str] = "fedmps"
    title: ClassVar[str] = "FedMPS"
    paper: ClassVar[str] = "Yang et al. 2025"
    sends: ClassVar[str] = "up: two prototypes per own class; down: two banks and C logits per class"
    embedding: ClassVar[str] = "high"
    means_only: ClassVar[bool] = True

    high: float = option(1.0, "weight of the contrast with prototypes of the embedding (the authors' alph)")
    low: float = option(0.2, "weight of the contrast with prototypes of the early map (beta)")
    soft: float = option(5.0, "weight of the divergence from the soft labels (gama)")
    tau: float = option(0.5, "temperature of the contrast")
    temperature: float = option(5.0, "temperature of the soft labels")
    proto_pass: Pass = option("running", "local prototypes: running along with the last epoch, or in a pass afterwards")
    rule: Rule = option("mean", "the server's mean of local prototypes, one by `confidence`, or a centre few can move")
    trim: Annotated[float, Interval(ge=0, lt=0.5)] = option(0.2, "share left out at either end with rule = trimmed")
    limit: float = option(0.0, "shorten prototypes to so many times the clients' median length; 0: not")
    server_epochs: int = option(6, "epochs of the server's output layer, each round")
    server_lr: float = option(1e-3, "learning rate of Adam for it")
    server_batch: int = option(4, "batch size for it")
    server_dropout: float = option(0.0, "dropout on the prototypes it is trained on")

    def degenerate(self) -> str | None:
        if self.high == self.low == self.soft == 0:
            return "with high = low = soft = 0 FedMPS is local training"
        return None

    def begin(self, task: Task, generator: torch.Generator) -> Message:
        fresh = task.network.init(generator)
        return prefixed("head", {k: fresh[k] for k in task.network.head_names})

    def broadcast(self, server: Message, t: int) -> Message:
        return {k: server[k] for k in ("high", "low", "soft") if k in server}

    def represent(self, out: Features) -> dict[str, Tensor]:
        vectors = {"high": F.normalize(out.h, dim=-1), "low": F.normalize(out.low, dim=-1)}
        return vectors | ({"probability": out.logits.softmax(-1)} if self.rule == "confidence" else {})

    def loss(self, step: Step) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(step)}
        if "high" in step.down:
            unit = self.represent(step.out)
            for level, weight in (("high", self.high), ("low", self.low)):
                terms[level] = weight * losses.contrast(unit[level], step.y, table(step.down, level), self.tau)
            terms["soft"] = self.soft * losses.soften(
                step.out.logits, step.y, table(step.down, "soft"), self.temperature
            )
        return terms

    def passes(self) -> dict[str, Pass]:
        passes = {"high": self.proto_pass, "low": self.proto_pass}
        return passes | ({"probability": "eval"} if self.rule == "confidence" else {})

    def reply(self, local: Local) -> Message:
        sent: Message = {"high": local.means["high"], "low": local.means["low"]}
        return sent | (confidence(local.means["probability"]) if self.rule == "confidence" else {})

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        levels = {level: limited(table(replies, level), self.limit) for level in ("high", "low")}
        local = levels["high"]
        points, labels = local.values[local.mask], local.mask.nonzero()[:, 1]
        head = fit(
            lambda w, x: task.network.head(w, x),
            {k: v.to(points) for k, v in under("head", server).items()},
            points,
            labels,
            epochs=self.server_epochs,
            batch=self.server_batch,
            lr=self.server_lr,
            dropout=self.server_dropout,
            generator=t.generator,
        )
        logits = task.network.head({k: v[None] for k, v in head.items()}, local.values.flatten(0, 1)[None])
        levels["soft"] = PerClass(logits.view(*local.mask.shape, -1), local.mask)
        weights = weights_of(replies)
        made = {level: combine(sent, weights, self.rule, self.trim) for level, sent in levels.items()}
        before = {level: table(server, level) if level in server else None for level in made}
        return {**{level: kept(bank, before[level]) for level, bank in made.items()}, **prefixed("head", head)}

    def bank(self, server: Message) -> PerClass | None:
        return table(server, "high") if "high" in server else None
