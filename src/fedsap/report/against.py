"""Measured figures beside the paper's, as tables with footnotes."""

import statistics
from collections.abc import Sequence

from fedsap.experiments.compare import POINTS, SHARE, SILHOUETTE, Cell, Score, agreement, beyond, cells
from fedsap.experiments.plan import Place, places_of
from fedsap.report.read import RunData
from fedsap.report.study import DATASETS, title
from fedsap.report.tables import Block, Table
from fedsap.report.tables import Cell as Entry

NAMES = {
    "head": "Head",
    "head_own": "Head, own classes",
    "proto": "Prototype L2",
    "proto_cos": "Prototype cosine",
    "silhouette": "Silhouette",
    "up": "Up, all clients (k)",
    "up_client": "Up, one client (k)",
}


def of_runs(runs: Sequence[RunData]) -> list[Table]:
    """For each of the paper's tables and figures with values: what these runs have measured of it, if anything."""
    found = places_of([(run.folder, run.config, run.seed) for run in runs if run.over])
    names = dict.fromkeys(place.experiment.name for place in found)
    return [against([p for p in found if p.experiment.name == name]) for name in names]


def against(places: Sequence[Place], measured_only: bool = True) -> Table:
    """One experiment: a row for each setting and variant, a block for each data set (and reading).

    With `measured_only`, rows for which nothing has been measured are left out.
    """
    one = places[0].experiment
    every = cells(places)
    letters: dict[str, str] = {}
    blocks: dict[str, list[tuple[Entry, ...]]] = {}
    compared = bool(one.paper)
    bases = {(c.place.reading, c.place.setting, c.measure): c for c in every if c.place.variant == one.base}
    for place in places:
        mine = {c.measure: c for c in every if c.place is place}
        if measured_only and not any(c.values for c in mine.values()):
            continue
        label = title(place.variant) + _marks([n.text for n in one.footnotes if n.concerns(*_at(place), None)], letters)
        row = [Entry(_short(place)), Entry(label)]
        for measure in one.measures:
            row += _entries(mine.get(measure), letters, compared)
            if bases:
                row.append(_beyond(mine.get(measure), bases.get((place.reading, place.setting, measure))))
        data = one.data or DATASETS.get(place.tags["data"], place.tags["data"])
        blocks.setdefault(f"{data}, {place.reading}" if place.reading else data, []).append(tuple(row))
    heads = [("", "Setting"), ("", "Method")]
    for measure in one.measures:
        kind, _, at = measure.partition("@")
        name = NAMES[kind] + (f", round {at}" if at else "")
        if compared:
            heads += [(name, column) for column in ("paper", "measured", "difference")]
        elif bases:
            heads += [(name, "measured"), (name, f"minus {title(one.base)}")]
        else:
            heads.append(("", name))
    return Table(
        f"paper-{one.name}",
        f"Against the paper, {one.place}: {one.title}" if compared else f"{one.title} ({one.place})",
        _caption(places, every, letters, compared),
        tuple(heads),
        tuple(Block(name, tuple(rows)) for name, rows in blocks.items()),
        labels=2,
    )


def _at(place: Place) -> tuple[str, str]:
    return place.setting, place.variant


def _short(place: Place) -> str:
    """The setting without the data set, which the block names; k and |U| where settings of it differ in them."""
    own = place.experiment.settings[place.setting]
    alike = [s for s in place.experiment.settings.values() if s["data"] == own["data"]]
    parts = [place.tags["n"]]
    if len({s["partition"]["shots"] for s in alike}) > 1:
        parts.append(place.tags["k"])
    if len({s.get("unlabelled", {}).get("size") for s in alike}) > 1:
        parts.append(f"|U|={own['unlabelled']['size']}")
    return ", ".join(parts)


