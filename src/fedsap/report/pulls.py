"""Figures of `eval.gradients`: how strongly each term of the loss pulls, and how far embeddings are from prototypes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedsap.report import look
from fedsap.report.study import Study, Variant, over_rounds

PREFIX = "gradient "


def figures(study: Study) -> Iterator[tuple[str, str, Figure]]:
    """File name, caption and figure of what the runs have."""
    some = [v for v in study.variants if terms(v)]
    if not some:
        return
    caption = (
        "Norm of the gradient of each term of the loss over the weights, mean over clients and seeds, "
        "at the start of the round that follows."
    )
    yield "gradients", caption, gradients(some)
    caption = (
        "Mean distance of test embeddings to the prototype of their class, as a share of their mean length; "
        "mean over clients and seeds."
    )
    yield "distances", caption, distances(study, some)


def terms(variant: Variant) -> list[str]:
    """The loss terms whose gradients were measured."""
    names = dict.fromkeys(name for run in variant.runs for name in run.noted if name.startswith(PREFIX))
    return [name.removeprefix(PREFIX) for name in names]


def gradients(variants: list[Variant]) -> Figure:
    """A panel per variant, a line per term."""
    figure, axes = look.panels(len(variants), sharey=True)
    every = list(dict.fromkeys(term for v in variants for term in terms(v)))
    for ax, v in zip(axes, variants, strict=True):
        for term in terms(v):
            curve = over_rounds(v.runs, f"noted:{PREFIX}{term}")
            there = curve.mean > 0  # a weight that is still zero has no place on a logarithmic axis
            ax.plot(np.array(curve.rounds)[there], curve.mean[there], **_style(every.index(term), len(curve.rounds)))
        ax.set(title=f"{v.label}\n{v.setting}", xlabel="round", yscale="log")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        spec = ax.get_subplotspec()
        if spec is None or spec.is_first_col():
            ax.set_ylabel("norm of the gradient")
    look.legend(figure, [look.line(term, number) for number, term in enumerate(every)])
    return figure


def _style(number: int, points: int) -> dict[str, Any]:
    tint, dash, shape = look.colour(number), look.dash(number), look.marker(number)
    return {"color": tint, "linestyle": dash, "marker": shape, "markevery": max(1, points // 8)}


def distances(study: Study, variants: list[Variant]) -> Figure:
    """A panel per setting, a line per variant."""
    settings = list(dict.fromkeys(v.setting for v in variants))
    figure, axes = look.panels(len(settings), sharey=True)
    seen: dict[str, Any] = {}
    for ax, setting in zip(axes, settings, strict=True):
        for v in (v for v in variants if v.setting == setting):
            apart, length = (over_rounds(v.runs, f"noted:{name}") for name in ("distance", "length"))
            number = study.labels.index(v.label)
            ax.plot(apart.rounds, apart.mean / length.mean, **_style(number, len(apart.rounds)))
            seen.setdefault(v.label, look.line(v.label, number))
        ax.set(title=setting, xlabel="round")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        spec = ax.get_subplotspec()
        if spec is None or spec.is_first_col():
            ax.set_ylabel("distance / length")
    look.legend(figure, list(seen.values()))
    return figure
