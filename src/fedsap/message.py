"""What travels between server and clients: named tensors, some of them one row per class.

A message is a flat dictionary. Replies carry a leading client axis, what the server says to all does not; `expand`
gives it one. The numbers reported as communication are counted here, from the tensors that `pack` would put on a wire.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PerClass:
    """Dense rows, one per class, of which only those under the mask mean anything and are sent.

    values: [..., C, *], mask: bool [..., C]. Rows outside the mask are zero.
    """

    values: Tensor
    mask: Tensor


Entry = Tensor | PerClass
Message = dict[str, Entry]
Packed = dict[str, Tensor]


def rows(entry: Entry, index: Tensor | slice) -> Entry:
    """The given clients' part of an entry with a client axis."""
    if isinstance(entry, PerClass):
        return PerClass(entry.values[index], entry.mask[index])
    return entry[index]


def select(message: Mapping[str, Entry], index: Tensor | slice) -> Message:
    """The given clients' part of a message with a client axis.

    >>> select({"w": torch.arange(6).view(3, 2)}, slice(0, 1))
    {'w': tensor([[0, 1]])}
    """
    return {name: rows(entry, index) for name, entry in message.items()}


def expand(message: Mapping[str, Entry], clients: int) -> Message:
    """What all clients are told, with a client axis in front: views, no copies.

    >>> expand({"w": torch.zeros(2)}, 3)["w"].shape
    torch.Size([3, 2])
    """

    def one(entry: Entry) -> Entry:
        if isinstance(entry, PerClass):
            return PerClass(
                entry.values.expand(clients, *entry.values.shape), entry.mask.expand(clients, *entry.mask.shape)
            )
        return entry.expand(clients, *entry.shape)

    return {name: one(entry) for name, entry in message.items()}


def moved(message: Mapping[str, Entry], device: torch.device) -> Message:
    """The message on a device; what is there already is not copied.

    >>> moved({"w": torch.zeros(2)}, torch.device("cpu"))
    {'w': tensor([0., 0.])}
    """

    def one(entry: Entry) -> Entry:
        if isinstance(entry, PerClass):
            return PerClass(entry.values.to(device), entry.mask.to(device))
        return entry.to(device)

    return {name: one(entry) for name, entry in message.items()}


def table(message: Mapping[str, Entry], name: str) -> PerClass:
    """The entry `name`, which has to be one row per class."""
    entry = message[name]
    if not isinstance(entry, PerClass):
        raise TypeError(f"message entry '{name}' is a plain tensor, not one row per class")
    return entry


def tensor(message: Mapping[str, Entry], name: str) -> Tensor:
    """The entry `name`, which has to be a plain tensor."""
    entry = message[name]
    if isinstance(entry, PerClass):
        raise TypeError(f"message entry '{name}' is one row per class, not a plain tensor")
    return entry


def prefixed(prefix: str, weights: Mapping[str, Tensor]) -> Message:
    """Weights as message entries named `prefix/name`."""
    return {f"{prefix}/{name}": value for name, value in weights.items()}


def under(prefix: str, message: Mapping[str, Entry]) -> dict[str, Tensor]:
    """The plain tensors named `prefix/name`, without the prefix: the inverse of `prefixed`.

    >>> under("w", prefixed("w", {"fc.bias": torch.ones(2)}))
    {'fc.bias': tensor([1., 1.])}
    """
    return {name[len(prefix) + 1 :]: tensor(message, name) for name in message if name.startswith(prefix + "/")}


def pack(message: Mapping[str, Entry]) -> Packed:
    """One party's message (no client axis) as the tensors that travel: plain tensors as they are, of a PerClass the
    rows under the mask and their class numbers.

    >>> packed = pack({"proto": PerClass(torch.eye(3), torch.tensor([True, False, True]))})
    >>> {k: tuple(v.shape) for k, v in packed.items()}
    {'proto@rows': (2, 3), 'proto@classes': (2,)}
    """
    packed: Packed = {}
    for name, entry in message.items():
        if isinstance(entry, PerClass):
            packed[f"{name}@rows"] = entry.values[entry.mask].detach().cpu()
            packed[f"{name}@classes"] = entry.mask.nonzero().flatten().cpu().to(torch.uint16)
        else:
            packed[name] = entry.detach().cpu()
    return packed


