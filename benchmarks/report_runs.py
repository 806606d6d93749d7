"""Run folders to time the report with: 4 methods x 9 settings x 3 seeds, written by the code that writes runs.

    python benchmarks/report_runs.py DIR [--rounds 100] [--seeds 3] [--snapshots]
    /usr/bin/time -v fedsap report DIR

The numbers in them are drawn, not trained.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import fedsap
from fedsap import runs
from fedsap.config import Config, resolve
from fedsap.data import Dataset, Split
from fedsap.evaluate import Kept, Scores
from fedsap.federation import split
from fedsap.message import Cost, PerClass
from fedsap.snapshots import save_snapshot
from fedsap.training.rounds import Outcome

PAPER = (("femnist", 62, (3, 4, 5)), ("cifar10", 10, (3, 4, 5)), ("cifar100", 100, (10, 20, 30)))
METHODS = ("fedsap", "fedproto", "fedmps", "fedavg")


def dataset(name: str, classes: int, each: int = 1000) -> Dataset:
    """Labels without images worth looking at."""
    labels = np.repeat(np.arange(classes), each)
    part = Split(np.zeros((len(labels), 1, 1, 1), np.uint8), labels)
    return Dataset(name, part, part, tuple(f"class {c}" for c in range(classes)), (0.5,), (0.5,), "none")


def fabricate(folder: Path, config: Config, data: Dataset, rounds: int | None = None) -> None:
    """One run's folder; only its first rounds, and no result, if `rounds` are fewer than configured."""
    rng = np.random.default_rng([config.seed, len(str(config.model_dump()))])
    parts = split(config, data)
    folder.mkdir(parents=True)
    runs.write(folder / "partition.json", json.dumps(parts.to_dict()))
    environment = {"fedsap": fedsap.__version__, "classes": list(data.classes), "command": ["fedsap", "run"]}
    runs.write(folder / "environment.json", json.dumps(environment, indent=1))
    runs.write(folder / "config.json", json.dumps(runs.decisive(config), indent=1))
    clients, total = list(range(parts.clients)), config.train.rounds
    top = float(rng.uniform(0.6, 0.95))
    centres = rng.normal(size=(len(data.classes), 64))
    labels = np.array([rng.choice(own) for own in parts.classes for _ in range(1000 // parts.clients)])
    owners = np.repeat(clients, 1000 // parts.clients)
    thumbnails = torch.from_numpy(rng.integers(0, 255, (len(labels), 32, 32, 3), dtype=np.uint8))
    rows = []
    for t in range(1, (rounds or total) + 1):
        scores = None
        if t % config.eval.every == 0 or t == total:
            level = top * (1 - np.exp(-4 * t / total))
            drawn = {m: torch.from_numpy(np.clip(level + 0.05 * rng.normal(size=len(clients)), 0, 1)) for m in MEASURES}
            scores = Scores(drawn, float(level - 0.5))
        terms = {"ce": torch.rand(len(clients)), "align": torch.rand(len(clients)), "proxy": torch.rand(len(clients))}
        sent = [Cost(64 * len(own), 258 * len(own)) for own in parts.classes]
        outcome = Outcome(t, {}, clients, {}, terms, sent, sent)
        rows.append(runs._row(outcome, 0.1, config) | runs._figures(scores))
        if t in config.eval.snapshots:
            h = centres[labels] * t / total + rng.normal(size=(len(labels), 64))
            bank = PerClass(torch.from_numpy(centres * t / total), torch.ones(len(data.classes), dtype=torch.bool))
            every = torch.arange(len(labels))
            kept = Kept(torch.from_numpy(h), torch.from_numpy(labels), torch.from_numpy(owners), every, bank)
            save_snapshot(folder, t, kept, thumbnails)
    runs.write(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    if len(rows) == total:
        runs.write(folder / "result.json", json.dumps(runs.summary(config, parts.hash, rows)))


MEASURES = ("head", "head_own", "proto", "proto_cos")


def paper(
    out: Path, rounds: int, seeds: Sequence[int], methods: Sequence[str] = METHODS, snapshots: bool = False
) -> int:
    """The runs of the paper's main table; how many."""
    made = 0
    for name, classes, several in PAPER:
        data = dataset(name, classes)
        for ways in several:
            kept = sorted({max(1, rounds * p // 100) for p in (10, 50, 75, 100)}) if snapshots else []
            user = {
                "data": {"name": name},
                "partition": {"ways": ways, "shots": 10},
                "train": {"rounds": rounds},
                "eval": {"snapshots": kept},
            }
            for config in resolve(user, methods, seeds):
                fabricate(out / f"{name}-{ways}" / f"{config.method['name']}-{config.seed}", config, data)
                made += 1
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--snapshots", action="store_true")
    args = parser.parse_args()
    print(paper(args.out, args.rounds, range(1234, 1234 + args.seeds), snapshots=args.snapshots), "runs")
