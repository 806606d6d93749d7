"""Runs what experiments lack, shared and stacked where they allow it, and goes on where it was stopped."""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedsap.collect import collect
from fedsap.data import Dataset
from fedsap.errors import UserError
from fedsap.experiments.compare import agreement, cells, scores
from fedsap.experiments.cost import said, seconds
from fedsap.experiments.plan import Place, distinct, names
from fedsap.federation import build_federation, dataset, device
from fedsap.runs import Row, Run, Stopped, execute_all, together, write

Tell = Callable[[str], None]
Follow = Callable[[list[Run]], contextlib.AbstractContextManager[Callable[[Run, Row], None]]]


@dataclass
class Work:
    """What there is to do: groups of runs that differ in their seed alone, and about how long each group takes."""

    groups: list[list[Run]]
    expected: list[float]
    done: int  # runs that are over already
    runs: int
    cuda: bool
    problems: list[str] = field(default_factory=list)

    @property
    def left(self) -> float:
        return sum(self.expected)


def work(places: Sequence[Place]) -> Work:
    """The groups that are not over. Folders that hold something else are an error."""
    runs = distinct(places)
    for run in runs:
        run.check(resume=True)
    open_ = [run for run in runs if run.result is None]
    groups = together(open_) if open_ else []
    where = device(runs[0].config.device).type
    expected = []
    for group in groups:
        share = 1 - min(len(run.rows()) for run in group) / group[0].config.rounds
        expected.append(share * seconds([run.config for run in group], where))
    return Work(groups, expected, len(runs) - len(open_), len(runs), where == "cuda")


def execute(todo: Work, *, follow: Follow, tell: Tell, stop: Callable[[], bool], until: float | None = None) -> bool:
    """Runs the groups one after another; whether all are over.

    Data that is missing, and runs that fail by what was asked of them, are told of and left out. After `until` (of
    time.monotonic) the group at work stops after its round, with a checkpoint, and no other begins.
    """

    def over() -> bool:
        return stop() or (until is not None and time.monotonic() >= until)

    shelf = _Shelf()
    spent = planned = 0.0
    complete = True
    for number, group in enumerate(todo.groups):
        if over():
            return False
        began = time.monotonic()
        try:
            data = shelf.get(group[0])
            with follow(group) as hear:
                execute_all(group, partial(build_federation, data=data), on_round=hear, stop=over)
        except Stopped:
            return False
        except UserError as error:
            complete = False
            if str(error) not in todo.problems:
                todo.problems.append(str(error))
                tell(str(error))
            continue
        for run in group:  # a run that is over needs none, and of 72 ResNet-18 federations they would be 65 GB
            run.checkpoint.unlink(missing_ok=True)
        spent, planned = spent + time.monotonic() - began, planned + todo.expected[number]
        if number + 1 < len(todo.groups):
            tell(f"{number + 1} of {len(todo.groups)} done; about {_left(todo, number, spent, planned)} left")
    return complete


def _left(todo: Work, number: int, spent: float, planned: float) -> str:
    return said(sum(todo.expected[number + 1 :]) * spent / max(planned, 1e-9))


class _Shelf:
    """The data set that was used last, or why it cannot be had."""

    def __init__(self) -> None:
        self._key: object = None
        self._data: Dataset | None = None
        self._missing: dict[object, str] = {}

    def get(self, run: Run) -> Dataset:
        config = run.config
        key = config.data.model_dump_json()
        if key in self._missing:
            raise UserError(self._missing[key])
        if key != self._key:
            self._data = None
            try:
                self._data, self._key = dataset(config), key
            except UserError as error:
                self._missing[key] = str(error)
                raise
        assert self._data is not None
        return self._data


def record(places: Sequence[Place], out: Path) -> list[Path]:
    """Writes what was measured so far into `out`: NAME.json for each experiment, small enough to be kept; the files."""
    written = []
    for one in names(places):
        mine = [place for place in places if place.experiment.name == one]
        path = out / f"{one}.json"
        out.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(summary(mine), indent=1))
        written.append(path)
    return written


def summary(places: Sequence[Place]) -> dict[str, Any]:
    """One experiment for JSON."""
    one = places[0].experiment
    found = cells(places)
    complete = all(run.result is not None for run in distinct(places))
    return {
        "experiment": one.name,
        "title": one.title,
        "place": one.place,
        "complete": complete,
        "agreement": agreement(found),
        "cells": [cell.to_dict() for cell in found],
        "scores": [
            {"reading": s.reading, "way": str(s.way), "cells": s.cells, "distance": s.distance, "lead": s.lead}
            for s in scores(places)
        ],
        "runs": [
            {"folder": run.folder.parent.name, "seed": run.config.seed, "seconds": result["seconds"]}
            for run in distinct(places)
            for result in (run.result,)
            if result is not None
        ],
        "environment": _environment(places),
    }


def _environment(places: Sequence[Place]) -> Row | None:
    for run in distinct(places):
        path = run.folder / "environment.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            return {k: v for k, v in found.items() if k not in ("command", "classes", "started", "platform")}
    return None


def entries(places: Sequence[Place]) -> list[Row]:
    """What `fedsap run --json` says of methods, for the runs of the places that are over."""
    return collect([run.folder for run in distinct(places) if run.result is not None])