def unpack(packed: Mapping[str, Tensor], classes: int) -> Message:
    """The message that `pack` was given, in a federation with so many classes. ValueError if nothing can have been
    packed like this; whether it is the message that was expected is not looked at.

    >>> message = unpack({"proto@rows": torch.ones(1, 2), "proto@classes": torch.tensor([2])}, classes=3)
    >>> table(message, "proto").mask
    tensor([False, False,  True])
    """
    message: Message = {}
    for name, value in packed.items():
        base, _, part = name.rpartition("@")
        if part == "rows" and base:
            message[base] = _spread(base, value, packed.get(f"{base}@classes"), classes)
        elif part != "classes" or f"{base}@rows" not in packed:
            message[name] = value
    return message


def _spread(name: str, sent: Tensor, numbers: Tensor | None, classes: int) -> PerClass:
    if numbers is None or numbers.is_floating_point() or numbers.dim() != 1 or sent.dim() < 1:
        raise ValueError(f"'{name}' has no list of class numbers")
    index = numbers.long()
    if len(index) != len(sent) or (len(index) and bool((index.diff() <= 0).any() | (index < 0).any())):
        raise ValueError(f"'{name}' has {len(sent)} rows for the classes {index.tolist()[:20]}")
    if len(index) and int(index[-1]) >= classes:
        raise ValueError(f"'{name}' has a row for class {int(index[-1])}, and there are {classes} classes")
    values, mask = sent.new_zeros(classes, *sent.shape[1:]), torch.zeros(classes, dtype=torch.bool)
    values[index], mask[index] = sent, True
    return PerClass(values, mask)


@dataclass(frozen=True)
class Cost:
    """What one message costs: floating-point numbers, and bytes with class numbers and all."""

    numbers: int
    bytes: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.numbers + other.numbers, self.bytes + other.bytes)


def cost(message: Mapping[str, Entry]) -> Cost:
    """The size of one party's packed message, without packing it.

    >>> cost({"proto": PerClass(torch.eye(3), torch.tensor([True, False, True]))})
    Cost(numbers=6, bytes=28)
    """
    numbers = size = 0
    for entry in message.values():
        if isinstance(entry, PerClass):
            sent = int(entry.mask.sum())
            floats = sent * entry.values[0].numel()
            numbers, size = numbers + floats, size + floats * entry.values.element_size() + 2 * sent
        else:
            numbers, size = numbers + entry.numel(), size + entry.numel() * entry.element_size()
    return Cost(numbers, size)


def flatten(message: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Plain tensors under plain names, for a checkpoint; `restore` undoes it."""
    flat: dict[str, Tensor] = {}
    for name, entry in message.items():
        if isinstance(entry, PerClass):
            flat[f"{name}@values"], flat[f"{name}@mask"] = entry.values, entry.mask
        else:
            flat[name] = entry
    return flat


def restore(flat: Mapping[str, Tensor]) -> Message:
    """The message that `flatten` was given.

    >>> restore(flatten({"bank": PerClass(torch.eye(2), torch.ones(2, dtype=torch.bool))}))["bank"].mask
    tensor([True, True])
    """
    message: Message = {}
    for name, value in flat.items():
        base, _, part = name.rpartition("@")
        if part == "values":
            message[base] = PerClass(value, flat[f"{base}@mask"])
        elif part != "mask":
            message[name] = value
    return message


def joined(messages: Sequence[Mapping[str, Entry]]) -> Message:
    """Messages that have a client axis, one after the other along it.

    >>> joined([{"w": torch.zeros(2, 3)}, {"w": torch.ones(1, 3)}])["w"].shape
    torch.Size([3, 3])
    """

    def one(name: str) -> Entry:
        if isinstance(messages[0][name], PerClass):
            tables = [table(m, name) for m in messages]
            return PerClass(torch.cat([e.values for e in tables]), torch.cat([e.mask for e in tables]))
        return torch.cat([tensor(m, name) for m in messages])

    return {name: one(name) for name in messages[0]}
