"""Run folders as arrays. A folder that cannot be read costs one line, and the others are read all the same."""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fedsap
from fedsap import snapshots
from fedsap.config import pool_rounds
from fedsap.errors import UserError
from fedsap.evaluate import MEASURES
from fedsap.runs import Row, metrics, read_json

Floats = NDArray[np.float64]
Complain = Callable[[str], None]
FILES = ("config.json", "partition.json", "environment.json", "metrics.jsonl", "result.json", "checkpoint.safetensors")


@dataclass(frozen=True)
class RunData:
    """One run: T rounds, of which E were evaluated, with Q clients. What was not measured is NaN.

    rounds: [T], seconds: [T], loss: mean over clients [T] by term, up, down: numbers and bytes of all clients [T, 2],
    judged: rounds [E], accuracy: [E, Q] by measure, mean: over clients [E] by measure, silhouette: [E],
    noted: mean over clients [E] of the other figures of an evaluation, by name,
    phases: name and first round of each phase that the rows name, snapshots: rounds whose embeddings are there,
    unlabelled: what is said of unlabelled samples, mean over clients [T] by name
    """

    folder: Path
    config: Row
    environment: Row
    partition: Row
    over: bool
    rounds: NDArray[np.int64]
    seconds: Floats
    loss: dict[str, Floats]
    up: Floats
    down: Floats
    judged: NDArray[np.int64]
    accuracy: dict[str, Floats]
    mean: dict[str, Floats]
    silhouette: Floats
    noted: dict[str, Floats]
    phases: tuple[tuple[str, int], ...]
    snapshots: tuple[int, ...]
    unlabelled: dict[str, Floats]
    privacy: Row  # what the last round says of it, by client; empty without privacy.noise

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def method(self) -> str:
        return str(self.config["method"]["name"])

    @property
    def planned(self) -> int:
        """How many rounds the run is to have."""
        return _planned(self.config)

    @property
    def classes(self) -> list[str]:
        """Names of the classes; their numbers where the run does not say."""
        number = int(self.partition["num_classes"])
        names = self.environment.get("classes")
        return (
            [str(n) for n in names] if isinstance(names, list) and len(names) == number else [*map(str, range(number))]
        )

    def per_round(self, way: str) -> tuple[float, float]:
        """Numbers and bytes of all clients in a round, on average without round 1, in which nothing comes down yet."""
        sent = {"up": self.up, "down": self.down}[way]
        numbers, size = (sent[1:] if len(sent) > 1 else sent).mean(axis=0)
        return float(numbers), float(size)


def find(folders: Iterable[Path], complain: Complain) -> list[Path]:
    """The run folders at or below the given ones, by name; what looks like one and holds no run is complained of."""
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; takes one that fedsap run has written")
        here: list[Path] = []
        for place, below, files in os.walk(folder):
            below[:] = sorted(name for name in below if not name.startswith("."))
            path = Path(place)
            if "config.json" in files:
                here.append(path)
                below.clear()
            elif any(name in FILES for name in files):
                complain(f"{path}: half-written, has no config.json; left out")
                below.clear()
            elif not below and not files and path != folder:
                complain(f"{path}: empty; left out")
        found += sorted(here)
    return list({path.resolve(): path for path in found}.values())


def load(folders: Sequence[Path], complain: Complain) -> list[RunData]:
    """The runs that can be read and have at least one evaluated round."""
    runs: list[RunData] = []
    for folder in folders:
        one = attempt(folder, complain)
        if one is not None:
            runs.append(one)
    return distinct(runs, complain)


def attempt(folder: Path, complain: Complain) -> RunData | None:
    """The run in a folder, or None and a complaint."""
    try:
        return read(folder)
    except UserError as error:
        complain(f"{str(error).removesuffix('; choose another --out')}; left out")
    return None


def distinct(runs: Sequence[RunData], complain: Complain) -> list[RunData]:
    """Without runs of the same configuration and seed as an earlier one, which would pass for another seed."""
    seen: dict[str, RunData] = {}
    for run in runs:
        first = seen.setdefault(json.dumps(run.config, sort_keys=True), run)
        if first is not run:
            complain(f"{run.folder}: the same run as {first.folder}; left out")
    return list(seen.values())


