"""A run with unlabelled samples that takes up where a finished supervised run ended."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from fedsap.collect import find
from fedsap.config import Config
from fedsap.data import Dataset
from fedsap.errors import UserError
from fedsap.federation import split
from fedsap.runs import Row, Run, decisive, flat, phase, plainly, read_json, write

BESIDE = ("unlabelled.", "eval.snapshots")  # keys in which the two runs may differ


def take_over(run: Run, sources: Iterable[Path], data: Dataset) -> None:
    """Makes the folder of `run` as if its supervised rounds had just been played, from the one among `sources` that has
    played them. A run that has a checkpoint of its own is left as it is."""
    if run.checkpoint.exists():
        return
    source = _same(run.config, sources)
    parts = split(run.config, data)
    there = read_json(source / "partition.json")
    if [own.tolist() for own in parts.indices] != there["indices"]:
        raise UserError(
            f"--from: {source} was trained on other samples than are left with labels here; partition.rule = "
            f"'{run.config.partition.rule}' deals out every sample, so that unlabelled ones are taken from these"
        )
    rows = [_with_phase(row, run.config) for row in Run(source, run.config).rows()]
    with plainly(run.folder):
        run.folder.mkdir(parents=True, exist_ok=True)
        write(run.folder / "partition.json", json.dumps(parts.to_dict()))
        shutil.copyfile(source / "environment.json", run.folder / "environment.json")
        write(run.folder / "config.json", json.dumps(decisive(run.config), indent=1))
        write(run.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        if (source / "snapshots").is_dir():
            shutil.copytree(source / "snapshots", run.folder / "snapshots", dirs_exist_ok=True)
        part = run.checkpoint.with_suffix(".part")
        shutil.copyfile(source / "checkpoint.safetensors", part)
        part.replace(run.checkpoint)


def _same(config: Config, sources: Iterable[Path]) -> Path:
    """The run of this configuration without the second phase, at its end."""
    if not config.unlabelled.size or config.pool_rounds.start <= config.train.rounds:
        raise UserError(
            "--from: goes on with unlabelled samples after the supervised rounds; takes unlabelled.size above 0, and "
            "unlabelled.start unset"
        )
    mine, nearest = _content(decisive(config)), ""
    for folder in find(sources):
        other = _content(read_json(folder / "config.json"))
        differing = sorted(key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key))
        if not differing:
            done = Run(folder, config).done
            if done == config.train.rounds:
                return folder
            nearest = f"; {folder} is at round {done}, and takes {config.train.rounds}"
        elif not nearest and set(differing).isdisjoint(("method.name", "seed")):
            key = differing[0]
            nearest = f"; {folder} has {key} = {other.get(key)!r}, not {mine.get(key)!r}"
    raise UserError(f"--from: no finished supervised run of {config.method['name']}, seed {config.seed}{nearest}")


def _content(config: Row) -> Row:
    return {k: v for k, v in flat(config).items() if not k.startswith(BESIDE)}


def _with_phase(row: Row, config: Config) -> Row:
    return {"round": row["round"], **phase(config, row["round"]), **{k: v for k, v in row.items() if k != "round"}}
