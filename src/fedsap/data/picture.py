"""A partition for the eye: rows for a table, and a map of clients and classes."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedsap.data.partition import Partition
from fedsap.errors import UserError

FORMATS = (".png", ".svg", ".pdf")


def table(partition: Partition, names: Sequence[str]) -> list[tuple[str, ...]]:
    """A heading and a row per client: its number, ways, shots (a range where they differ), samples, its classes' names.

    >>> from fedsap.data.partition import partition
    >>> split = partition([0, 1, 2] * 4, num_classes=3, clients=2, ways=2, shots=3, spread=0, seed=1)
    >>> for row in table(split, ["cat", "dog", "owl"]):
    ...     print(row)
    ('client', 'ways', 'shots', 'samples', 'classes')
    ('0', '2', '3', '6', 'cat, owl')
    ('1', '2', '3', '6', 'cat, dog')
    """
    _check_names(partition, names)
    rows: list[tuple[str, ...]] = [("client", "ways", "shots", "samples", "classes")]
    for client, (own, shots) in enumerate(zip(partition.classes, partition.shots, strict=True)):
        each = f"{min(shots)}" if min(shots) == max(shots) else f"{min(shots)}-{max(shots)}"
        held = "all" if len(own) == partition.num_classes else ", ".join(names[c] for c in own)
        rows.append((f"{client}", f"{len(own)}", each, f"{sum(shots)}", held))
    return rows


def picture(partition: Partition, names: Sequence[str], path: str | os.PathLike[str]) -> None:
    """Draw a row per client and a column per class; a dot's area and colour are the number of samples.

    Classes that nobody holds have grey names. `path` ends in .png, .svg or .pdf.
    """
    _check_names(partition, names)
    target = Path(path)
    if target.suffix not in FORMATS:
        raise UserError(f"picture: got {target.name}; takes a file name that ends in {', '.join(FORMATS)}")
    counts = partition.counts  # [Q, C]
    clients, classes = counts.shape
    rows, columns = np.nonzero(counts)
    values = counts[rows, columns]

    cell = float(np.interp(max(clients, classes), [10, 40, 100, 400], [0.34, 0.24, 0.18, 0.06]))  # inches
    longest = max(map(len, names))
    left, right, top, bottom = 0.6, 0.95, 0.55, 0.45 if longest <= 2 else 0.35 + 0.07 * longest
    size = (left + cell * classes + right, bottom + cell * clients + top)
    figure = Figure(figsize=size, facecolor="white")
    axes = figure.add_axes((left / size[0], bottom / size[1], cell * classes / size[0], cell * clients / size[1]))

    most = int(values.max())
    widest = 0.86 * cell * 72  # points
    scale = Normalize(-0.35 * most, 1.15 * most)  # keeps off the ends, too pale on white and too near to black

    def diameter(samples: int) -> float:
        return max(widest * math.sqrt(samples / most), 2.5)

    areas = [diameter(value) ** 2 for value in values.tolist()]
    axes.scatter(columns, rows, s=areas, c=values, cmap="viridis_r", norm=scale, linewidths=0, zorder=2)
    axes.set_xlim(-0.5, classes - 0.5)
    axes.set_ylim(clients - 0.5, -0.5)
    step = math.ceil(0.13 / cell)  # keeps the labels of very many clients or classes apart
    axes.set_xticks(range(0, classes, step), names[::step], rotation=0 if longest <= 2 else 90, fontsize=8)
    for label, held in zip(axes.get_xticklabels(), counts.sum(axis=0)[::step], strict=True):
        label.set_color("black" if held else "0.7")
    axes.set_yticks(range(0, clients, step), [f"{client}" for client in range(0, clients, step)], fontsize=8)
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[:].set_color("0.8")
    axes.set_xlabel("class", fontsize=9)
    axes.set_ylabel("client", fontsize=9)
    shared = f"{partition.overlap:,}" if partition.overlap else "none"
    title = f"{partition.rule}, seed {partition.seed}\n{values.sum():,} samples, {shared} shared"
    axes.set_title(title, loc="left", fontsize=9)

    colours = colormaps["viridis_r"]
    marks = [
        Line2D(
            [], [], linestyle="", marker="o", markersize=diameter(mark), color=colours(scale(mark)), label=f"{mark:,}"
        )
        for mark in _marks(values.tolist())
    ]
    axes.legend(
        handles=marks,
        title="samples",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8,
        title_fontsize=8,
        handlelength=widest / 8,
        labelspacing=max(0.4, widest / 8 - 0.4),
    )
    figure.savefig(target, dpi=150)


def _marks(values: list[int]) -> list[int]:
    """At most four numbers of samples for the legend: all that occur, or an even spread of sizes up to the largest."""
    occurring = sorted(set(values))
    if len(occurring) <= 4:
        return occurring
    low, high = max(occurring[0], occurring[-1] / 20), occurring[-1]
    return sorted({round(mark) for mark in np.geomspace(low, high, 4).tolist()})


def _check_names(partition: Partition, names: Sequence[str]) -> None:
    if len(names) != partition.num_classes:
        raise UserError(f"names: got {len(names)} class names; takes {partition.num_classes}, one per class")
