"""Trackers: a run's rounds, as they end, in TensorBoard's or MLflow's own files.

A tracker takes rows as `metrics.jsonl` has them and may be given any of them again: it keeps what it has and adds what
is missing. So a run that is resumed, or tracked from a later round on, is complete. Every round is on disk when `log`
returns.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Protocol

from fedsap.config import Config
from fedsap.errors import UserError
from fedsap.runs import Row, flat

NAMES = ("tensorboard", "mlflow")


class Tracker(Protocol):
    """Where rounds are written to."""

    def log(self, row: Row) -> None:
        """Takes in one round; does nothing with one that it has."""

    def close(self) -> None: ...


def scalars(row: Row) -> dict[str, float]:
    """What a round comes to, a number each: means over clients and totals of all clients.

    >>> scalars({"round": 1, "seconds": 0.5, "loss": {"ce": [1.0, 3.0]}, "up": [[2, 8]], "down": []})
    {'loss/ce': 2.0, 'up/numbers': 2.0, 'up/bytes': 8.0, 'down/numbers': 0.0, 'down/bytes': 0.0, 'seconds': 0.5}
    """
    found = {f"loss/{name}": _mean(values) for name, values in row["loss"].items()}
    found |= {f"accuracy/{name}": _mean(values) for name, values in row.get("accuracy", {}).items()}
    if row.get("silhouette") is not None:
        found["silhouette"] = float(row["silhouette"])
    for way in ("up", "down"):
        found[f"{way}/numbers"] = float(sum(numbers for numbers, _ in row[way]))
        found[f"{way}/bytes"] = float(sum(size for _, size in row[way]))
    found |= {f"privacy/{name}": float(max(values)) for name, values in row.get("privacy", {}).items()}
    found["seconds"] = float(row["seconds"])
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _mean(values: Sequence[float | None]) -> float:
    some = [v for v in values if v is not None]
    return sum(some) / len(some) if some else math.nan


class TensorBoard:
    """Event files in the run's folder, under tensorboard/."""

    def __init__(self, folder: Path, config: Config) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard"
        self._last = 0
        if place.is_dir():
            there = EventAccumulator(str(place), size_guidance={"scalars": 0})
            there.Reload()
            if "seconds" in there.Tags()["scalars"]:
                self._last = max(event.step for event in there.Scalars("seconds"))
        self._writer: Any = SummaryWriter(str(place), purge_step=self._last + 1, flush_secs=3600)
        if self._last == 0:
            listed = "\n".join(f"    {key} = {value}" for key, value in flat(config.model_dump(mode="json")).items())
            self._writer.add_text("config", listed)

    def log(self, row: Row) -> None:
        if row["round"] <= self._last:
            return
        found = scalars(row)
        for name in sorted(
            found, key=lambda name: name == "seconds"
        ):  # "seconds" last: it says that the round is whole
            self._writer.add_scalar(name, found[name], row["round"])
        self._writer.flush()
        self._last = row["round"]

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A SQLite store beside the run's folder, mlflow.db, one experiment for all runs there."""

    def __init__(self, folder: Path, config: Config) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
        from sqlalchemy.exc import SQLAlchemyError

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._out, self._metric = folder.parent, Metric
        self._errors = (OSError, MlflowException, SQLAlchemyError)
        with self._plainly():
            self._make_store(MlflowClient)
            self._client: Any = MlflowClient(store(folder.parent))
            self._open(folder, config, Param)

    def _make_store(self, client: Callable[[str], Any]) -> None:
        """The store with its tables, in one step: they take seconds, and one that is half made can never be opened."""
        if not (self._out / "mlflow.db").exists():
            with TemporaryDirectory(dir=self._out, prefix=".mlflow.") as scratch:
                client(store(Path(scratch))).search_experiments(max_results=1)
                (Path(scratch) / "mlflow.db").replace(self._out / "mlflow.db")

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """Failed writes in words."""
        try:
            yield
        except self._errors as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"--track mlflow: {self._out / 'mlflow.db'} cannot be used: {reason}") from None

    def _open(self, folder: Path, config: Config, param: Callable[[str, str], Any]) -> None:
        """The run of this folder, which may be there from before."""
        known = self._client.get_experiment_by_name("fedsap")
        place = (folder.parent / "mlflow").resolve().as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment("fedsap", place)
        where = str(folder.resolve())
        asked = "tags.folder = '" + where.replace("'", "''") + "'"
        runs = self._client.search_runs([experiment], asked, max_results=1)
        if runs:
            self._run = runs[0].info.run_id
            self._last = max((m.step for m in self._client.get_metric_history(self._run, "seconds")), default=0)
            return
        made = self._client.create_run(experiment, tags={"folder": where}, run_name=folder.name)
        self._run, self._last = made.info.run_id, 0
        values = flat(config.model_dump(mode="json"))
        self._client.log_batch(self._run, params=[param(key, str(value)[:500]) for key, value in values.items()])

    def log(self, row: Row) -> None:
        if row["round"] <= self._last:
            return
        now = time.time_ns() // 1_000_000
        found = [self._metric(name, value, now, row["round"]) for name, value in scalars(row).items()]
        with self._plainly():
            self._client.log_batch(self._run, metrics=found)  # one transaction
        self._last = row["round"]

    def close(self) -> None:
        with self._plainly():
            self._client.set_terminated(self._run)


def store(out: Path) -> str:
    """The address of MLflow's store for the runs in a folder; `mlflow ui --backend-store-uri` takes it."""
    return f"sqlite:///{(out / 'mlflow.db').resolve()}"


_KINDS: Mapping[str, Callable[[Path, Config], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}
_PACKAGES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}


def check(names: Iterable[str]) -> None:
    """Complains of a name that is no tracker's, and of one whose packages are not there."""
    for name in names:
        if name not in _KINDS:
            raise UserError(f"--track: got '{name}', takes {' or '.join(NAMES)}")
        if any(find_spec(package) is None for package in _PACKAGES[name]):
            raise UserError(f"--track {name}: needs packages that are not installed: pip install 'fedsap[track]'")


class Tracked:
    """The trackers of one run, opened on its first round, when its folder is there.

    `before`: the rounds that the run has already, which the trackers may lack.
    """

    def __init__(self, names: Sequence[str], folder: Path, config: Config, before: Sequence[Row]) -> None:
        check(names)
        self._names, self._folder, self._config, self._before = list(dict.fromkeys(names)), folder, config, before
        self._open: list[Tracker] = []
        self._stack = ExitStack()

    def __enter__(self) -> "Tracked":
        if self._before:
            self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def __call__(self, row: Row) -> None:
        """Takes in one finished round."""
        self._start()
        for tracker in self._open:
            tracker.log(row)

    def _start(self) -> None:
        if self._open or not self._names:
            return
        for name in self._names:
            tracker = _KINDS[name](self._folder, self._config)
            self._stack.callback(tracker.close)
            self._open.append(tracker)
            for row in self._before:
                tracker.log(row)
