"""What a run looks like in a terminal: progress on standard error, tables on standard output."""

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from fedsap.methods import METHODS
from fedsap.report.tables import Table as Cells
from fedsap.runs import Row

Entry = dict[str, Any]


def percent(value: float | None, spread: float | None = None) -> str:
    """A share of 1 in per cent, with its spread if there is one.

    >>> percent(0.8767), percent(0.5, 0.012), percent(None)
    ('87.7', '50.0±1.2', '-')
    """
    if value is None:
        return "-"
    return f"{100 * value:.1f}" + (f"±{100 * spread:.1f}" if spread is not None else "")


def count(value: float) -> str:
    """A count for people.

    >>> count(3000), count(11181642), count(0)
    ('3.0 k', '11.2 M', '0')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f} {letter}"
    return f"{value:.0f}"


def results(entries: Sequence[Entry]) -> Table:
    """The table of methods."""
    seeds = max(len(e["seeds"]) for e in entries)
    over = f"{seeds} seeds" if seeds > 1 else "clients"
    table = Table(
        title=f"Accuracy in %, mean ± std over {over}, after the last round",
        caption="head: argmax over all classes; own: over the client's classes; L2, cos: nearest prototype; "
        "sil: silhouette; up: numbers that all clients together send in a round; s: seconds",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        padding=(0, 1, 0, 0),
    )
    table.add_column("method", no_wrap=True)
    for name in ("head", "own", "L2", "cos", "sil", "up", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for e in entries:
        spread = "std" if len(e["seeds"]) > 1 else "std_clients"
        cells = [
            percent(e[f"{k}_acc"]["mean"], e[f"{k}_acc"][spread]) for k in ("head", "head_own", "proto", "proto_cos")
        ]
        shape = "-" if e["silhouette"] is None else f"{e['silhouette']:.2f}"
        table.add_row(
            METHODS[e["method"]].title, *cells, shape, count(e["comm"]["up"]["numbers"]), f"{e['seconds']:.1f}"
        )
    return table


def privacy(entry: Entry) -> str | None:
    """What an entry's epsilon says, and of what.

    >>> spent = {"epsilon": 9.608, "releases": 60, "delta": 1e-05, "source": "seed"}
    >>> privacy({"method": "fedsap", "privacy": spent})
    'FedSAP: epsilon 9.61 at delta 1e-05 for all images of a client, from whoever does not know the seed'
    """
    found = entry.get("privacy")
    if found is None:
        return None
    title, after = METHODS[entry["method"]].title, f"at delta {found['delta']:g}"
    if "epsilon_if_fixed" in found:
        return (
            f"{title}: no guarantee; epsilon {found['epsilon_if_fixed']:.2f} {after} if the network had seen no image"
        )
    whom = ", from whoever does not know the seed" if found["source"] == "seed" else ""
    return f"{title}: epsilon {found['epsilon']:.2f} {after} for all images of a client{whom}"


def table(found: Cells) -> Table:
    """A table of the report. What it has in bold is bold here too, with a tick; where all groups of columns have the
    same names, they stand below each other, since a terminal is narrow."""
    groups = list(dict.fromkeys(group for group, _ in found.heads[found.labels :]))
    names = [[name for group, name in found.heads if group == one] for one in groups]
    below = len(groups) > 1 and all(groups) and all(some == names[0] for some in names)
    labels = [name for _, name in found.heads[: found.labels]]
    if below:
        heads = [*labels, "", *names[0]]
    else:
        heads = [*labels, *(f"{group}, {name}" if group else name for group, name in found.heads[found.labels :])]
    shown = Table(
        title=escape(found.title),
        caption=escape(found.caption),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for number, name in enumerate(heads):
        shown.add_column(name, justify="left" if number < found.labels + below else "right", overflow="fold")
    width = len(names[0])
    for block in found.blocks:
        if block.title:
            shown.add_row(f"[italic]{escape(block.title)}[/]")
        for row in block.rows:
            cells = [f"[bold]{escape(c.text)} ✓[/]" if c.best else escape(c.text) for c in row]
            if not below:
                shown.add_row(*cells)
                continue
            for number, group in enumerate(groups):
                start = found.labels + number * width
                own = cells[start : start + width]
                if any(cell != "–" for cell in own):
                    shown.add_row(*cells[: found.labels], escape(group), *own)
        shown.add_section()
    return shown


def steps(found: Row) -> Table:
    """The table of `fedsap bench`."""
    table = Table(
        title=f"{found['model']}, {found['dataset']}, batch {found['batch']}, {found['device']}, "
        f"{found['threads']} threads, torch {found['torch']}",
        caption="ms: a step of all clients; floor: the time to move all weights that meet data as often as a step must",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("clients", "way", "ms", "ratio", "client steps/s", "of the floor", "memory"):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    for row in found["rows"]:
        memory = "-" if row["memory"] is None else f"{row['memory'] / 1e9:.1f} GB"
        table.add_row(
            str(row["clients"]), row["way"], f"{row['ms']:.2f}", f"{row['ratio']:.1f}x",
            f"{row['client_steps_per_second']:,.0f}", f"{100 * row['share_of_floor']:.0f}%", memory,
        )  # fmt: skip
    return table


def parts(found: Row) -> str:
    """What `fedsap bench run` says.

    >>> print(parts({"seconds": 3.0, "parts": {"training": 2.0, "everything else": 1.0}}))
    3.00 s from the start of the process to results on disk
      training           2.00 s   67%
      everything else    1.00 s   33%
    """
    lines = [f"{found['seconds']:.2f} s from the start of the process to results on disk"]
    for name, seconds in found["parts"].items():
        lines.append(f"  {name:<16}{seconds:7.2f} s {100 * seconds / found['seconds']:4.0f}%")
    return "\n".join(lines)


class Progressing:
    """Follows the rounds of `runs` runs that go together: in a terminal a live line with round and time left, and
    losses and accuracies below it; elsewhere a plain line per evaluation. Means are over the runs' clients."""

    def __init__(self, title: str, rounds: int, done: int, console: Console, runs: int = 1) -> None:
        self._title, self._rounds, self._console, self._runs = title, rounds, console, runs
        self._rows: list[Row] = []
        self._accuracy = ""
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            TextColumn("round {task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
            TextColumn("left", table_column=Column(no_wrap=True)),
            console=console,
        )
        self._task: TaskID = self._progress.add_task(title, total=rounds, completed=done)
        self._live = Live(self._progress, console=console, refresh_per_second=8) if console.is_terminal else None

    def __enter__(self) -> "Progressing":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, row: Row) -> None:
        """Takes in one finished round of one of the runs."""
        self._rows.append(row)
        if len(self._rows) == self._runs:
            self._show(_pooled(self._rows))
            self._rows = []

    def _show(self, row: Row) -> None:
        terms = [f"{name} {_mean(values):.3f}" for name, values in row["loss"].items()]
        if "accuracy" in row:
            some = {"head": "head", "proto": "L2", "proto_cos": "cos"}
            self._accuracy = "  ".join(f"{say} {100 * _mean(row['accuracy'][k]):.1f}%" for k, say in some.items())
        loss = "loss: " + " ".join(terms) if terms else "nobody answered"
        if self._live:
            self._progress.update(self._task, completed=row["round"])
            self._live.update(Group(self._progress, Text(loss), Text(self._accuracy)))
        elif "accuracy" in row:
            self._console.print(
                f"{self._title}: round {row['round']}/{self._rounds}  {loss}  {self._accuracy}",
                highlight=False,
                soft_wrap=True,
            )


def _pooled(rows: Sequence[Row]) -> Row:
    """The same round of several runs, their clients side by side."""
    row = {"round": rows[0]["round"]}
    for part in ("loss", "accuracy"):
        if part in rows[0]:
            row[part] = {name: [v for one in rows for v in one[part].get(name, [])] for name in rows[0][part]}
    return row


def _mean(values: list[float | None]) -> float:
    some = [v for v in values if v is not None]
    return sum(some) / len(some) if some else float("nan")


def to_people() -> Console:
    """Standard error."""
    return Console(file=sys.stderr)
