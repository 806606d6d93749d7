"""The Flower app of a server: the same round loop and run folders as in process, with nodes as the engine."""

import json
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsap.config import Config, assignments, merged, read, resolve
from fedsap.data.partition import Partition
from fedsap.engines.flower.agree import agree
from fedsap.engines.flower.gate import Gate
from fedsap.engines.flower.launch import STATUS, STOP
from fedsap.engines.flower.post import Post
from fedsap.engines.flower.remote import Remote
from fedsap.engines.flower.roster import Roster
from fedsap.engines.flower.trust import template
from fedsap.errors import UserError
from fedsap.federation import Federation, Shares, build_network, dataset, rules, split, task_of
from fedsap.methods import place_of
from fedsap.runs import NODES, Row, Run, Stopped, execute_all, read_json, write

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Plays all runs that the app's configuration asks for."""
    asked = context.run_config
    folder = Path(str(asked.get("out") or "runs/flower")).absolute()
    try:
        play(grid, configs_of(asked), folder, bool(asked.get("resume", False)))
    except (UserError, Stopped) as error:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / STATUS, json.dumps({"why": str(error), "user": isinstance(error, UserError)}))
        print(f"fedsap: {error}", flush=True)
        raise


def configs_of(asked: Any) -> list[Config]:
    """The runs that a Flower app's configuration describes: `config`, a TOML file; `set`, `method` and `seed`, words
    with spaces between them; or `job`, all of it as JSON."""
    if asked.get("job"):
        job = json.loads(str(asked["job"]))
        return resolve(job["layer"], job["methods"], job["seeds"])
    file = str(asked.get("config") or "")
    layer = merged(read(Path(file)) if file else {}, assignments(str(asked.get("set") or "").split()))
    seeds = [int(word) for word in str(asked.get("seed") or "").split()]
    return resolve(merged(layer, {"engine": "flower"}), str(asked.get("method") or "").split(), seeds)


def play(grid: Grid, configs: Sequence[Config], folder: Path, resume: bool) -> None:
    """All runs, one after the other, each in its folder."""
    runs = [Run(folder / f"{c.method['name']}-{c.seed}", c) for c in configs]
    for one in runs:
        one.check(resume)
    first = configs[0]
    post = Post(grid, first.flower.timeout + 60)
    gate = Gate(post, Roster(first.partition.clients, first.flower.data == "own"), first, _say)
    before = [place for place in (_places(one) for one in runs) if place]
    for place in before:
        gate.roster.places |= place["clients"]
    meet(gate, before[0]["classes"] if before else ())
    for one in runs:
        if one.result is None:
            _say(f"{one.folder.name}: {one.config.rounds} rounds, {gate.roster.total} clients")
            gate.config = one.config
            execute_all([one], partial(remote_federation, gate, one), on_round=_told, stop=_stop(folder))


def meet(gate: Gate, classes: Sequence[str]) -> None:
    """Waits for the nodes, and agrees with them on the classes; `classes` are those of a federation that goes on."""
    roster, keys = gate.roster, gate.config.flower
    if classes:
        roster.classes = tuple(classes)

    def there() -> int:
        return len(roster.members) if roster.own and not roster.classes else len(roster.owner)

    gate.wait(lambda: there() >= roster.total, keys.wait)
    if there() < keys.least * roster.total or not there():
        why = next(iter(roster.refused.values()), "no other node came")
        raise Stopped(f"{there()} of {roster.total} clients are there after {keys.wait:g} s ({why})")
    if not classes:
        roster.begin(agree({m.name: m.said.classes for m in roster.members.values()}, keys.classes))


def remote_federation(gate: Gate, run: Run, _: Sequence[Config]) -> Federation[Remote]:
    """The federation of one run as the server sees it."""
    roster, config = gate.roster, run.config
    shape = next(m.said.shape for m in sorted(roster.members.values(), key=lambda m: m.clients))
    network = build_network(config, len(roster.classes), shape)
    method = config.made_method()
    task = task_of(config, network, roster.total, config.unlabelled.size)
    shares = _shares(roster, config)
    known = shares if isinstance(shares, Partition) else None
    clients = Remote(
        gate,
        method,
        task,
        config,
        _run_id(run, roster),
        template(method, task, shape),
        held=known.classes if known else None,
        hash=known.hash if known else "",
        plugin=place_of(config.method["name"]),
    )
    return Federation(
        config,
        {config.seed: shares},
        method,
        task,
        clients,
        *rules(config),
        classes=roster.classes,
        device=torch.device("cpu"),
        checkpoint=0.0,  # nodes keep two states of a client: the server must not fall back further
    )


@dataclass(frozen=True)
class Named:
    """What a server knows of data that stays where it is: the names of each client's classes. It has no counts."""

    classes: tuple[tuple[int, ...], ...]
    total: int
    seed: int
    hash: str = "none: data stay with the nodes"

    def to_dict(self) -> dict[str, Any]:
        return {
            "rule": "own",
            "seed": self.seed,
            "num_classes": self.total,
            "classes": [list(own) for own in self.classes],
            "shots": [[1] * len(own) for own in self.classes],
            "hash": self.hash,
        }


def _shares(roster: Roster, config: Config) -> Shares:
    if not roster.own:
        try:
            return split(config, dataset(config))
        except UserError:  # this machine has no data
            pass
    owner, classes = roster.owner, roster.classes
    held = [sorted(classes.index(n) for n in owner[c].said.classes) if c in owner else [] for c in range(roster.total)]
    return Named(tuple(map(tuple, held)), len(classes), config.seed)


def _run_id(run: Run, roster: Roster) -> str:
    """The run's own name for itself, which nodes file its clients' states under; made once."""
    before = _places(run)
    known: Row = before or {"run": secrets.token_hex(16)}
    known |= {"classes": list(roster.classes), "clients": roster.places}
    run.folder.mkdir(parents=True, exist_ok=True)
    write(_places_file(run), json.dumps(known))
    return str(known["run"])


def _places(run: Run) -> Row | None:
    path = _places_file(run)
    return read_json(path) if path.exists() else None


def _places_file(run: Run) -> Path:
    return run.folder / NODES


def _told(one: Run, row: Row) -> None:
    known = {k: [v for v in values if v is not None] for k, values in row.get("accuracy", {}).items()}
    figures = ", ".join(f"{k} {100 * statistics.fmean(some):.1f}" for k, some in known.items() if some)
    missing = f", {len(row['failed'])} failed" if row["failed"] else ""
    there = f"{len(row['clients'])} clients{missing}"
    _say(f"{one.folder.name} round {row['round']}: {there}, {row['seconds']:.1f} s. {figures}")
    for client, why in row["failed"].items():
        _say(f"  client {client}: {why}")


def _stop(folder: Path) -> Callable[[], bool]:
    """A file of that name beside the runs ends them after the round."""
    return lambda: (folder / STOP).exists()


def _say(line: str) -> None:
    print(f"fedsap: {line}", flush=True)
