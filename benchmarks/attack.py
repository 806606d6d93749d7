"""What one lying client of ten does to the others, and what the rules for combining prototypes make of it.

    python benchmarks/attack.py [--method fedproto] [--only geometric] [--start common] [--ways 4] [--rounds 60]
                                [--seeds 3] [--json FILE]

The digits, 10 clients with about 4 of the 10 classes each. One of them trains as all do, but what arrives from it are
its prototypes times 1,000, or its prototypes with their classes changed about. Accuracies are those of the nine others,
in %, mean ± standard deviation over seeds. Without --only, all rules.

The attacked methods run by themselves, too:

    cd benchmarks && fedsap run --method attack:AttackedFedProto --set method.attack=scaled --set method.rule=median
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from fedsap.config import resolve
from fedsap.errors import UserError
from fedsap.federation import build_federation, dataset
from fedsap.message import Message, PerClass
from fedsap.methods import FedMPS, FedProto, FedSAP, Round, Task, named
from fedsap.methods.method import option
from fedsap.runs import Run, execute_all

Attack = Literal["none", "scaled", "swapped"]
ABOUT = {
    "attack": "what arrives from the attacker: what it sent; 1,000 times that; or that with its classes changed about",
    "attacker": "the id of the client that lies",
}


def corrupted(replies: Message, clients: torch.Tensor, attacker: int, attack: Attack) -> Message:
    """The replies of a round, prototypes [R, C, d] by name, those of one client as it would have them. Of its own
    confidence it says that it is complete."""
    place = (clients == attacker).nonzero().flatten()
    if attack == "none" or not len(place):
        return replies
    made: Message = {}
    for name, entry in replies.items():
        made[name] = entry
        if name == "count" or not isinstance(entry, PerClass):
            continue
        values, row = entry.values.clone(), int(place)
        own = entry.mask[row].nonzero().flatten()
        if name == "confidence":
            values[row, own] = 1.0
        elif attack == "scaled":
            values[row] *= 1000
        else:
            values[row, own] = values[row, own.roll(1)]
        made[name] = replace(entry, values=values)
    return made


@dataclass(frozen=True)
class AttackedFedProto(FedProto):
    name: ClassVar[str] = "fedproto-attacked"
    title: ClassVar[str] = "FedProto, attacked"

    attack: Attack = option("none", ABOUT["attack"])
    attacker: int = option(0, ABOUT["attacker"])

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        return super().combine(task, server, corrupted(replies, t.clients, self.attacker, self.attack), t)


@dataclass(frozen=True)
class AttackedFedSAP(FedSAP):
    name: ClassVar[str] = "fedsap-attacked"
    title: ClassVar[str] = "FedSAP, attacked"

    attack: Attack = option("none", ABOUT["attack"])
    attacker: int = option(0, ABOUT["attacker"])

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        return super().combine(task, server, corrupted(replies, t.clients, self.attacker, self.attack), t)


@dataclass(frozen=True)
class AttackedFedMPS(FedMPS):
    name: ClassVar[str] = "fedmps-attacked"
    title: ClassVar[str] = "FedMPS, attacked"

    attack: Attack = option("none", ABOUT["attack"])
    attacker: int = option(0, ABOUT["attacker"])

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        return super().combine(task, server, corrupted(replies, t.clients, self.attacker, self.attack), t)


METHODS = {"fedproto": AttackedFedProto, "fedsap": AttackedFedSAP, "fedmps": AttackedFedMPS}
RULES: dict[str, dict[str, Any]] = {
    "mean": {},
    "weighted": {"weighted": True},
    "confidence": {"rule": "confidence"},
    "median": {"rule": "median"},
    "trimmed": {"rule": "trimmed"},
    "geometric": {"rule": "geometric"},
    "mean,limit=1": {"limit": 1.0},
    "median,limit=1": {"rule": "median", "limit": 1.0},
    "geometric,limit=1": {"rule": "geometric", "limit": 1.0},
    "geometric,limit=2": {"rule": "geometric", "limit": 2.0},
}
MEASURES = ("head", "proto", "proto_cos")
ATTACKER = 0


def measured(
    method: str, attack: Attack, options: Mapping[str, Any], *, seeds: Sequence[int], rounds: int, ways: int, out: Path
) -> dict[str, list[float]] | str:
    """Accuracy of the honest clients by measure, a number for each seed; or why there is none."""
    user = {
        "partition": {"clients": 10, "ways": ways},
        "train": {"rounds": rounds},
        "eval": {"every": rounds, "silhouette": 0},
        "method": {"attack": attack, "attacker": ATTACKER, **options},
    }
    configs = resolve(user, [named(f"{__name__}:{METHODS[method].__name__}")], seeds)
    data = dataset(configs[0])
    runs = [Run(out / f"{method}-{attack}-{c.seed}", c) for c in configs]
    try:
        results = execute_all(runs, lambda some: build_federation(some, data))
    except UserError as error:  # a loss that is not a number
        return str(error).partition(": ")[2].partition(";")[0]
    return {m: [honest(r["accuracy"][m]["per_client"]) for r in results] for m in MEASURES}


def honest(per_client: Sequence[float]) -> float:
    return statistics.fmean(v for client, v in enumerate(per_client) if client != ATTACKER)


def cell(found: Sequence[float]) -> str:
    spread = f" ± {100 * statistics.stdev(found):.1f}" if len(found) > 1 else ""
    return f"{100 * statistics.fmean(found):.1f}{spread}"


def main(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures and prints a row of the table after the other."""
    print("| method | rule | attack | head | prototype L2 | prototype cosine |\n| --- | --- | --- | --- | --- | --- |")
    attacks: tuple[Attack, ...] = ("none", "scaled", "swapped")
    seeds = range(1234, 1234 + args.seeds)
    for method in args.method or METHODS:
        rules = [r for r in args.only or RULES if not (method == "fedmps" and "weighted" in RULES[r])]
        for rule in rules:
            for attack in attacks:
                options = {"start": args.start, **RULES[rule]}
                with tempfile.TemporaryDirectory() as scratch:
                    figures = measured(
                        method, attack, options, seeds=seeds, rounds=args.rounds, ways=args.ways, out=Path(scratch)
                    )
                shown = [figures] if isinstance(figures, str) else [cell(figures[m]) for m in MEASURES]
                title = METHODS[method].title.partition(",")[0]
                print("| " + " | ".join([title, rule, attack, *shown, *[""] * (3 - len(shown))]) + " |", flush=True)
                yield {"method": method, "rule": rule, "attack": attack, "accuracy": figures}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--only", action="append", choices=RULES, metavar="RULE", help="; ".join(RULES))
    parser.add_argument("--start", default="independent", choices=("independent", "common"))
    parser.add_argument("--ways", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = list(main(args))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
