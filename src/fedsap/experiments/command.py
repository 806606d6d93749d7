"""What `fedsap reproduce` does, from its words to its tables."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from fedsap import show
from fedsap.experiments import catalogue, plan, reproduce
from fedsap.experiments.compare import scores
from fedsap.experiments.cost import said
from fedsap.report import write_report
from fedsap.report.against import against, ranking
from fedsap.runs import Run

REPORTED = ("", "figures")  # groups whose runs make a report of their own


def command(
    what: Sequence[str],
    only: str | None,
    change: plan.Change,
    out: Path,
    *,
    until: float | None,
    as_json: bool,
    console: Console,
    stop: Callable[[], bool],
    complain: Callable[[str], None],
) -> int:
    """Runs, writes and prints; the exit status. `until` is a time of time.monotonic."""
    every = plan.plan(catalogue.chosen(list(what)), out, change)
    places = plan.select(every, [word.strip() for word in only.split(",")]) if only else every
    todo = reproduce.work(places)
    machine = "an H200" if todo.cuda else "two CPU cores"
    console.print(
        f"{todo.runs} runs, {todo.done} of them done; about {said(todo.left)} for the others, by what was measured on "
        f"{machine}",
        highlight=False,
        soft_wrap=True,
    )

    @contextmanager
    def follow(group: list[Run]) -> Iterator[Callable[[Run, Any], None]]:
        title = f"{group[0].folder.parent.name}, {', '.join(str(one.config.seed) for one in group)}"
        done = min(len(one.rows()) for one in group)
        with show.Progressing(title, group[0].config.rounds, done, console, len(group)) as progress:
            yield lambda _, row: progress(row)

    complete = reproduce.execute(todo, follow=follow, tell=complain, stop=stop, until=until)
    interrupted = stop()
    status = 2 if todo.problems else int(interrupted)
    entries = reproduce.entries(places)
    if not entries and todo.problems:
        return status
    written = reproduce.record(every, out)
    if complete and all(p.experiment.group in REPORTED for p in places):
        drawn = any(p.experiment.group == "figures" for p in places)
        folders = [run.folder for run in plan.distinct(places)]
        written += write_report(folders, out, ("html", "md") if drawn else ("html",), complain)
    by_experiment = [[p for p in places if p.experiment.name == name] for name in plan.names(places)]
    if as_json:
        summaries = [reproduce.summary(some) for some in by_experiment]
        print(json.dumps({"experiments": summaries, "methods": entries, "complete": complete, "out": str(out)}))
        return status
    shown = Console()
    for some in by_experiment:
        shown.print(show.table(against(some, measured_only=len(some[0].experiment.readings) > 1)))
        if found := scores(some):
            shown.print(show.table(ranking(found)))
    lines = [
        *([] if complete else ["not complete: the same command goes on"]),
        *(f"written: {path}" for path in written),
    ]
    for line in lines:
        shown.print(line, highlight=False, soft_wrap=True, markup=False)
    return status


def deadline(minutes: float | None) -> float | None:
    """The time of time.monotonic after so many minutes."""
    return None if minutes is None else time.monotonic() + 60 * minutes
