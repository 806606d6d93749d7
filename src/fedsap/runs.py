"""A run's folder: what is in it, how it survives the death of the process, and how it is taken up again.

config.json       all that decides the outcome
partition.json    who holds which sample, with its hash
environment.json  versions, device, command and class names
metrics.jsonl     one line per round, appended as it ends
checkpoint.safetensors   the state after some round; replaced in one step
snapshots/        embeddings after the rounds that eval.snapshots names
result.json       what the run came to, written at its end
"""

import contextlib
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
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
from fedsap.federation import Federation, build_federation
from fedsap.message import Cost, Message, flatten, restore
from fedsap.snapshots import save_snapshot
from fedsap.training.rounds import Outcome, play

Row = dict[str, Any]


class Stopped(Exception):
    """The run was asked to stop; what is done so far is in its checkpoint."""


@contextlib.contextmanager
def _plainly(path: Path) -> Iterator[None]:
    """Failed writes in words."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror or error}; make room or choose another --out"
        ) from None
    except SafetensorError as error:
        raise UserError(f"{path}: cannot be written: {error}; make room or choose another --out") from None


def write(path: Path, content: str) -> None:
    """Replaces a file in one step: a reader finds the old content or the new."""
    with _plainly(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@dataclass(frozen=True)
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
            if self.folder.exists() and any(self.folder.iterdir()):
                raise UserError(f"{self.folder}: holds other files and no run; choose another --out")
            return
        there, mine = flat(read_json(path)), flat(_decisive(self.config))
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
        """Plays the rounds that are missing and returns the result. `check` comes first."""
        done = self.result
        if done is not None:
            return done
        torch.set_float32_matmul_precision("highest")
        federation = build_federation(self.config, data)
        with _plainly(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        server, last = self._take_up(federation)
        if last == 0:
            write(self.folder / "partition.json", json.dumps(federation.partition.to_dict()))
            write(self.folder / "environment.json", json.dumps(_environment(federation, data), indent=1))
            write(self.folder / "config.json", json.dumps(_decisive(self.config), indent=1))
        rows = self._cut(last)
        saved = time.monotonic()
        began = saved
        with (
            _plainly(self.folder / "metrics.jsonl"),
            (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as out,
        ):
            for outcome in play(
                federation.method,
                federation.task,
                federation.clients,
                seed=self.config.seed,
                server=server,
                done=last,
                presence=federation.presence,
                judge=federation.judge,
                warm_start=self.config.train.warm_start,
            ):
                _sound(outcome, self.folder)
                if outcome.scores is not None and outcome.scores.kept is not None:
                    with _plainly(self.folder / "snapshots"):
                        save_snapshot(self.folder, outcome.t, outcome.scores.kept, federation.clients.test.images)
                now = time.monotonic()
                rows.append(_row(outcome, now - began))
                began = now
                out.write(json.dumps(rows[-1]) + "\n")
                out.flush()
                on_round(rows[-1])
                over, stopping = outcome.t == federation.task.rounds, stop()
                if over or stopping or now - saved >= self.config.train.checkpoint:
                    self._save(federation, outcome)
                    saved = time.monotonic()
                if stopping and not over:
                    raise Stopped(f"stopped after round {outcome.t}")
        result = summary(self.config, federation.partition.hash, rows)
        write(self.folder / "result.json", json.dumps(result))
        return result

    def _save(self, federation: Federation, outcome: Outcome) -> None:
        path = self.folder / "checkpoint.safetensors"
        tensors: dict[str, Tensor] = {f"server/{k}": v for k, v in flatten(outcome.server).items()}
        held = [("state", federation.clients.state)]
        if not self.config.train.reset_momentum:
            held.append(("momentum", federation.clients.momentum))
        for kind, sets in held:
            for name, weights in sets.items():
                tensors |= {f"{kind}/{name}/{k}": v for k, v in weights.items()}
        scratch = path.with_suffix(".part")
        with _plainly(path):
            try:
                save_file(
                    {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, scratch, {"round": str(outcome.t)}
                )
                with scratch.open("rb") as file:
                    os.fsync(file.fileno())
                scratch.replace(path)
            except BaseException:
                scratch.unlink(missing_ok=True)
                raise

    def _take_up(self, federation: Federation) -> tuple[Message | None, int]:
        """Fills the clients from the checkpoint; the server's state and the round it was made after."""
        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            return None, 0
        server: dict[str, Tensor] = {}
        clients = {"state": federation.clients.state, "momentum": federation.clients.momentum}
        try:
            with safe_open(path, "pt") as file:
                last = int(file.metadata()["round"])
                names = file.keys()
                for key in names:
                    kind, _, name = key.partition("/")
                    if kind == "server":
                        server[name] = file.get_tensor(key).to(federation.clients.stack.owned.device)
                    else:
                        which, _, weight = name.partition("/")
                        clients[kind][which][weight].copy_(file.get_tensor(key))
        except (SafetensorError, KeyError, RuntimeError, TypeError) as error:
            raise UserError(f"{path}: not a checkpoint of this run ({error}); remove it to start again") from None
        return restore(server), last

    def _cut(self, last: int) -> list[Row]:
        """The rows up to the checkpoint's round; later ones are dropped, since their rounds come again."""
        rows = [row for row in self.rows() if row["round"] <= last]
        if len(rows) != last:
            raise UserError(f"{self.folder / 'metrics.jsonl'}: has {len(rows)} of the {last} rounds in the checkpoint")
        write(self.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        return rows


def metrics(folder: Path) -> list[Row]:
    """The rows of a run's metrics; a last line that was cut off by the death of the process does not count."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            if line:
                rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise UserError(f"{path}: line {number} is damaged") from None
    return rows


def _sound(outcome: Outcome, folder: Path) -> None:
    """Stops at the first loss that is not a number."""
    for name, values in outcome.terms.items():
        bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
        if bad:
            client = outcome.clients[bad[0]]
            raise UserError(
                f"{folder}: the loss term '{name}' of client {client} became {float(values[bad[0]])} "
                f"in round {outcome.t}; "
                "lower train.lr or the term's weight. The last checkpoint is kept"
            )


def _row(outcome: Outcome, seconds: float) -> Row:
    row: Row = {
        "round": outcome.t,
        "seconds": round(seconds, 4),
        "clients": outcome.clients,
        "failed": {str(c): why for c, why in outcome.failed.items()},
        "loss": {k: _floats(v) for k, v in outcome.terms.items()},
        "up": [[c.numbers, c.bytes] for c in outcome.up],
        "down": [[c.numbers, c.bytes] for c in outcome.down],
    }
    if outcome.scores is not None:
        row["accuracy"] = {k: _floats(v) for k, v in outcome.scores.accuracy.items()}
        row["silhouette"] = outcome.scores.silhouette
    return row


def _floats(values: Tensor) -> list[float | None]:
    return [v if math.isfinite(v) else None for v in values.tolist()]


def _decisive(config: Config) -> Row:
    """The configuration without what does not change the outcome."""
    content = config.model_dump(mode="json")
    content["data"].pop("root")
    content["train"].pop("checkpoint")
    content.pop("device")
    if not content["eval"]["snapshots"]:
        content["eval"].pop("snapshots")
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
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path}: damaged, not a JSON object; choose another --out")
    return content


def _environment(federation: Federation, data: Dataset) -> Row:
    where = federation.clients.stack.owned.device
    return {
        "fedsap": fedsap.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "command": sys.argv,
        "classes": list(data.classes),
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
        best = max((m, -row["round"]) for m, row in zip(means, judged, strict=True) if m is not None)
        accuracy[name] = {"mean": means[-1], "best": best[0], "best_round": -best[1], "per_client": values}
    return {
        "method": config.method["name"],
        "dataset": config.data.name,
        "seed": config.seed,
        "rounds": config.train.rounds,
        "partition": partition_hash,
        "accuracy": accuracy,
        "silhouette": last["silhouette"],
        "comm": {way: _per_round([row[way] for row in steady]) for way in ("up", "down")},
        "seconds": round(sum(row["seconds"] for row in rows), 3),
    }


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
