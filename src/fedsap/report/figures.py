"""The figures of a report, drawn with matplotlib: what the runs have, and nothing else."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedsap.report import look, pulls
from fedsap.report.layout import Layout, Layouts
from fedsap.report.read import RunData
from fedsap.report.study import (
    POOL,
    SHAPES,
    SHARES,
    Study,
    Sweep,
    Variant,
    last,
    over_rounds,
    shares_prototypes,
    sweeps,
)  # fmt: skip
from fedsap.schedules import Schedule

Drawing = tuple[str, str, Figure]  # file name, caption, figure
MEASURES = {"head": "Head accuracy", "proto": "Prototype accuracy"}
PANELS = 12  # in one figure


def figures(study: Study, layouts: Layouts) -> Iterator[Drawing]:
    """All figures that the runs have something for, one at a time."""
    for measure, say in MEASURES.items():
        caption = f"{say} over rounds, mean over clients and seeds; the band is one standard deviation over seeds."
        for number, part in enumerate(_parts([s.label for s in study.settings])):
            yield _name(f"convergence-{measure}", number), caption, convergence(study, measure, part)
    shaped = [s.label for s in study.settings if any(_known(v, "silhouette") for v in study.of(s.label))]
    for number, part in enumerate(_parts(shaped)):
        caption = (
            "Silhouette (cosine) of all clients' embeddings over rounds; vertical lines mark where a phase begins, and "
            "dotted ones where FedSAP's alignment weight starts to rise."
        )
        yield _name("silhouette", number), caption, convergence(study, "silhouette", part)
    for name in POOL:
        measure = f"unlabelled:{name}"
        taught = [s.label for s in study.settings if any(_known(v, measure) for v in study.of(s.label))]
        for number, part in enumerate(_parts(taught)):
            caption = f"Unlabelled samples: {POOL[name].lower()} over rounds, mean over clients and seeds."
            yield _name(f"pool-{name.replace('_', '-')}", number), caption, convergence(study, measure, part)
    over = [s.label for s in study.settings if any(v.finished for v in study.of(s.label))]
    for number, part in enumerate(_parts(over)):
        caption = "Head accuracy of each client in the last round, all seeds; the line in a box is the median."
        yield _name("clients", number), caption, per_client(study, part)
    for number, part in enumerate(_parts([s.label for s in study.settings])):
        yield (
            _name("partition", number),
            "Who holds what: samples of each class at each client.",
            partitions(study, part),
        )
    yield from _studies(study)
    yield from pulls.figures(study)
    for number, setting in enumerate(dict.fromkeys(setting for setting, _ in layouts)):
        mine = {label: rounds for (s, label), rounds in layouts.items() if s == setting and rounds}
        if mine:
            stars = "Stars are the prototypes of the server."
            caption = f"t-SNE of embeddings after the last kept round, {setting}; colours are classes. {stars}"
            yield _name("tsne-methods", number), caption, side_by_side(study, setting, mine)
        if any(len(rounds) > 1 for rounds in mine.values()):
            caption = f"t-SNE of embeddings over rounds, {setting}; colours are classes. {stars}"
            several = {label: rounds for label, rounds in mine.items() if len(rounds) > 1}
            yield _name("tsne-rounds", number), caption, progression(study, setting, several)


def _parts(settings: Sequence[str]) -> list[list[str]]:
    return [list(settings[i : i + PANELS]) for i in range(0, len(settings), PANELS)]


def _name(name: str, number: int) -> str:
    return name if number == 0 else f"{name}-{number + 1}"


def _known(variant: Variant, measure: str) -> bool:
    return bool((~np.isnan(over_rounds(variant.runs, measure).mean)).any())


def number_of(study: Study, label: str) -> int:
    """A method's number, which its colour, dash and marker follow: the same in all figures."""
    return study.labels.index(label)


