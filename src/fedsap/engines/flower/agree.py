"""Classes by name: what `cat` is to one node is `cat` to all, whatever their numbers in its folder."""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

import numpy as np

from fedsap.data import Dataset, Split
from fedsap.errors import UserError


def agree(told: Mapping[str, Sequence[str]], known: Sequence[str] = ()) -> tuple[str, ...]:
    """The classes of the federation from those that each node names. With `known` they are these, in this order, and
    a node that has another is a mistake. Otherwise all that any node has: in the order in which all nodes name them, if
    they name the same; else sorted.

    >>> agree({"a": ["cat", "dog"], "b": ["dog", "horse"]})
    ('cat', 'dog', 'horse')
    >>> agree({"a": ["Cat", "dog"], "b": ["cat", "dog"]})
    Traceback (most recent call last):
    fedsap.errors.UserError: classes: 'Cat' (a) and 'cat' (b) differ in letters' case or accents only; rename one
    """
    if known:
        for node, names in told.items():
            stranger(node, names, known)
        return tuple(known)
    first: dict[str, tuple[str, str]] = {}
    for node, names in told.items():
        for name in names:
            spelt, by = first.setdefault(_plain(name), (name, node))
            if spelt != name:
                raise UserError(
                    f"classes: '{spelt}' ({by}) and '{name}' ({node}) differ in letters' case or accents only; "
                    "rename one"
                )
    lists = {tuple(names) for names in told.values()}
    if len(lists) == 1:
        return lists.pop()
    return tuple(sorted({name for names in told.values() for name in names}))


def stranger(node: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Complains of a class that the federation does not have."""
    for name in names:
        if name not in known:
            near = get_close_matches(_plain(name), {_plain(k): k for k in known}, n=1, cutoff=0.6)
            hint = next((f"did you mean '{k}'?" for k in known if near and _plain(k) == near[0]), "")
            some = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
            raise UserError(f"classes: {node} has '{name}', and the federation has {some}; {hint or 'rename it'}")


def renumbered(data: Dataset, classes: Sequence[str]) -> Dataset:
    """The data set with the numbers that its classes have in `classes`.

    >>> from fedsap.data import load
    >>> digits = load("digits")
    >>> renumbered(digits, ("none", *digits.classes)).train.labels.min().item()
    1
    """
    if tuple(classes) == data.classes:
        return data
    stranger("this node", data.classes, classes)
    place = np.array([list(classes).index(name) for name in data.classes], np.int64)
    parts = (Split(s.images, place[s.labels]) for s in (data.train, data.test))
    return replace(data, train=next(parts), test=next(parts), classes=tuple(classes))


def _plain(name: str) -> str:
    """The name without case, accents and spaces at its ends."""
    taken_apart = unicodedata.normalize("NFKD", name.strip().casefold())
    return "".join(c for c in taken_apart if not unicodedata.combining(c))
