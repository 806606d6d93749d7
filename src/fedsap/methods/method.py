"""What a method is: a frozen dataclass of options with pure functions that the engines call.

A method never sees a device, a data loader, an optimiser, a file or a log. On the client's side every tensor has a
leading client axis Q; on the server's side, replies have it. The hooks below are all there are, in the order in which a
round calls them; each has a default, and the defaults together are local training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray
from torch import Tensor

from fedsap import losses
from fedsap.message import Message, PerClass
from fedsap.models.network import Features, Network, Weights

State = dict[str, Weights]  # what clients keep between rounds: "model", and what a method adds, by name
Pass = Literal["eval", "train", "running"]  # when prototypes are taken, as an option
When = Literal["before", "eval", "train", "running"]
Share = Annotated[float, Interval(ge=0, le=1)]


def option(default: Any, about: str) -> Any:
    """A dataclass field with the line that the documentation and `fedsap list` show for it."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class Task:
    """What is known before the first round."""

    network: Network
    classes: int
    clients: int
    rounds: int  # that schedules refer to
    more: int = 0  # rounds after these
    pool: int = 0  # U, unlabelled samples of the client that has most; 0: there are none
    pool_rounds: range = range(0)  # the rounds in which they are used

    @property
    def last(self) -> int:
        """The number of the last round."""
        return self.rounds + self.more


@dataclass(frozen=True)
class Round:
    """One round as the server sees it."""

    number: int  # t = 1, 2, ...
    generator: torch.Generator  # the server's random numbers of this round
    clients: Tensor  # [R] ids of the clients that replied, ascending; replies come in this order


@dataclass(frozen=True)
class View:
    """Images as a network takes them, [Q, B, H, W, C] each, with the noise of this pass."""

    x: Tensor
    noise: Mapping[str, Tensor]


@dataclass(frozen=True)
class Unlabelled:
    """The unlabelled samples that go with a batch, [Q, U]. A view is made when it is asked for."""

    labels: Tensor  # pseudo-labels as `Method.choose` gave them; -1: none
    valid: Tensor  # bool; False where a client has nothing to be fed
    weak: Callable[[], View]
    strong: Callable[[], View]
    other: "Unlabelled | None" = None  # the second stream, [Q, U] too, if `Choice.other` asks for one
    drawn: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # [Q, ...] numbers of the method's own, from `Method.draw`


class Forward(Protocol):
    """The network with any weights, on the images at hand or on another view. Outside training, `train` changes
    nothing."""

    def __call__(self, weights: Weights, view: View | None = None, *, train: bool = True) -> Features: ...


@dataclass(frozen=True)
class Step:
    """One batch of every client."""

    y: Tensor  # [Q, B]
    down: Message  # what the client was sent this round, with client axis
    owned: Tensor  # bool [Q, C] classes the client holds
    weight: Mapping[str, Tensor]  # `Method.schedule` of this round, tensors without axes
    state: State  # the client's weights by name; those being trained carry gradients
    forward: Forward
    live: Callable[[Weights], Weights]  # the part of received weights that `state` is to be compared with
    pool: Unlabelled | None = None  # in rounds with unlabelled samples, for methods that use them
    first: str = "model"  # the first of the weights that the phase trains

    @cached_property
    def out(self) -> Features:
        """The forward pass of `first`, which takes place when this is asked for."""
        return self.forward(self.state[self.first])


@dataclass(frozen=True)
class Phase:
    """A stretch of local training: which weights move, by which loss, for how long."""

    loss: Callable[[Step], dict[str, Tensor]]  # weighted terms [Q] by name; their sum is minimised
    part: Literal["all", "head", "base"] = "all"
    trains: tuple[str, ...] = ("model",)  # names in the state
    epochs: int | None = None  # None: train.epochs
    lr: float | None = None  # None: train.lr
    pool: bool = False  # only in rounds with unlabelled samples