def read(folder: Path) -> RunData:
    """One run; raises UserError with one line if its folder is not whole."""
    config = read_json(folder / "config.json")
    environment = read_json(folder / "environment.json") if (folder / "environment.json").exists() else {}
    if not (folder / "partition.json").exists():
        raise UserError(f"{folder}: half-written, has no partition.json")
    partition = read_json(folder / "partition.json")
    version = environment.get("fedsap", fedsap.__version__)
    other = "" if version == fedsap.__version__ else f" (written by {version}, this is {fedsap.__version__})"
    try:
        rows = metrics(folder)
    except OSError as error:
        raise UserError(f"{folder / 'metrics.jsonl'}: cannot be read: {error.strerror}") from None
    if not any("accuracy" in row for row in rows):
        raise UserError(f"{folder}: no evaluated round yet ({len(rows)} rounds are there){other}")
    over = (folder / "result.json").exists()
    if over:
        read_json(folder / "result.json")
    try:
        return _read(folder, config, environment, partition, over, rows)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"has no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{folder}: not the files of a run as this version writes them{other}: {what}") from None


def _read(folder: Path, config: Row, environment: Row, partition: Row, over: bool, rows: list[Row]) -> RunData:
    rounds = np.array([int(row["round"]) for row in rows])
    if not np.array_equal(rounds, np.arange(1, len(rounds) + 1)):
        raise ValueError("metrics.jsonl does not hold the rounds 1, 2, ... in order")
    if over and len(rounds) != _planned(config):
        raise ValueError(f"metrics.jsonl has {len(rounds)} rounds of {_planned(config)}")
    for key in ("data", "partition", "model", "method", "train", "eval"):
        if not isinstance(config[key], dict):
            raise ValueError(f"config.json: {key} is no table")
    names, numbers = (config["method"]["name"], config["data"]["name"]), (config["seed"], config["partition"]["ways"])
    if not all(isinstance(name, str) for name in names) or not all(isinstance(number, int) for number in numbers):
        raise ValueError("config.json: a name is no text, or a number none")
    clients = _clients(partition)
    terms = dict.fromkeys(term for row in rows for term in row["loss"])
    said = dict.fromkeys(name for row in rows for name in row.get("unlabelled", {}))
    judged = [row for row in rows if "accuracy" in row]
    accuracy = {m: np.array([_floats(row["accuracy"][m], clients) for row in judged]) for m in MEASURES}
    phases: list[tuple[str, int]] = []
    for row in rows:
        name = str(row.get("phase", ""))
        if name and (not phases or phases[-1][0] != name):
            phases.append((name, int(row["round"])))
    return RunData(
        folder,
        config,
        environment,
        partition,
        over,
        rounds,
        _floats([row["seconds"] for row in rows]),
        {term: np.array([mean_of(_floats(row["loss"].get(term, []))) for row in rows]) for term in terms},
        np.array([_total(row["up"]) for row in rows]),
        np.array([_total(row["down"]) for row in rows]),
        np.array([int(row["round"]) for row in judged]),
        accuracy,
        {m: np.array([mean_of(row) for row in values]) for m, values in accuracy.items()},
        np.array(_floats([row.get("silhouette") for row in judged])),
        {
            name: np.array([mean_of(_floats(row.get("noted", {}).get(name, []))) for row in judged])
            for name in dict.fromkeys(name for row in judged for name in row.get("noted", {}))
        },
        tuple(phases),
        tuple(snapshots.rounds(folder)),
        {name: np.array([mean_of(_floats(row.get("unlabelled", {}).get(name, []))) for row in rows]) for name in said},
        rows[-1].get("privacy", {}),
    )


def _clients(partition: Row) -> int:
    """How many clients there are, if each has samples of classes that there are."""
    number, every = partition["num_classes"], list(zip(partition["classes"], partition["shots"], strict=True))
    for own, shots in every:
        pairs = zip(own, shots, strict=True)
        if not all(type(c) is type(k) is int and 0 <= c < number and k >= 0 for c, k in pairs):
            raise ValueError("partition.json: classes and samples do not fit together")
    return len(every)


def _planned(config: Row) -> int:
    rounds = int(config["train"]["rounds"])
    return max(rounds, pool_rounds(rounds, config.get("unlabelled", {})).stop - 1)


def _floats(values: Sequence[Any], length: int | None = None) -> Floats:
    if length is not None and len(values) != length:
        raise ValueError(f"metrics.jsonl has {len(values)} accuracies for {length} clients")
    found = np.array([np.nan if v is None else float(v) for v in values])
    if np.isinf(found).any():
        raise ValueError("metrics.jsonl has a number without bounds")
    return found


def mean_of(values: Floats) -> float:
    """The mean of what is there, or NaN.

    >>> mean_of(np.array([1.0, np.nan, 2.0])), mean_of(np.array([]))
    (1.5, nan)
    """
    some = values[~np.isnan(values)]
    return float(sum(some.tolist()) / len(some)) if len(some) else float("nan")


def _total(sent: Sequence[Sequence[float]]) -> tuple[float, float]:
    numbers, size = (float(sum(both[i] for both in sent)) for i in (0, 1))
    if not math.isfinite(numbers + size):
        raise ValueError("metrics.jsonl has a number without bounds")
    return numbers, size
