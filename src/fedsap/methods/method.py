"""What a method is: a frozen dataclass of options with pure functions that the engines call.

A method never sees a device, a data loader, an optimiser, a file or a log. On the client's side every tensor has a
leading
client axis Q; on the server's side, replies have it. The hooks below are all there are, in the order in which a
round calls them; each has a default, and the defaults together are local training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from fedsap import losses
from fedsap.message import Message, PerClass
from fedsap.models.network import Features, Network, Weights

State = dict[str, Weights]  # what clients keep between rounds: "model", and what a method adds, by name
Pass = Literal["eval", "train", "running"]  # when prototypes are taken, as an option
When = Literal["before", "eval", "train", "running"]
Share = Annotated[float, Field(ge=0, le=1)]


def option(default: Any, about: str) -> Any:
    """A dataclass field with the line that the documentation and `fedsap list` show for it."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class Task:
    """What is known before the first round."""

    network: Network
    classes: int
    clients: int
    rounds: int


@dataclass(frozen=True)
class Round:
    """One round as the server sees it."""

    number: int  # t = 1, 2, ...
    generator: torch.Generator  # the server's random numbers of this round
    clients: Tensor  # [R] ids of the clients that replied, ascending; replies come in this order


class Forward(Protocol):
    """The network on the images at hand, with any weights. Outside training `train` changes nothing."""

    def __call__(self, weights: Weights, *, train: bool = True) -> Features: ...


@dataclass(frozen=True)
class Step:
    """One batch of every client, after the forward pass."""

    y: Tensor  # [Q, B]
    out: Features  # of the first of the weights that the phase trains
    down: Message  # what the client was sent this round, with client axis
    owned: Tensor  # bool [Q, C] classes the client holds
    weight: Mapping[str, Tensor]  # `Method.schedule` of this round, tensors without axes
    state: State  # the client's weights by name; those being trained carry gradients
    forward: Forward  # the network on this batch with other weights
    live: Callable[[Weights], Weights]  # the part of received weights that `state` is to be compared with


@dataclass(frozen=True)
class Phase:
    """A stretch of local training: which weights move, by which loss, for how long."""

    loss: Callable[[Step], dict[str, Tensor]]  # weighted terms [Q] by name; their sum is minimised
    part: Literal["all", "head", "base"] = "all"
    trains: tuple[str, ...] = ("model",)  # names in the state
    epochs: int | None = None  # None: train.epochs
    lr: float | None = None  # None: train.lr


@dataclass(frozen=True)
class Local:
    """What a client has when it replies, with client axis."""

    task: Task
    state: State
    down: Message
    means: dict[str, PerClass]  # class means of what `Method.represent` names, taken as `Method.passes` says
    counts: Tensor  # [Q, C] training samples of each class


@dataclass(frozen=True)
class Method:
    """Local training: nothing is sent, nothing received. Methods override what they change."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    sends: ClassVar[str]  # one line for people: what goes up, what comes down
    embedding: ClassVar[str] = "proto"  # which of `represent` is compared with the bank at inference

    start: Literal["common", "independent"] = option(
        "independent", "do all clients begin with the same random weights, or each with its own"
    )
    ce: Literal["all", "own"] = option(
        "all", "cross-entropy over all classes, or over those the client holds (paper: 'over the observed classes')"
    )

    def degenerate(self) -> str | None:
        """Why these options make another method of this one, or None."""
        return None

    # --- the server, before the first round and at the start of each

    def begin(self, task: Task, generator: torch.Generator) -> Message:
        """The server's state before round 1."""
        return {}

    def broadcast(self, server: Message, t: int) -> Message:
        """What every client is sent, without client axis."""
        return {}

    def address(self, server: Message, t: int, clients: Tensor) -> Message:
        """What each client is sent for itself, with client axis in the order of `clients`."""
        return {}

    # --- the clients

    def init(self, task: Task, generator: torch.Generator) -> State:
        """What ONE client begins with, without client axis; with `start` = common, one draw is for all."""
        return {"model": task.network.init(generator)}

    def receive(self, state: State, down: Message) -> State:
        """The client's state once the server's message is in, before training and before evaluation."""
        return state

    def schedule(self, t: int, rounds: int) -> dict[str, float]:
        """Weights that change with the round t of `rounds`; they reach the loss as tensors in `Step.weight`."""
        return {}

    def phases(self) -> tuple[Phase, ...]:
        """Local training, stretch by stretch."""
        return (Phase(self.loss),)

    def cross_entropy(self, step: Step, logits: Tensor | None = None) -> Tensor:
        """L_CE of logits, those of `step.out` if none are given, over the classes that the option `ce` names, [Q]."""
        logits = step.out.logits if logits is None else logits
        return losses.cross_entropy(logits, step.y, step.owned if self.ce == "own" else None)

    def loss(self, step: Step) -> dict[str, Tensor]:
        """The terms of the local objective, already weighted, [Q] each."""
        return {"ce": self.cross_entropy(step)}

    def represent(self, out: Features) -> dict[str, Tensor]:
        """The vectors [Q, B, *] that local prototypes are means of, by name."""
        return {"proto": out.h}

    def passes(self) -> Mapping[str, When]:
        """When the class means of each of `represent` are taken: in a pass with the received weights before training,
        in one after it (layers in evaluation or in training mode), or running along with the last epoch. What is not
        named is not taken."""
        return {}

    def reply(self, local: Local) -> Message:
        """What each client sends, with client axis."""
        return {}

    # --- the server, at the end of a round, and evaluation

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        """The server's state after the replies; replies have a client axis in the order of `t.clients`."""
        return server

    def bank(self, server: Message) -> PerClass | None:
        """Prototypes [C, d] for nearest-prototype inference; None lets the evaluation measure some."""
        return None

    def model(self, state: State) -> Weights:
        """The weights that a client is judged by."""
        return state["model"]

    def logits(self, out: Features, state: State, forward: Forward) -> Tensor:
        """What head inference takes the argmax of, [Q, B, C]; `out` is that of `model`."""
        return out.logits
