"""A run's folder: what is in it, how it survives the death of the process, and how it is taken up again.

config.json       all that decides the outcome
partition.json    who holds which sample, with its hash
environment.json  versions, device, command and class names
metrics.jsonl     one line per round, appended as it ends
checkpoint.safetensors   the state after some round; replaced in one step
snapshots/        embeddings after the rounds that eval.snapshots names
result.json       what the run came to, written at its end
nodes.json        with engine = flower: the run's name for its nodes, who has which clients, the classes
timing.json       seconds of this run by what they went into, since it was last taken up
"""

import contextlib
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import fedsap
from fedsap.config import Config
from fedsap.data import Dataset
from fedsap.errors import UserError
from fedsap.evaluate import Scores
from fedsap.federation import Federation, build_federation
from fedsap.files import plainly as plainly
from fedsap.files import write as write
from fedsap.message import Cost, Message, flatten, restore
from fedsap.methods import METHODS
from fedsap.privacy import Ledger, Privacy, accountant, called
from fedsap.snapshots import save_snapshot
from fedsap.training.rounds import Clients, Outcome, play_all

Row = dict[str, Any]
NODES = "nodes.json"
_FIRST = ("partition.json", "environment.json", "config.json", NODES)  # in the order in which they are written
Build = Callable[[Sequence[Config]], Federation[Clients]]


class Stopped(Exception):
    """The run was asked to stop; what is done so far is in its checkpoint."""