def _entries(cell: Cell | None, letters: dict[str, str], compared: bool) -> list[Entry]:
    if cell is None:
        return [Entry("–")] * (3 if compared else 1)
    digits = 3 if cell.measure.startswith("silhouette") else 1 if cell.measure.startswith("up") else 2
    measured = Entry("–") if cell.mean is None else Entry(_pm(cell.mean, cell.std, digits), cell.mean, cell.std)
    if not compared:
        return [measured]
    marks = _marks([n.text for n in cell.footnotes], letters)
    claim = cell.claim
    said = Entry("–" + marks) if claim is None else Entry(_pm(claim.mean, claim.std, digits) + marks, claim.mean)
    gap = cell.difference
    return [said, measured, Entry("–") if gap is None else Entry(f"{gap:+.{digits}f}", gap, best=cell.agrees)]


def _beyond(cell: Cell | None, base: Cell | None) -> Entry:
    """What a cell has more than the base, seed by seed."""
    gaps = beyond(cell, base) if cell and base and cell.place.variant != base.place.variant else ()
    if not gaps:
        return Entry("–")
    mean, std = statistics.fmean(gaps), statistics.stdev(gaps) if len(gaps) > 1 else None
    digits = 3 if cell is not None and cell.measure.startswith("silhouette") else 2
    return Entry(f"{mean:+.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}"), mean, std)


def _pm(mean: float, std: float | None, digits: int) -> str:
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def _marks(texts: Sequence[str], letters: dict[str, str]) -> str:
    for text in texts:
        letters.setdefault(text, "abcdefghijklmnopqrstuvwxyz"[len(letters)])
    return f" [{','.join(letters[text] for text in texts)}]" if texts else ""


def _caption(places: Sequence[Place], every: Sequence[Cell], letters: dict[str, str], compared: bool) -> str:
    one = places[0].experiment
    counts = sorted({len(c.values) for c in every if c.values})
    seeds = "" if not counts else "one seed" if counts == [1] else f"{counts[0]} to {counts[-1]} seeds"
    seeds = f"{counts[0]} seeds" if len(counts) == 1 and counts[0] > 1 else seeds
    parts = [f"The paper: {one.says}"] if compared else [one.says]
    if seeds:
        parts.append(f"Measured: {seeds}.")
    if compared:
        found = agreement(every)
        kind = one.measures[0].partition("@")[0]
        near = (
            f"{SILHOUETTE}"
            if kind == "silhouette"
            else f"{100 * SHARE:.0f} %"
            if kind[:2] == "up"
            else f"{POINTS} points"
        )
        parts.append(
            f"Bold: within two of the paper's standard deviations, or {near} ({found['agree']} of "
            f"{found['compared']} cells compared, of {found['all']})."
        )
    if one.base:
        parts.append(f"Minus {title(one.base)}: the difference seed by seed, and its deviation.")
    parts += [f"[{letter}] {text}" for text, letter in letters.items()]
    parts += [note.text for note in one.footnotes if note.general]
    return " ".join(parts)


def ranking(found: Sequence[Score], most: int = 40) -> Table:
    """Readings by their distance to the paper: each as the text counts, and by its own best way to count."""
    plain = {s.reading: s for s in found if str(s.way) == str(type(s.way)())}
    best: dict[str, Score] = {}
    for s in found:
        best.setdefault(s.reading, s)
    rows = []
    for reading, closest in list(best.items())[:most]:
        usual = plain[reading]
        lead = Entry("–") if usual.lead is None else Entry(f"{usual.lead:.1f}", usual.lead)
        rows.append(
            (
                Entry(reading or "as configured"), Entry(str(usual.cells), usual.cells),
                Entry(f"{usual.distance:.1f}", usual.distance), lead,
                Entry(f"{closest.distance:.1f}", closest.distance), Entry(str(closest.way)),
            )
        )  # fmt: skip
    heads = (("", "Reading"), ("", "cells"), ("As the text counts", "distance"), ("As the text counts", "lead"),
             ("By the closest way to count", "distance"), ("By the closest way to count", "which"))  # fmt: skip
    caption = (
        "Distance: root mean squared difference to the paper's cells in points. Lead: the same of what FedSAP is "
        "ahead of FedProto. As the text counts: head over all classes, prototypes by L2, last round."
    )
    return Table("readings", "Distance to the paper", caption, heads, (Block("", tuple(rows)),))
