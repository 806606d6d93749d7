"""Results as tables of text."""

from collections.abc import Sequence

from fedsap.methods import METHODS
from fedsap.runs import Row
from fedsap.show import count, percent

COLUMNS = {"head": "head", "head_own": "head, own classes", "proto": "prototype L2", "proto_cos": "prototype cosine"}


def markdown(entries: Sequence[Row]) -> str:
    """A table of methods: accuracy in per cent, mean and standard deviation over seeds (over clients with one seed)."""
    heads = ["data", "method", *COLUMNS.values(), "silhouette", "numbers up / round", "seconds"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for e in entries:
        spread = "std" if len(e["seeds"]) > 1 else "std_clients"
        cells = [e["dataset"], METHODS[e["method"]].title]
        cells += [percent(e[f"{k}_acc"]["mean"], e[f"{k}_acc"][spread]) for k in COLUMNS]
        cells += ["-" if e["silhouette"] is None else f"{e['silhouette']:.2f}"]
        cells += [count(e["comm"]["up"]["numbers"]), f"{e['seconds']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