def convergence(study: Study, measure: str, settings: Sequence[str]) -> Figure:
    """A measure over rounds, a panel per setting."""
    figure, axes = look.panels(len(settings), sharey=True)
    seen: dict[str, Any] = {}
    unit, scale = _unit(measure)
    for ax, setting in zip(axes, settings, strict=True):
        marks: dict[int, tuple[str, str]] = {}
        for v in study.of(setting):
            if measure == "proto" and not shares_prototypes(v.method):
                continue
            curve, number = over_rounds(v.runs, measure), number_of(study, v.label)
            mean, std = scale * curve.mean, scale * curve.std
            if np.isnan(mean).all():
                continue
            every = max(1, len(curve.rounds) // 8)
            style: dict[str, Any] = {
                "color": look.colour(number),
                "linestyle": look.dash(number),
                "marker": look.marker(number),
            }
            ax.plot(curve.rounds, mean, markevery=every, label=v.label, **style)
            if len(v.runs) > 1:
                ax.fill_between(curve.rounds, mean - std, mean + std, color=look.colour(number), alpha=0.18, lw=0)
            seen.setdefault(v.label, look.line(v.label, number))
            marks |= _marks(v.runs[0], look.colour(number), alignment=measure == "silhouette")
        for t, (say, tint) in marks.items():
            ax.axvline(t, color=tint, linestyle=":" if "alignment" in say else "-", linewidth=1, alpha=0.8)
            ax.annotate(say, (t, 1), xycoords=("data", "axes fraction"), xytext=(3, -2), textcoords="offset points",
                        fontsize=7, color="0.3", va="top", rotation=90)  # fmt: skip
        ax.set(title=setting, xlabel="round")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _first_column(axes, unit)
    look.legend(figure, [seen[label] for label in study.labels if label in seen])
    return figure


def _unit(measure: str) -> tuple[str, float]:
    """The label of a measure's axis, and what its values are multiplied by."""
    if measure == "silhouette":
        return "silhouette (−1 to 1)", 1.0
    name = measure.removeprefix("unlabelled:")
    if name == measure:
        return f"{MEASURES[measure].lower()}, %", 100.0
    return (f"{POOL[name].lower()}, %", 100.0) if name in SHARES else (f"{POOL[name].lower()} (cosine)", 1.0)


def _marks(run: RunData, tint: str, alignment: bool) -> dict[int, tuple[str, str]]:
    """Rounds at which something begins: name and colour."""
    marks = {t: (name, "0.3") for name, t in run.phases[1:]}
    options = run.config["method"]
    if not alignment:
        return marks
    if run.method == "fedsap" and options.get("schedule_shape") != "constant" and options.get("align_top"):
        start = options.get("align_start")
        marks[int(run.config["train"]["rounds"]) // 5 if start is None else int(start)] = ("alignment begins", tint)
    return marks


def _first_column(axes: Sequence[Axes], label: str) -> None:
    """A y label for the panels at the left edge."""
    for ax in axes:
        spec = ax.get_subplotspec()
        if spec is None or spec.is_first_col():
            ax.set_ylabel(label)


def per_client(study: Study, settings: Sequence[str]) -> Figure:
    """Clients' head accuracies, a panel per setting, a box with its points per method."""
    most = max(len(study.of(s)) for s in settings)
    wide = most > 6
    figure, axes = look.panels(
        len(settings), (8.5 if wide else max(3.3, 0.75 * most + 0.8), 2.7), 1 if wide else 3, sharey=True
    )
    rng = np.random.default_rng(0)
    for ax, setting in zip(axes, settings, strict=True):
        variants = [v for v in study.of(setting) if v.finished]
        for place, v in enumerate(variants):
            values = 100 * np.concatenate([run.accuracy["head"][-1] for run in v.finished])
            values = values[~np.isnan(values)]
            tint = look.colour(number_of(study, v.label))
            line = {"color": tint, "linewidth": 1.4}
            ax.boxplot(values, positions=[place], widths=0.55, showfliers=False, boxprops=line, whiskerprops=line,
                       capprops=line, medianprops={"color": tint, "linewidth": 2.4})  # fmt: skip
            near = place + rng.uniform(-0.16, 0.16, len(values))
            ax.scatter(near, values, s=7, color=tint, alpha=0.45, linewidths=0, zorder=3)
        turned = max((len(v.label) for v in variants), default=0) > 8
        names = [v.label.replace(" (", "\n(") for v in variants]
        ax.set_xticks(
            range(len(variants)),
            names,
            rotation=(35 if wide else 20) if turned else 0,
            ha="right" if turned else "center",
        )
        ax.set(title=setting, xlim=(-0.6, len(variants) - 0.4))
        ax.grid(axis="x", visible=False)
    _first_column(axes, "head accuracy of a client, %")
    return figure


def partitions(study: Study, settings: Sequence[str]) -> Figure:
    """Samples of each class at each client, a panel per setting; that of the first seed."""
    firsts = [study.of(s)[0].runs[0] for s in settings]
    shape = [(len(run.partition["classes"]), len(run.classes)) for run in firsts]
    tall, wide = max(q for q, _ in shape), max(c for _, c in shape)
    size = (float(np.clip(0.27 * wide, 2.6, 5.5)) + 0.9, float(np.clip(0.17 * tall, 1.8, 5)) + 0.9)
    figure, axes = look.panels(len(settings), size, 3)
    for ax, setting, run in zip(axes, settings, firsts, strict=True):
        counts = np.zeros((len(run.partition["classes"]), len(run.classes)))
        for client, (own, shots) in enumerate(zip(run.partition["classes"], run.partition["shots"], strict=True)):
            counts[client, own] = shots
        shown = ax.imshow(np.where(counts > 0, counts, np.nan), aspect="auto", cmap="viridis_r", vmin=0)
        few = len(run.classes) <= 20
        names = run.classes if few else [str(c) for c in range(0, len(run.classes), 10)]
        longest = max(map(len, names))
        ax.set_xticks(range(0, len(run.classes), 1 if few else 10), names, rotation=45 if longest > 2 else 0,
                      ha="right" if longest > 2 else "center")  # fmt: skip
        ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        ax.set(title=f"{setting}\nseed {run.seed}", xlabel="class", ylabel="client")
        ax.grid(visible=False)
        figure.colorbar(shown, ax=ax, label="samples", shrink=0.85).ax.grid(visible=False)
    return figure


def _studies(study: Study) -> Iterator[Drawing]:
    """What was varied on purpose."""
    shots = sweeps(study, "partition.shots")
    if shots:
        caption = "Head accuracy against k, the number of samples per class and client; bars: std over seeds."
        yield "shots", caption, swept(study, shots, ("head",), "k (samples per class and client)", log=True)
    shapes = sweeps(study, "method.schedule_shape")
    if shapes:
        caption = (
            "Left: the alignment weight over rounds, by schedule shape. "
            "Right: prototype accuracy with it; bars: std over seeds."
        )
        yield "schedules", caption, schedule_shapes(shapes)
    starts = sweeps(study, "method.align_start")
    if starts:
        caption = "Prototype accuracy against the round from which the alignment weight rises; bars: std over seeds."
        yield "start", caption, swept(study, starts, ("proto",), "start round of the ramp")
    scales = sweeps(study, "method.proxy_scale")
    if scales:
        caption = "Head and prototype accuracy against the proxy scale s; bars: std over seeds."
        yield "scale", caption, swept(study, scales, ("head", "proto"), "proxy scale s", log=True)


def swept(study: Study, found: Sequence[Sweep], measures: Sequence[str], label: str, log: bool = False) -> Figure:
    """Accuracy against the value that was varied, a panel per setting, a line per method and measure."""
    settings = list(dict.fromkeys(s.setting for s in found))
    figure, axes = look.panels(len(settings), sharey=True)
    names = list(dict.fromkeys(s.label for s in found))
    handles: dict[str, Any] = {}
    for ax, setting in zip(axes, settings, strict=True):
        values: set[float] = set()
        for one in (s for s in found if s.setting == setting):
            for m, measure in enumerate(measures):
                number = number_of(study, one.label) if one.label in study.labels else names.index(one.label)
                number += m
                say = one.label if len(measures) == 1 else f"{one.label}, {MEASURES[measure].lower()}"
                x = [float(value) for value, _ in one.points]
                scores = [last(runs, measure) for _, runs in one.points]
                y = [np.nan if s.mean is None else 100 * s.mean for s in scores]
                bars = [100 * (s.std or 0.0) for s in scores]
                ax.errorbar(x, y, yerr=bars, capsize=3, color=look.colour(number), linestyle=look.dash(number),
                            marker=look.marker(number))  # fmt: skip
                handles.setdefault(say, look.line(say, number))
                values |= set(x)
        if log and min(values) > 0:
            ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(values), [f"{v:g}" for v in sorted(values)])
        ax.minorticks_off()
        ax.set(title=setting, xlabel=label)
    _first_column(axes, _unit(measures[0])[0] if len(measures) == 1 else "accuracy, %")
    look.legend(figure, list(handles.values()))
    return figure


def schedule_shapes(found: Sequence[Sweep]) -> Figure:
    """The shapes of the weight, then a panel of bars per setting."""
    figure, axes = look.panels(len(found) + 1)
    first = found[0]
    for value, runs in first.points:
        options, rounds = runs[0].config["method"], int(runs[0].config["train"]["rounds"])
        start = rounds // 5 if options["align_start"] is None else options["align_start"]
        end = rounds if options["align_end"] is None else options["align_end"]
        weight = Schedule(value, start, end, options["align_top"])
        number = SHAPES.index(value)
        t = list(range(1, rounds + 1))
        axes[0].plot(t, [weight(i) for i in t], color=look.colour(number), linestyle=look.dash(number), label=value)
    axes[0].set(title="Alignment weight", xlabel="round", ylabel="weight")
    axes[0].legend()
    for ax, one in zip(axes[1:], found, strict=True):
        scores = [last(runs, "proto") for _, runs in one.points]
        heights = [np.nan if s.mean is None else 100 * s.mean for s in scores]
        bars = [100 * (s.std or 0.0) for s in scores]
        names = [str(value) for value, _ in one.points]
        tints = [look.colour(SHAPES.index(name)) for name in names]
        for place, tint in enumerate(tints):  # points: bars would have to begin at 0
            ax.errorbar(
                [place],
                heights[place],
                yerr=bars[place],
                color=tint,
                marker=look.marker(place),
                capsize=3,
                markersize=6,
            )
        ax.set_xticks(range(len(names)), names)
        ax.set(title=one.setting, ylabel="prototype (L2) accuracy, %", xlim=(-0.5, len(names) - 0.5))
        ax.grid(axis="x", visible=False)
    return figure


def scatter(ax: Axes, layout: Layout) -> None:
    """Embeddings by class, prototypes as stars."""
    for c in np.unique(layout.labels).tolist():
        here = layout.labels == c
        tint, shape = look.of_class(c)
        ax.scatter(
            layout.points[here, 0],
            layout.points[here, 1],
            s=9,
            color=tint,
            marker=shape,
            alpha=0.75,
            linewidths=0.25,
            edgecolors="0.3",
        )
    for c, at in zip(layout.classes.tolist(), layout.stars, strict=True):
        ax.scatter(
            at[0], at[1], s=130, marker="*", color=look.of_class(c)[0], edgecolors="black", linewidths=0.9, zorder=3
        )
    ax.set(xlim=(-1.08, 1.08), ylim=(-1.08, 1.08), xticks=[], yticks=[], aspect="equal")
    ax.spines[:].set_visible(True)
    ax.spines[:].set_color("0.85")


def _classes(figure: Figure, layouts: Sequence[Layout], names: Sequence[str]) -> None:
    """A legend of classes, if they are few."""
    present = sorted({c for layout in layouts for c in layout.labels.tolist()})
    if len(present) <= 20:
        handles = [look.dot(names[c], c) for c in present]
        look.legend(figure, handles, columns=10)


def side_by_side(study: Study, setting: str, mine: dict[str, list[Layout]]) -> Figure:
    """Methods next to each other, each after its last kept round."""
    figure, axes = look.panels(len(mine), (2.5, 2.6), 4)
    for ax, (label, rounds) in zip(axes, mine.items(), strict=True):
        scatter(ax, rounds[-1])
        ax.set_title(f"{label}, round {rounds[-1].round}")
    _classes(figure, [rounds[-1] for rounds in mine.values()], study.of(setting)[0].runs[0].classes)
    return figure


def progression(study: Study, setting: str, mine: dict[str, list[Layout]]) -> Figure:
    """A row per method, a column per round."""
    every = sorted({layout.round for rounds in mine.values() for layout in rounds})
    figure, axes = look.panels(len(mine) * len(every), (2.1, 2.15), len(every))
    for row, (label, rounds) in enumerate(mine.items()):
        at = {layout.round: layout for layout in rounds}
        for column, t in enumerate(every):
            ax = axes[row * len(every) + column]
            if t in at:
                scatter(ax, at[t])
            else:
                ax.set_axis_off()
            if row == 0:
                ax.set_title(f"round {t}")
            if column == 0:
                ax.set_ylabel(label)
    _classes(figure, [layout for rounds in mine.values() for layout in rounds], study.of(setting)[0].runs[0].classes)
    return figure


def draw(
    study: Study, layouts: Layouts, out: Path, on_figure: Callable[[str], None] = lambda _: None
) -> list[tuple[str, str]]:
    """Writes every figure as PNG and PDF; their names and captions."""
    out.mkdir(parents=True, exist_ok=True)
    done = []
    with look.style():
        for name, caption, figure in figures(study, layouts):
            look.save(figure, out, name)
            on_figure(name)
            done.append((name, caption))
    return done