@dataclass(frozen=True, eq=False)
class Run:
    """One method and one seed in a folder."""

    folder: Path
    config: Config

    @property
    def result(self) -> Row | None:
        """What the run came to, or None if it is not over."""
        path = self.folder / "result.json"
        return read_json(path) if path.exists() else None

    def check(self, resume: bool) -> None:
        """Complains of a folder that holds something else, or that would be taken up without being asked to."""
        path = self.folder / "config.json"
        if not path.exists():
            begun = (*_FIRST, *(f".{name}." for name in _FIRST))  # left by a process that died here
            if self.folder.exists() and not all(path.name.startswith(begun) for path in self.folder.iterdir()):
                raise UserError(f"{self.folder}: holds other files and no run; choose another --out")
            return
        there, mine = flat(read_json(path)), flat(decisive(self.config))
        for key in sorted(there.keys() | mine.keys()):
            if there.get(key) != mine.get(key):
                raise UserError(
                    f"{self.folder}: holds a run with {key} = {there.get(key)!r}, not {mine.get(key)!r}; "
                    "choose another --out"
                )
        if not resume:
            raise UserError(f"{self.folder}: holds this run already; --resume goes on with it, or choose another --out")

    def rows(self) -> list[Row]:
        """The metrics so far, a row per round."""
        return metrics(self.folder)

    def execute(
        self,
        data: Dataset,
        *,
        on_round: Callable[[Row], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Row:
        """Plays the rounds that are missing in this process and returns the result. `check` comes first."""
        return execute_all(
            [self], lambda configs: build_federation(configs, data), on_round=lambda _, row: on_round(row), stop=stop
        )[0]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    @property
    def done(self) -> int:
        """The round that the checkpoint was made after; 0: there is none."""
        return _round_of(self.checkpoint) if self.checkpoint.exists() else 0

    def cut(self, last: int) -> list[Row]:
        """The rows up to the checkpoint's round; later ones are dropped, since their rounds come again."""
        rows = [row for row in self.rows() if row["round"] <= last]
        if len(rows) != last:
            raise UserError(f"{self.folder / 'metrics.jsonl'}: has {len(rows)} of the {last} rounds in the checkpoint")
        write(self.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        return rows


def together(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs in groups that can be one stack: they differ in their seed only, and have got to the same round."""
    groups: dict[str, list[Run]] = {}
    for one in runs:
        setting = json.dumps(decisive(one.config) | {"seed": 0}, sort_keys=True)
        groups.setdefault(setting, []).append(one)
    split: dict[tuple[str, int, bool], list[Run]] = {}
    for setting, some in groups.items():
        _even(some)
        for one in some:
            split.setdefault((setting, one.done, one.result is None), []).append(one)
    return list(split.values())


def execute_all(
    runs: Sequence[Run],
    build: Build,
    *,
    on_round: Callable[[Run, Row], None] = lambda _, __: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Row]:
    """`Run.execute` for runs of which `together` made a group, with the engine of the federation that `build` makes."""
    results = [one.result for one in runs]
    if all(results):
        return [r for r in results if r is not None]
    torch.set_float32_matmul_precision("highest")
    config = runs[0].config
    began = time.monotonic()
    federation = build([one.config for one in runs])
    by_seed = {one.config.seed: one for one in runs}
    privacy = config.made_privacy()
    if privacy is not None:
        accountant()  # if it is missing, say so before anything is written
    ledgers: dict[int, Ledger] = {}
    servers: dict[int, Message | None] = {}
    rows: dict[int, list[Row]] = {}
    waiting: dict[int, Row | None] = {}  # for figures that come with the next round
    for seed, one in by_seed.items():
        with plainly(one.folder):
            one.folder.mkdir(parents=True, exist_ok=True)
        servers[seed], last, waiting[seed] = _take_up(federation, one)
        if last == 0:
            write(one.folder / "partition.json", json.dumps(federation.partitions[seed].to_dict()))
            write(one.folder / "environment.json", json.dumps(_environment(federation), indent=1))
            write(one.folder / "config.json", json.dumps(decisive(one.config), indent=1))
        else:
            _same_samples(one.folder, federation.partitions[seed].hash)
        rows[seed] = one.cut(last - 1 if waiting[seed] else last)
        if privacy is not None:
            past = waiting[seed] or (rows[seed][-1] if rows[seed] else None)
            first = [int(config.train.warm_start)] * federation.task.clients  # it has sent something before round 1
            ledgers[seed] = Ledger(privacy, list(past["privacy"]["releases"]) if past else first)
    loading = time.monotonic() - began
    writing = 0.0
    saved = began = time.monotonic()
    with contextlib.ExitStack() as files:
        logs = {}
        for seed, one in by_seed.items():
            path = one.folder / "metrics.jsonl"
            files.enter_context(plainly(path))
            logs[seed] = files.enter_context(path.open("a", encoding="utf-8"))

        def put(seed: int, row: Row) -> None:
            rows[seed].append(row)
            logs[seed].write(json.dumps(row) + "\n")
            logs[seed].flush()
            on_round(by_seed[seed], row)

        for outcomes in play_all(
            federation.method,
            federation.task,
            federation.clients,
            servers=servers,
            done=last,
            presence=federation.presence,
            judge=federation.judge,
            warm_start=config.train.warm_start,
            owed=any(waiting.values()),
        ):
            for seed, outcome in outcomes.items():
                _sound(outcome, by_seed[seed])
            now = time.monotonic()
            for seed, outcome in outcomes.items():
                if outcome.scores is not None and outcome.scores.kept is not None and federation.pictures is not None:
                    folder = by_seed[seed].folder
                    with plainly(folder / "snapshots"):
                        save_snapshot(folder, outcome.t, outcome.scores.kept, federation.pictures)
                before, waiting[seed] = waiting[seed], None
                if before is not None:
                    put(seed, before | _figures(outcome.late))
                row = _row(outcome, (now - began) / len(runs), config)  # its share of the stack's time
                if seed in ledgers:
                    row["privacy"] = ledgers[seed].add(outcome.asked)
                if outcome.owed:
                    waiting[seed] = row
                else:
                    put(seed, row | _figures(outcome.scores))
            began = now
            over, stopping = outcome.t == federation.task.last, stop()
            if over or stopping or now - saved >= federation.checkpoint:
                _save(federation, {by_seed[seed]: (o, waiting[seed]) for seed, o in outcomes.items()})
                saved = time.monotonic()
                writing += saved - now
            if stopping and not over:
                raise Stopped(f"stopped after round {outcome.t}")
    for seed, one in by_seed.items():
        result = summary(one.config, federation.partitions[seed].hash, rows[seed])
        write(one.folder / "result.json", json.dumps(result))
        spent = {"loading": loading, **federation.clients.spent, "checkpoints": writing}
        write(one.folder / "timing.json", json.dumps({k: round(v / len(runs), 4) for k, v in spent.items()}))
    return [one.result or {} for one in runs]


def _save(federation: Federation[Clients], outcomes: Mapping[Run, tuple[Outcome, Row | None]]) -> None:
    """All checkpoints of a stack, with the rows that wait for their figures: every one is on disk before the first
    takes its place."""
    scratches = []
    try:
        for one, (outcome, waiting) in outcomes.items():
            scratches.append(one.checkpoint.with_suffix(".part"))
            about = {"round": str(outcome.t)} | ({"waiting": json.dumps(waiting)} if waiting else {})
            with plainly(one.checkpoint):
                tensors = _content(federation, one.config.seed, outcome.server)
                save_file(tensors, scratches[-1], about)
                shutil.copymode(one.folder / "metrics.jsonl", scratches[-1])  # safetensors lets nobody else read it
                with scratches[-1].open("rb") as file:
                    os.fsync(file.fileno())
    except BaseException:
        for scratch in scratches:
            scratch.unlink(missing_ok=True)
        raise
    for one, scratch in zip(outcomes, scratches, strict=True):
        with plainly(one.checkpoint):
            scratch.replace(one.checkpoint)


def _content(federation: Federation[Clients], seed: int, server: Message) -> dict[str, Tensor]:
    """What a checkpoint holds: the server's state, and what the engine keeps of the clients."""
    mine = {f"server/{k}": v.clone() for k, v in flatten(server).items()}  # one tensor may be there under two names
    tensors = mine | federation.clients.kept(seed)
    return {k: v.detach().cpu().contiguous() for k, v in tensors.items()}


def _take_up(federation: Federation[Clients], run: Run) -> tuple[Message | None, int, Row | None]:
    """Fills the clients from the checkpoint; the server's state, the round it was made after, and that round's row if
    its figures had not come yet."""
    if not run.checkpoint.exists():
        return None, 0, None
    last = run.done
    server: dict[str, Tensor] = {}
    try:
        with safe_open(run.checkpoint, "pt") as file:
            waiting = json.loads(file.metadata().get("waiting", "null"))
            for key in file.keys():  # noqa: SIM118  (it is no dictionary)
                kind, _, name = key.partition("/")
                if kind == "server":
                    server[name] = file.get_tensor(key).to(federation.device)
                else:
                    federation.clients.take_back(run.config.seed, key, file.get_tensor(key))
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{run.checkpoint}: not a checkpoint of this run ({error}); remove it to start again") from None
    return restore(server), last, waiting


def _same_samples(folder: Path, mine: str) -> None:
    """Complains if the data are not those that the run began with."""
    there = read_json(folder / "partition.json").get("hash")
    if there != mine:
        raise UserError(
            f"{folder}: the run began with partition {str(there)[:16]}, and the data now give {mine[:16]}; "
            "takes the same data, or another --out"
        )


def _round_of(path: Path) -> int:
    try:
        with safe_open(path, "pt") as file:
            return int(file.metadata()["round"])
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise UserError(f"{path}: not a checkpoint of this run ({error}); remove it to start again") from None


def _even(runs: Sequence[Run]) -> None:
    """Ends what a killed process began: checkpoints of a stack that were written but had not taken their place yet."""
    furthest = max(one.done for one in runs)
    for one in runs:
        scratch = one.checkpoint.with_suffix(".part")
        if one.done < furthest and scratch.exists():
            with contextlib.suppress(UserError):  # a file that was not finished
                if _round_of(scratch) == furthest:
                    scratch.replace(one.checkpoint)


def metrics(folder: Path) -> list[Row]:
    """The rows of a run's metrics; a last line that was cut off by the death of the process does not count."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            if line:
                row = json.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("round"), int):
                    raise ValueError
                rows.append(row)
        except ValueError:
            if number < len(lines):
                raise UserError(f"{path}: line {number} is damaged") from None
    return rows


def _sound(outcome: Outcome, run: Run) -> None:
    """Stops at the first loss that is not a number."""
    for name, values in outcome.terms.items():
        bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
        if bad:
            client = outcome.clients[bad[0]]
            kept = f"The checkpoint after round {run.done} is kept" if run.done else "There is no checkpoint yet"
            raise UserError(
                f"{run.folder}: the loss term '{name}' of client {client} became {float(values[bad[0]])} "
                f"in round {outcome.t}; "
                f"lower train.lr or the term's weight. {kept}"
            )


def _row(outcome: Outcome, seconds: float, config: Config) -> Row:
    row: Row = {
        "round": outcome.t,
        **phase(config, outcome.t),
        "seconds": round(seconds, 4),
        "clients": outcome.clients,
        "failed": {str(c): why for c, why in outcome.failed.items()},
        "loss": {k: _floats(v) for k, v in outcome.terms.items()},
        "up": [[c.numbers, c.bytes] for c in outcome.up],
        "down": [[c.numbers, c.bytes] for c in outcome.down],
    }
    if outcome.figures:
        row["unlabelled"] = {k: _floats(v) for k, v in outcome.figures.items()}
    return row | outcome.notes


def _figures(scores: Scores | None) -> Row:
    """What an evaluation adds to a row."""
    if scores is None:
        return {}
    figures: Row = {"accuracy": {k: _floats(v) for k, v in scores.accuracy.items()}, "silhouette": scores.silhouette}
    return figures | ({"noted": {k: _floats(v) for k, v in scores.noted.items()}} if scores.noted else {})


def phase(config: Config, t: int) -> Row:
    """What a row says of the phase that its round belongs to, where there is more than one."""
    if not config.unlabelled.size or not METHODS[config.method["name"]].uses_pool:
        return {}
    return {"phase": "semi-supervised" if t in config.pool_rounds else "supervised"}


def _floats(values: Tensor) -> list[float | None]:
    return [v if math.isfinite(v) else None for v in values.tolist()]


def decisive(config: Config) -> Row:
    """The configuration without what does not change the outcome."""
    content = config.model_dump(mode="json")
    content["data"].pop("root")
    for key in ("checkpoint", "together"):
        content["train"].pop(key)
    content.pop("device")
    content.pop("flower")
    if not content["privacy"]["noise"]:  # runs without it are as they were before there was any
        content.pop("privacy")
    for key in ("snapshots", "gradients"):  # what is looked at besides; runs without it are as they were before it
        if not content["eval"][key]:
            content["eval"].pop(key)
    if content["model"]["dim"] is None:  # as before there was this key
        content["model"].pop("dim")
    return content


def flat(content: Mapping[str, Any], prefix: str = "") -> Row:
    """Nested keys joined by dots.

    >>> flat({"train": {"rounds": 5}, "seed": 1})
    {'train.rounds': 5, 'seed': 1}
    """
    joined: Row = {}
    for key, value in content.items():
        joined |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return joined


def read_json(path: Path) -> Row:
    try:
        content = json.loads(path.read_bytes(), parse_constant=_refuse)
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path}: missing or damaged, not a JSON object; choose another --out")
    return content


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _environment(federation: Federation[Clients]) -> Row:
    where = federation.device
    return {
        "fedsap": fedsap.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "command": sys.argv,
        "classes": list(federation.classes),
        "method": "{0.__module__}:{0.__qualname__}".format(type(federation.method)),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def summary(config: Config, partition_hash: str, rows: list[Row]) -> Row:
    """What a run came to."""
    judged = [row for row in rows if "accuracy" in row]
    last = judged[-1]
    steady = rows[1:] or rows  # round 1 sends nothing down yet
    accuracy = {}
    for name, values in last["accuracy"].items():
        means = [_mean(row["accuracy"][name]) for row in judged]
        known = [(m, -row["round"]) for m, row in zip(means, judged, strict=True) if m is not None]
        best, at = max(known, default=(None, None))
        accuracy[name] = {
            "mean": means[-1], "best": best, "best_round": None if at is None else -at, "per_client": values
        }  # fmt: skip
    result = {
        "method": config.method["name"],
        "dataset": config.data.name,
        "seed": config.seed,
        "rounds": config.rounds,
        "partition": partition_hash,
        "accuracy": accuracy,
        "silhouette": last["silhouette"],
        "comm": {way: _per_round([row[way] for row in steady]) for way in ("up", "down")},
        "seconds": round(sum(row["seconds"] for row in rows), 3),
    }
    privacy = config.made_privacy()
    return result | ({"privacy": _most(privacy, rows[-1]["privacy"])} if privacy else {})


def _most(privacy: Privacy, said: Row) -> Row:
    """What holds for every client after a run."""
    most = {name: max(said[name]) for name in (called(privacy), "releases")}
    return {**most, "delta": privacy.delta, "source": privacy.source}


def _per_round(rounds: list[list[list[int]]]) -> Row:
    """All clients' numbers and bytes in a round, on average."""
    totals = [sum((Cost(*each) for each in clients), Cost(0, 0)) for clients in rounds]
    return {
        "numbers": round(sum(c.numbers for c in totals) / len(totals), 1),
        "bytes": round(sum(c.bytes for c in totals) / len(totals), 1),
    }


def _mean(values: list[float | None]) -> float | None:
    some = [v for v in values if v is not None]
    return sum(some) / len(some) if some else None
