"""Who trains on what: one split of a training set among clients, drawn from a seed, with a hash to compare it by."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsap.data import deal
from fedsap.errors import UserError
from fedsap.files import write

Rule = Literal["fedproto", "normal", "dirichlet", "pathological", "iid"]
Slices = Literal["cursor", "stride"]


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of Q clients. Two partitions are equal when their hashes are.

    classes: per client, the classes it holds, sorted.
    shots: per client, the number of samples of each, in that order.
    indices: per client, the places of its samples in the training split, class after class in that order.
    pools: per client, the places of its samples without labels; empty if there are none (`data.unlabelled`).
    """

    rule: str
    seed: int
    num_classes: int
    classes: tuple[tuple[int, ...], ...]
    shots: tuple[tuple[int, ...], ...]
    indices: tuple[NDArray[np.int64], ...]
    pools: tuple[NDArray[np.int64], ...] = ()

    @property
    def clients(self) -> int:
        """Q."""
        return len(self.classes)

    @property
    def counts(self) -> NDArray[np.int64]:
        """[Q, C] samples of each client and class."""
        counts = np.zeros((self.clients, self.num_classes), dtype=np.int64)
        for row, own, shots in zip(counts, self.classes, self.shots, strict=True):
            row[list(own)] = shots
        return counts

    @property
    def overlaps_by_class(self) -> dict[int, int]:
        """For each class with shared samples, how many assignments there are beyond the first of each sample."""
        samples: dict[int, list[NDArray[np.int64]]] = {}
        for own, shots, indices in zip(self.classes, self.shots, self.indices, strict=True):
            for c, part in zip(own, np.split(indices, np.cumsum(shots)[:-1]), strict=True):
                samples.setdefault(c, []).append(part)
        beyond = {c: sum(map(len, parts)) - len(np.unique(np.concatenate(parts))) for c, parts in samples.items()}
        return {c: beyond[c] for c in sorted(beyond) if beyond[c]}

    @property
    def overlap(self) -> int:
        """How many (client, sample) assignments there are beyond the first of each sample; 0 means disjoint."""
        return sum(self.overlaps_by_class.values())

    @property
    def pool_overlap(self) -> int:
        """How many samples of the pools another client has too, with or without label, counted as `overlap` is."""
        if not self.pools:
            return 0
        every = np.concatenate([*self.indices, *self.pools])
        return len(every) - len(np.unique(every)) - self.overlap

    @property
    def hash(self) -> str:
        """sha256, 64 hexadecimal digits, over rule, seed, number of classes, classes, shots, indices and pools."""
        text = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Partition) and self.hash == other.hash

    def __hash__(self) -> int:
        return int(self.hash[:15], 16)

    def _content(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "seed": self.seed,
            "num_classes": self.num_classes,
            "classes": [list(own) for own in self.classes],
            "shots": [list(own) for own in self.shots],
            "indices": [own.tolist() for own in self.indices],
        } | ({"pools": [own.tolist() for own in self.pools]} if self.pools else {})

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain lists, numbers and strings, ready for JSON."""
        beyond = {str(c): count for c, count in self.overlaps_by_class.items()}
        shared = {"pool_overlap": self.pool_overlap} if self.pools else {}
        return self._content() | {"overlap": self.overlap, "overlaps_by_class": beyond, **shared, "hash": self.hash}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. What follows from the rest is worked out again, and the hash is compared."""
        try:
            made = cls(
                rule=str(content["rule"]),
                seed=int(content["seed"]),
                num_classes=int(content["num_classes"]),
                classes=tuple(tuple(map(int, own)) for own in content["classes"]),
                shots=tuple(tuple(map(int, own)) for own in content["shots"]),
                indices=tuple(np.asarray(own, dtype=np.int64) for own in content["indices"]),
                pools=tuple(np.asarray(own, dtype=np.int64) for own in content.get("pools", ())),
            )
            expected = str(content["hash"])
        except KeyError as error:
            raise UserError(f"partition: has no entry {error}; takes what Partition.save writes") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"partition: got an entry that does not fit ({error}); takes what save writes") from None
        if made.hash != expected:
            raise UserError(
                f"partition: its content hashes to {made.hash[:16]} and it says {expected[:16]}; "
                "takes a file as Partition.save wrote it"
            )
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON. Whoever reads `path` finds all of it or what was there before, whenever the process dies."""
        write(Path(path), json.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote."""
        try:
            content = json.loads(Path(path).read_text(encoding="ascii"))
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; takes a partition file") from None
        except ValueError:
            raise UserError(f"{path}: not JSON; takes a partition file, as Partition.save writes it") from None
        if not isinstance(content, dict):
            raise UserError(f"{path}: got a {type(content).__name__}; takes a partition file")
        try:
            return cls.from_dict(content)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def partition(
    labels: ArrayLike,
    *,
    num_classes: int,
    rule: Rule = "fedproto",
    clients: int = 20,
    ways: int = 3,
    shots: int = 100,
    spread: int = 1,
    seed: int = 1234,
    vary_shots: bool = True,
    slices: Slices = "cursor",
    stride: int = 110,
    shuffle: bool = True,
    alpha: float = 0.1,
    min_samples: int = 10,
) -> Partition:
    """Split a training set among clients.

    labels: [N] the class of each sample, 0 <= label < num_classes; every class occurs.
    rule: `fedproto` n-way k-shot, n and k uniform integers within `spread` of `ways` and `shots`.
        `normal` n-way k-shot, n and k normal with standard deviation `spread`, rounded.
        `dirichlet` every sample dealt, per-class proportions from Dirichlet(`alpha`), at least `min_samples` a client.
        `pathological` every sample dealt, `ways` classes for a client. `iid` every sample dealt at random.
    vary_shots: for the n-way k-shot rules; without it k = `shots` for everybody (k is one number a client either way).
    slices: for the n-way k-shot rules. `cursor` hands a class out from client to client, again from its start when it
        is used up.
        `stride` gives client i the samples from i * `stride` on, always in the order of the file.
    shuffle: the order of the samples within a class is drawn from the seed; without it, the order of the file.

    >>> split = partition([0, 1, 2] * 4, num_classes=3, clients=2, ways=2, shots=3, spread=0, seed=1, shuffle=False)
    >>> split.classes, split.shots
    (((0, 2), (0, 1)), ((3, 3), (3, 3)))
    >>> [own.tolist() for own in split.indices], split.overlap
    ([[0, 3, 6, 2, 5, 8], [9, 0, 3, 1, 4, 7]], 2)
    """
    _choice("rule", rule, get_args(Rule))
    _choice("slices", slices, get_args(Slices))
    _whole("num_classes", num_classes, 2)
    _whole("clients", clients, 1)
    _whole("ways", ways, 1, num_classes)
    _whole("shots", shots, 1)
    _whole("spread", spread, 0)
    _whole("seed", seed, 0, 2**32 - 1)
    _whole("stride", stride, 1)
    _whole("min_samples", min_samples, 1)
    if not 0 < alpha < float("inf"):
        raise UserError(f"partition.alpha: got {alpha}; takes a number above 0")
    in_file_order = not shuffle or (slices == "stride" and rule in ("fedproto", "normal"))
    pools = deal.class_pools(_checked(labels, num_classes), num_classes, seed, shuffle=not in_file_order)
    if rule == "dirichlet":
        holdings = deal.dirichlet(pools, clients, alpha, min_samples, seed)
    elif rule == "pathological":
        holdings = deal.pathological(pools, clients, ways, seed)
    elif rule == "iid":
        holdings = deal.iid(pools, clients, seed)
    else:
        counts = deal.fedproto_counts if rule == "fedproto" else deal.normal_counts
        n, k = counts(clients, num_classes, ways, shots, spread, seed, vary_shots)
        classes = deal.class_lists(n, num_classes, seed)
        if slices == "cursor":
            holdings = deal.by_cursor(pools, classes, k)
        else:
            holdings = deal.by_stride(pools, classes, k, stride)
    return Partition(
        rule=rule,
        seed=int(seed),
        num_classes=int(num_classes),
        classes=tuple(tuple(sorted(held)) for held in holdings),
        shots=tuple(tuple(held[c].size for c in sorted(held)) for held in holdings),
        indices=tuple(np.concatenate([held[c] for c in sorted(held)]) for held in holdings),
    )


def _checked(labels: ArrayLike, num_classes: int) -> NDArray[np.integer]:
    """labels as an array [N] in which every class from 0 to C - 1 occurs and no other."""
    array = np.asarray(labels)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"labels: got {array.dtype} of shape {list(array.shape)}; takes whole numbers of shape [N]")
    if array.size and (array.min() < 0 or array.max() >= num_classes):
        wrong = array.min() if array.min() < 0 else array.max()
        raise UserError(f"labels: got class {wrong}; takes 0 to {num_classes - 1}, as there are {num_classes} classes")
    empty = np.flatnonzero(np.bincount(array, minlength=num_classes) == 0)
    if empty.size:
        raise UserError(f"labels: class {empty[0]} of {num_classes} has no sample; takes at least one of each class")
    return array


def _whole(key: str, value: int, low: int, high: int | None = None) -> None:
    bounds = f"from {low} to {high}" if high is not None else f"of {low} or more"
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        raise UserError(f"partition.{key}: got {value!r}; takes a whole number {bounds}")


def _choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"partition.{key}: got {value!r}; takes {', '.join(choices)}")
