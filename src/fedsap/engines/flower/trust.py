"""What the server accepts of a node: everything is measured against what the method itself would have made."""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fedsap.engines.flower.protocol import Answer, Bad, Figures, unpacked_of
from fedsap.evaluate import MEASURES
from fedsap.message import Entry, Message, PerClass, cost, select
from fedsap.methods.method import Local, Method, Task
from fedsap.training.streams import generator

COUNTS = ("samples", "count")  # entries that are numbers of samples
MOST = 1e9
FIRST = torch.tensor(0)


def template(method: Method, task: Task, shape: Sequence[int]) -> Message:
    """What one client's reply looks like (no client axis): the method's own, of a network for images [H, W, C]."""
    state = {
        name: {k: v[None] for k, v in weights.items()}
        for name, weights in method.init(task, generator(0, "weights")).items()
    }
    with torch.no_grad():
        vectors = method.represent(task.network(state["model"], torch.zeros(1, 1, *shape)))
    every = torch.ones(1, task.classes, dtype=torch.bool)
    means = {name: PerClass(torch.zeros(1, task.classes, vectors[name].shape[-1]), every) for name in method.passes()}
    return select(method.reply(Local(task, state, {}, means, torch.ones(1, task.classes, dtype=torch.long))), FIRST)


def largest(expected: Message, clients: int) -> int:
    """Bytes that so many replies can have at most, with what the format adds."""
    return clients * (cost(expected).bytes + 4096 + 256 * len(expected))


def checked(
    tensors: Mapping[str, Tensor], expected: Message, client: int, owned: Collection[int], longest: float
) -> Message:
    """One client's reply out of a payload, if it is what the method sends: the same entries, types and shapes, rows for
    its own classes only, finite numbers, no vector longer than `longest`. Raises `Bad`."""
    classes = next((len(e.mask) for e in expected.values() if isinstance(e, PerClass)), 0)
    message = unpacked_of(str(client), tensors, classes)
    if message.keys() != expected.keys():
        raise Bad(f"it sent {_list(message)}; takes {_list(expected)}")
    for name, entry in message.items():
        _entry(name, entry, expected[name], owned, longest)
    return message


def _entry(name: str, entry: Entry, expected: Entry, owned: Collection[int], longest: float) -> None:
    if isinstance(entry, PerClass) != isinstance(expected, PerClass):
        raise Bad(f"'{name}' is {'' if isinstance(entry, PerClass) else 'not '}one row per class")
    values, wanted = (e.values if isinstance(e, PerClass) else e for e in (entry, expected))
    if values.shape != wanted.shape or values.dtype != wanted.dtype:
        per = " per class" if isinstance(entry, PerClass) else ""
        shapes = ([*e.shape[1:]] if per else [*e.shape] for e in (values, wanted))
        raise Bad(f"'{name}' has {values.dtype} {next(shapes)}{per}; takes {wanted.dtype} {next(shapes)}")
    if isinstance(entry, PerClass):
        foreign = sorted(set(entry.mask.nonzero().flatten().tolist()) - set(owned))
        if foreign:
            raise Bad(f"'{name}' has rows for the classes {foreign[:20]}, which it does not hold")
        values = entry.values[entry.mask]
    if not torch.isfinite(values).all():
        raise Bad(f"'{name}' has numbers that are not finite")
    if name in COUNTS:
        if bool((values < 0).any() | (values > MOST).any()):
            raise Bad(f"'{name}' has numbers of samples outside 0 to {MOST:g}")
        return
    length = values.double().flatten(1).norm(dim=1) if isinstance(entry, PerClass) else values.double().norm()[None]
    if len(length) and float(length.max()) > longest:
        raise Bad(f"'{name}' has a vector of length {float(length.max()):.3g}; flower.longest takes {longest:g}")


def check_record(answer: Answer, run: str, t: int, asked: Collection[int], to_judge: Collection[int]) -> None:
    """Complains of an answer to something else, of clients that were not asked, of numbers that are missing."""
    if (answer.run, answer.round) != (run, t):
        raise Bad(f"an answer to round {answer.round} of run {answer.run[:8]}; this is round {t} of {run[:8]}")
    some = [*answer.clients, *answer.failed]
    if len(set(some)) < len(some) or not set(some) <= set(asked) or answer.clients != sorted(answer.clients):
        raise Bad(f"it speaks of the clients {some[:20]}; was asked {sorted(asked)[:20]}")
    if not set(answer.lost) <= set(answer.failed):
        raise Bad(f"it says {answer.lost[:20]} are lost, and not that they failed")
    for name, values in answer.terms.items():
        if len(values) != len(answer.clients) or not all(map(math.isfinite, values)):
            raise Bad(
                f"the loss term '{name}' is {values[:5]}; takes a number for each of {len(answer.clients)} clients"
            )
    if any(len(values) != len(answer.clients) for values in answer.pool.values()):
        raise Bad("figures of unlabelled samples that are not one for each client")
    if answer.figures is not None:
        _figures(answer.figures, answer.judged, to_judge)


def _figures(figures: Figures, judged: Sequence[int], to_judge: Collection[int]) -> None:
    if not set(judged) <= set(to_judge) or list(judged) != sorted(set(judged)):
        raise Bad(f"accuracies of the clients {list(judged)[:20]}; was asked those of {sorted(to_judge)[:20]}")
    if set(figures.accuracy) != set(MEASURES):
        raise Bad(f"accuracies named {_list(figures.accuracy)}; takes {', '.join(MEASURES)}")
    for some in (figures.accuracy, figures.noted):
        for name, values in some.items():
            if len(values) != len(judged):
                raise Bad(f"'{name}' has {len(values)} numbers for {len(judged)} clients")


def _list(names: Collection[str]) -> str:
    some = sorted(names)
    return (", ".join(some[:5]) + (", ..." if len(some) > 5 else "")) or "nothing"
