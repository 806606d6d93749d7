"""One look for all figures: colours that colour-blind people can tell apart, never colour alone, plain axes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedsap.report.colours import CLASSES, PALETTE

DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
PIXELS = 160  # per inch of a PNG

STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "0.45",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "xtick.color": "0.3",
    "ytick.color": "0.3",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "white",
    "savefig.dpi": PIXELS,
    "pdf.fonttype": 42,
    "figure.max_open_warning": 0,
}


@contextmanager
def style() -> Iterator[None]:
    """Figures made and saved inside have the look."""
    with matplotlib.rc_context(STYLE):
        yield


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def dash(number: int) -> Any:
    """Changes with every colour, and again when the colours are through.

    >>> dash(0), dash(1), dash(8)
    ('-', '--', '--')
    """
    return DASHES[(number + number // len(PALETTE)) % len(DASHES)]


def marker(number: int) -> str:
    """Changes with every colour, and is another one when a colour comes again.

    >>> marker(0), marker(1), marker(8)
    ('o', 's', 's')
    """
    return MARKERS[(number + number // len(PALETTE)) % len(MARKERS)]


def of_class(c: int) -> tuple[str, str]:
    """Colour and marker of a class."""
    return CLASSES[c % len(CLASSES)], marker(c // len(PALETTE))


def dot(label: str, c: int) -> Line2D:
    """A legend's entry for a class."""
    tint, shape = of_class(c)
    return Line2D([], [], linestyle="", marker=shape, color=tint, label=label)


def panels(
    number: int, size: tuple[float, float] | None = None, columns: int = 3, **kwargs: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of `number` panels of that size in inches, row by row; a panel that is alone is larger."""
    size = size or ((4.9, 2.8) if number == 1 else (3.3, 2.6))
    across = min(number, columns)
    down = -(-number // across)
    figure = Figure(figsize=(size[0] * across, size[1] * down + 0.35), layout="constrained")
    every = figure.subplots(down, across, squeeze=False, **kwargs)
    axes = [ax for row in every for ax in row]
    for ax in axes[number:]:
        ax.remove()
    return figure, axes[:number]


def legend(figure: Figure, handles: Sequence[Any], columns: int = 6) -> None:
    """One legend below all panels, for which the figure grows: panels keep their size."""
    if handles:
        wide = max(1, int(figure.get_figwidth() / 1.3))
        longest = max(len(str(h.get_label())) for h in handles)
        fit = max(1, int(figure.get_figwidth() * 13 / (longest + 8)))
        columns = min(columns, wide, fit, len(handles))
        figure.legend(handles=list(handles), loc="outside lower center", ncols=columns)
        rows = -(-len(handles) // columns)
        figure.set_figheight(figure.get_figheight() + 0.185 * (rows - 1))  # panels() has room for one


def line(label: str, number: int, **kwargs: Any) -> Line2D:
    """A legend's line."""
    return Line2D([], [], color=colour(number), linestyle=dash(number), marker=marker(number), label=label, **kwargs)


def save(figure: Figure, out: Path, name: str) -> list[Path]:
    """As PNG and PDF; the paths."""
    paths = [out / f"{name}.png", out / f"{name}.pdf"]
    for path in paths:
        figure.savefig(path, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
    return paths
