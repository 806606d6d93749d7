"""What was measured beside what the paper says."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from fedsap.collect import ACCURACIES
from fedsap.experiments.catalogue import Claim, Footnote
from fedsap.experiments.plan import Place
from fedsap.runs import Row, Run, metrics

POINTS = 1.5  # a cell agrees with the paper within this many points of accuracy, or two of its standard deviations
SILHOUETTE = 0.05
SHARE = 0.05  # of a count


@dataclass(frozen=True)
class Cell:
    """One measure of one place; `mean` is over seeds, `std` too (n - 1; None with one seed)."""

    place: Place
    measure: str
    claim: Claim | None
    values: tuple[float, ...]
    footnotes: tuple[Footnote, ...] = ()

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Measured minus the paper's."""
        return None if self.claim is None or self.mean is None else self.mean - self.claim.mean

    @property
    def agrees(self) -> bool:
        """Within two of the paper's standard deviations, or 1.5 points."""
        if self.claim is None or self.difference is None:
            return False
        kind = self.measure.partition("@")[0]
        slack = POINTS if kind in ACCURACIES else SILHOUETTE if kind == "silhouette" else SHARE * self.claim.mean
        return abs(self.difference) <= max(slack, 2 * (self.claim.std or 0.0))

    def to_dict(self) -> Row:
        """For JSON."""
        p = self.place
        return {
            "experiment": p.experiment.name, "setting": p.setting, "variant": p.variant, "reading": p.reading,
            "method": p.tags["method"], "measure": self.measure, "paper": self.claim and self.claim.mean,
            "paper_std": self.claim and self.claim.std, "mean": self.mean, "std": self.std, "values": list(self.values),
            "seeds": [run.config.seed for run in p.runs if run.result], "difference": self.difference,
            "agrees": self.agrees if self.difference is not None else None,
        }  # fmt: skip


def cells(places: Sequence[Place]) -> list[Cell]:
    """All cells of the places, with whatever was measured so far."""
    return [
        Cell(
            place,
            measure,
            place.experiment.paper.get((measure, place.variant, place.setting)),
            tuple(v for run in place.runs for v in (measured(place, run, measure),) if v is not None),
            tuple(n for n in place.experiment.footnotes if n.concerns(place.setting, place.variant, measure)),
        )
        for place in places
        for measure in place.experiment.measures
        if measure not in place.experiment.hidden.get(place.variant, [])
    ]


def beyond(cell: Cell, base: Cell) -> tuple[float, ...]:
    """A cell minus another, seed by seed: what both have is then what is left out."""
    pairs = [
        (measured(cell.place, run, cell.measure), measured(base.place, other, base.measure))
        for run in cell.place.runs
        for other in base.place.runs
        if run.config.seed == other.config.seed
    ]
    return tuple(one - other for one, other in pairs if one is not None and other is not None)


def measured(place: Place, run: Run, measure: str) -> float | None:
    """One run's figure in the unit of the paper: per cent, a silhouette, or thousands of numbers; None if it is not
    over. `measure` may end in @ROUND of the full experiment."""
    result = run.result
    if result is None:
        return None
    kind, _, at = measure.partition("@")
    if kind in ("up", "up_client"):
        return (
            float(result["comm"]["up"]["numbers"]) / 1000 / (run.config.partition.clients if kind == "up_client" else 1)
        )
    if at:
        wanted = place.round(int(at))
        row = next((r for r in metrics(run.folder) if r["round"] >= wanted and "accuracy" in r), None)
        found = None if row is None else row["silhouette"] if kind == "silhouette" else _mean(row["accuracy"][kind])
    else:
        found = result["silhouette"] if kind == "silhouette" else result["accuracy"][kind]["mean"]
    if found is None:
        return None
    return float(found) * (100 if kind in ACCURACIES else 1)


def _mean(values: Iterable[float | None]) -> float | None:
    some = [v for v in values if v is not None]
    return statistics.fmean(some) if some else None


@dataclass(frozen=True)
class Way:
    """How accuracies are counted: each of these is read off the same runs."""

    head: str = "head"  # over all classes, or the client's own ("head_own")
    proto: str = "proto"  # by L2, or by cosine ("proto_cos")
    when: str = "mean"  # in the last round, or in the best ("best")

    def __str__(self) -> str:
        return ", ".join(
            [
                "head over own classes" if self.head == "head_own" else "head over all classes",
                "prototypes by cosine" if self.proto == "proto_cos" else "prototypes by L2",
                "best round" if self.when == "best" else "last round",
            ]
        )


WAYS = tuple(Way(*each) for each in product(("head", "head_own"), ("proto", "proto_cos"), ("mean", "best")))


@dataclass(frozen=True)
class Score:
    """How far a reading is from the paper, in points: root of the mean squared difference over the cells that were
    measured, and the same of the leads of FedSAP over FedProto."""

    reading: str
    way: Way
    cells: int
    distance: float
    lead: float | None


def scores(places: Sequence[Place]) -> list[Score]:
    """For each reading that has a measured cell, the score of every way to count, the closest first."""
    by_reading: dict[str, list[Place]] = {}
    for place in places:
        by_reading.setdefault(place.reading, []).append(place)
    found = [s for reading, some in by_reading.items() for way in WAYS for s in (_score(reading, some, way),) if s]
    return sorted(found, key=lambda s: s.distance)


def _score(reading: str, places: Sequence[Place], way: Way) -> Score | None:
    gaps: list[float] = []
    by_cell: dict[tuple[str, str, str], float] = {}
    for place in places:
        for measure in ("head", "proto"):
            claim = place.experiment.paper.get((measure, place.variant, place.setting))
            values = [v for run in place.runs for v in (_counted(run.result, getattr(way, measure), way.when),) if v]
            if claim is not None and values:
                gap = statistics.fmean(values) - claim.mean
                gaps.append(gap)
                by_cell[measure, place.setting, place.tags["method"]] = gap
    if not gaps:
        return None
    leads = [
        by_cell[measure, setting, "fedsap"] - by_cell[measure, setting, "fedproto"]
        for measure, setting, method in by_cell
        if method == "fedsap" and (measure, setting, "fedproto") in by_cell
    ]
    return Score(reading, way, len(gaps), _rms(gaps), _rms(leads) if leads else None)


def _counted(result: Row | None, measure: str, when: str) -> float | None:
    return None if result is None else 100 * result["accuracy"][measure][when]


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(v * v for v in values))


def agreement(some: Iterable[Cell]) -> Mapping[str, int]:
    """How many cells agree with the paper, of those that can be compared, and of all that it has."""
    every = [c for c in some if c.claim is not None]
    compared = [c for c in every if c.difference is not None]
    return {"agree": sum(c.agrees for c in compared), "compared": len(compared), "all": len(every)}