@dataclass(frozen=True)
class Seen:
    """Some samples of every client under the model that it starts the round with, layers in evaluation mode."""

    out: Features
    down: Message
    owned: Tensor  # bool [Q, C]
    state: State
    y: Tensor | None  # [Q, b]; None of unlabelled samples
    forward: Forward  # the network with other weights on these samples


@dataclass(frozen=True)
class Start:
    """A client before it trains in a round with unlabelled samples.

    `of_pool` and `of_labelled` show all its samples, some at a time, to a function that says numbers of each, [Q, b],
    by name, and return them as [Q, U] and [Q, n]: unlabelled ones in their weak view, labelled ones as they are.
    """

    state: State
    down: Message
    owned: Tensor  # bool [Q, C]
    valid: Tensor  # bool [Q, U]: places that hold an unlabelled sample
    labelled: Tensor  # bool [Q, n]: places that hold a labelled one
    y: Tensor  # [Q, n] their labels
    of_pool: Callable[[Callable[[Seen], dict[str, Tensor]]], dict[str, Tensor]]
    of_labelled: Callable[[Callable[[Seen], dict[str, Tensor]]], dict[str, Tensor]]


@dataclass(frozen=True)
class Choice:
    """What a method makes of the pool for one round."""

    labels: Tensor  # [Q, U] pseudo-labels; -1: none
    accepted: Tensor  # bool [Q, U]
    state: State = field(default_factory=dict)  # what changes in the client's state
    figures: dict[str, Tensor] = field(default_factory=dict)  # [Q] each, to be reported
    fed: Tensor | None = None  # bool [Q, U] what training is fed from; None: what is accepted
    other: Tensor | None = None  # bool [Q, U] what a second stream beside it is fed from; None: there is none


@dataclass(frozen=True)
class Local:
    """What a client has when it replies, with client axis."""

    task: Task
    state: State  # with privacy.noise empty: weights are not for sending then
    down: Message
    means: dict[str, PerClass]  # class means of what `Method.represent` names, taken as `Method.passes` says; with
    # privacy.noise of clipped vectors, and noisy
    counts: Tensor  # [Q, C] training samples of each class
    pool_means: dict[str, PerClass] = field(default_factory=dict)  # of accepted samples, as `pool_passes` says
    pool_counts: Tensor | None = None  # [Q, C] accepted samples by pseudo-label


@dataclass(frozen=True)
class Method:
    """Local training: nothing is sent, nothing received. Methods override what they change."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    sends: ClassVar[str]  # one line for people: what goes up, what comes down
    embedding: ClassVar[str] = "proto"  # which of `represent` is compared with the bank at inference
    uses_pool: ClassVar[bool] = False  # does it learn from unlabelled samples, if there are some?
    needs_pool: ClassVar[bool] = False  # would it be another method without them?
    means_only: ClassVar[bool] = False  # does `reply` send class means and numbers of samples alone? (privacy.noise)

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
        """What ONE client begins with, without client axis, on the CPU; with `start` = common, one draw is for all."""
        return {"model": task.network.init(generator)}

    def receive(self, state: State, down: Message) -> State:
        """The client's state once the server's message is in, before training and before evaluation."""
        return state

    def choose(self, start: Start) -> Choice:
        """Pseudo-labels, and which of them count: before local training, in rounds with unlabelled samples."""
        none = torch.zeros_like(start.valid)
        return Choice(torch.full(none.shape, -1, device=none.device), none)

    def draw(self, rng: np.random.Generator, batches: int) -> dict[str, NDArray[np.float64]]:
        """Random numbers that the loss needs beside those of images, [batches, ...] by name: one client's in an epoch
        with unlabelled samples. They reach it in `Step.pool`."""
        return {}

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

    def pool_passes(self) -> tuple[str, ...]:
        """Of which of `represent` the class means of accepted unlabelled samples are taken as well, by pseudo-label: of
        one strong view of each, in a pass after training with layers in evaluation mode."""
        return ()

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
