"""Unlabelled samples around local training: what a method chooses of them before, and what is measured on them after.

True labels are read by `figures` and by nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedsap.message import Message, PerClass, select
from fedsap.methods.method import Choice, Forward, Seen, Start, State, View
from fedsap.models import layers
from fedsap.models.network import Features, Weights
from fedsap.training.feed import Fed, Images, Index, Look, Pool
from fedsap.training.local import Stack, Sums
from fedsap.training.streams import Purpose, numbers

Numbers = dict[str, Tensor]
# Features of some rows and columns, their validity, and the network on their images.
Look_at = Callable[[Features, slice, slice, Tensor, Forward], None]


@torch.no_grad()
def choose(stack: Stack, pool: Pool, rows: Sequence[int], state: State, down: Message, t: int, chunk: int) -> Choice:
    """What the method makes of the pools of the clients `rows`; `state` and `down` hold these R clients, in order."""
    owned = stack.owned[torch.as_tensor(rows, device=stack.owned.device)]
    lists, labelled = [pool.lists[r] for r in rows], [stack.train.lists[r] for r in rows]
    y = stack.train.labels[_padded(labelled, stack.owned.device)]

    def seen(out: Features, part: slice, y: Tensor | None, forward: Forward) -> Seen:
        own = {n: {k: v[part] for k, v in w.items()} for n, w in state.items()}
        return Seen(out, select(down, part), owned[part], own, y, forward)

    def of_pool(say: Callable[[Seen], Numbers]) -> Numbers:
        found: Numbers = {}

        def look(out: Features, part: slice, columns: slice, _: Tensor, forward: Forward) -> None:
            _note(found, say(seen(out, part, None, forward)), part, columns, _mask(lists, stack.owned.device).shape)

        draws = _draws(stack, rows, lists, pool.weak, "survey", t)
        _through(stack, pool.images, lists, pool.weak, draws, state["model"], chunk, look)
        return found

    def of_labelled(say: Callable[[Seen], Numbers]) -> Numbers:
        found: Numbers = {}

        def look(out: Features, part: slice, columns: slice, _: Tensor, forward: Forward) -> None:
            _note(found, say(seen(out, part, y[part, columns], forward)), part, columns, y.shape)

        _through(stack, stack.train.images, labelled, stack.look, None, state["model"], chunk, look)
        return found

    start = Start(
        state, down, owned, _mask(lists, owned.device), _mask(labelled, owned.device), y, of_pool, of_labelled
    )
    return stack.method.choose(start)


def feed(pool: Pool, rows: Sequence[int], choice: Choice) -> list[Fed]:
    """What training is fed from, for each of `rows`. The host waits for the device here, once a round."""
    labels = choice.labels.cpu().numpy()

    def of(mask: Tensor) -> list[Fed]:
        some = mask.cpu().numpy()
        mine = [np.flatnonzero(some[i, : len(pool.lists[r])]) for i, r in enumerate(rows)]
        return [
            Fed(pool.lists[r][m], labels[i, m].astype(np.int64))
            for i, (r, m) in enumerate(zip(rows, mine, strict=True))
        ]

    fed = of(choice.accepted if choice.fed is None else choice.fed)
    if choice.other is None:
        return fed
    return [replace(one, other=other) for one, other in zip(fed, of(choice.other), strict=True)]


@torch.no_grad()
def measured(
    stack: Stack,
    pool: Pool,
    rows: Sequence[int],
    weights: Weights,
    choice: Choice,
    wanted: Sequence[str],
    t: int,
    chunk: int,
) -> tuple[dict[str, PerClass], Tensor]:
    """Class means of what the method represents, over one strong view of each accepted sample, by pseudo-label, and how
    many there are of each class, [R, C]."""
    device = stack.owned.device
    accepted = choice.accepted.cpu().numpy()
    lists = [pool.lists[r][accepted[i, : len(pool.lists[r])]] for i, r in enumerate(rows)]
    places = [np.flatnonzero(accepted[i, : len(pool.lists[r])]) for i, r in enumerate(rows)]
    labels = choice.labels.gather(1, _padded(places, device)) if max(map(len, places)) else choice.labels[:, :0]
    sums = Sums(len(rows), stack.classes)

    def look(out: Features, part: slice, columns: slice, valid: Tensor, _: Forward) -> None:
        vectors = stack.method.represent(out)
        sums.add(part, {n: vectors[n] for n in wanted}, labels[part, columns].clamp(min=0), valid)

    _through(
        stack, pool.images, lists, pool.strong, _draws(stack, rows, lists, pool.strong, "mix", t), weights, chunk, look
    )
    if not max(map(len, lists)):
        return {}, torch.zeros(len(rows), stack.classes, device=device)
    return sums.means(), next(iter(sums.counts.values()))


def figures(stack: Stack, pool: Pool, rows: Sequence[int], choice: Choice) -> dict[str, Tensor]:
    """What is reported of a choice, [R] each on the CPU; NaN where there is nothing to count.

    accepted     share of the pool that was accepted
    right        share of the accepted whose pseudo-label is true
    right_all    the same of all samples of the client's classes that have a pseudo-label, accepted or not
    rejected     share of the samples of foreign classes that was not accepted

    and what the method itself wants reported.
    """
    device = stack.owned.device
    valid = _mask([pool.lists[r] for r in rows], device)
    truth = _padded([pool.truth[r] for r in rows], device)
    own = stack.owned[torch.as_tensor(rows, device=device)].gather(1, truth) & valid
    accepted, hit = choice.accepted & valid, (choice.labels == truth) & valid
    labelled = own & (choice.labels >= 0)

    def share(some: Tensor, of: Tensor) -> Tensor:
        return (some & of).sum(1) / of.sum(1)  # 0 / 0 is NaN

    found = {
        "accepted": share(accepted, valid),
        "right": share(hit, accepted),
        "right_all": share(hit, labelled),
    }
    if bool((valid & ~own).any()):
        found["rejected"] = share(~accepted, valid & ~own)
    return {k: v.float().cpu() for k, v in (found | choice.figures).items()}


def _through(
    stack: Stack,
    images: Tensor,
    lists: Sequence[Index],
    view: Look,
    draws: Mapping[str, Tensor] | None,
    weights: Weights,
    chunk: int,
    look: Look_at,
) -> None:
    """Shows all images of the lists [R] to `look`, some at a time, under weights [R, ...] in evaluation mode."""
    some = Images(images, torch.zeros(0), tuple(lists))
    column = 0
    with layers.precision(stack.hyper.precision):
        for part, samples, valid in some.chunks(range(len(lists)), chunk):
            columns = slice(column, column + valid.shape[1])
            own = {k: v[part, columns] for k, v in draws.items()} if draws else None
            forward = partial(_forward, stack, view(images[samples], own))
            look(forward({k: v[part] for k, v in weights.items()}), part, columns, valid, forward)
            column = columns.stop


def _forward(
    stack: Stack,
    x: Tensor,
    weights: Weights,
    view: View | None = None,
    *,
    train: bool = False,  # noqa: ARG001  (outside training it changes nothing)
) -> Features:
    return stack.network(weights, x if view is None else view.x)


def _draws(
    stack: Stack, rows: Sequence[int], lists: Sequence[Index], view: Look, purpose: Purpose, t: int
) -> dict[str, Tensor]:
    """The random numbers of a view of all samples of the lists, [R, longest, *] each."""
    size = (int(stack.train.images.shape[1]), int(stack.train.images.shape[2]))
    longest = max(map(len, lists))
    drawn = []
    for r, own in zip(rows, lists, strict=True):
        key = stack.keys[r]
        drawn.append(view.draw(numbers(key.seed, purpose, key.client, t), len(own), size))
    padded = {
        k: np.stack(
            [
                np.concatenate([one[k], np.zeros((longest - len(one[k]), *one[k].shape[1:]), one[k].dtype)])
                for one in drawn
            ]
        )
        for k in drawn[0]
    }
    return {k: torch.from_numpy(v).to(stack.owned.device) for k, v in padded.items()}


def _note(found: Numbers, said: Numbers, part: slice, columns: slice, shape: torch.Size) -> None:
    for name, value in said.items():
        if name not in found:
            found[name] = value.new_zeros(shape)
        found[name][part, columns] = value


def _padded(lists: Sequence[Index], device: torch.device) -> Tensor:
    """Lists of different lengths as one tensor [R, longest], zeros after the end."""
    made = np.zeros((len(lists), max(map(len, lists))), np.int64)
    for row, own in zip(made, lists, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(made).to(device)


def _mask(lists: Sequence[Index], device: torch.device) -> Tensor:
    """Where `_padded` holds something, bool [R, longest]."""
    lengths = torch.tensor([len(own) for own in lists], device=device)
    return torch.arange(max(map(len, lists)), device=device) < lengths[:, None]
