"""Results of runs, method by method: what `--json` prints and what tables are made of."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedsap.errors import UserError
from fedsap.runs import Row, flat, read_json

ACCURACIES = ("head", "head_own", "proto", "proto_cos")
BESIDE = ("seed", "eval.snapshots", "eval.gradients")  # keys in which runs of one entry may differ


def find(folders: Iterable[Path]) -> list[Path]:
    """The run folders at or below the given ones, in the order of their names."""
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; takes one that fedsap run has written")
        here = sorted(path.parent for path in folder.rglob("config.json"))
        if not here:
            raise UserError(f"{folder}: holds no run; takes a folder that fedsap run has written")
        found += here
    return list(dict.fromkeys(found))


def collect(folders: Sequence[Path]) -> list[Row]:
    """One entry for each method and setting among finished runs, over its seeds, in order of first appearance.

    Accuracies are shares of 1. `mean` and `best` are means over seeds of the mean over clients, in the last and in
    the best
    round; `std` is the standard deviation over seeds (n - 1; null with one seed), `std_clients` that over clients,
    averaged over seeds; `per_client` lists the clients of one seed after those of another.
    """
    groups: dict[tuple[Any, ...], list[tuple[Row, Row]]] = {}
    for folder in folders:
        if not (folder / "result.json").exists():
            continue
        config, result = read_json(folder / "config.json"), read_json(folder / "result.json")
        setting = tuple(sorted((k, repr(v)) for k, v in flat(config).items() if k not in BESIDE))
        groups.setdefault(setting, []).append((config, result))
    return [_entry([r for _, r in runs], runs[0][0]) for runs in groups.values()]


def _entry(results: list[Row], config: Row) -> Row:
    first = results[0]
    entry: Row = {
        "method": first["method"],
        "dataset": first["dataset"],
        "seeds": [r["seed"] for r in results],
        "rounds": first["rounds"],
    }
    for name in ACCURACIES:
        entry[f"{name}_acc"] = _accuracy([r["accuracy"][name] for r in results])
    silhouettes = [r["silhouette"] for r in results if r["silhouette"] is not None]
    entry["silhouette"] = statistics.fmean(silhouettes) if silhouettes else None
    entry["comm"] = {
        way: {what: statistics.fmean(r["comm"][way][what] for r in results) for what in ("numbers", "bytes")}
        for way in ("up", "down")
    }
    if "privacy" in first:
        entry["privacy"] = {k: max(r["privacy"][k] for r in results) for k in first["privacy"]}  # of one run each
    entry["seconds"] = round(sum(r["seconds"] for r in results), 3)
    entry["partitions"] = [r["partition"] for r in results]
    entry["config"] = {k: v for k, v in config.items() if k != "seed"}
    return entry


def _accuracy(seeds: list[Row]) -> Row:
    means = [s["mean"] for s in seeds if s["mean"] is not None]
    spreads = [_spread([v for v in s["per_client"] if v is not None]) for s in seeds]
    known = [s for s in spreads if s is not None]
    return {
        "mean": statistics.fmean(means) if means else None,
        "std": _spread(means),
        "std_clients": statistics.fmean(known) if known else None,
        "best": statistics.fmean(s["best"] for s in seeds if s["best"] is not None) if means else None,
        "best_rounds": [s["best_round"] for s in seeds],
        "per_client": [v for s in seeds for v in s["per_client"]],
    }


def _spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
