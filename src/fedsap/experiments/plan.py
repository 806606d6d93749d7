"""Which runs experiments need, in which folders, and which of them they share."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from fedsap.config import Config, assignments, merged
from fedsap.errors import UserError
from fedsap.experiments.catalogue import Experiment, catalogue, configs, quick
from fedsap.models import Small
from fedsap.presets import Layer
from fedsap.runs import Row, Run, decisive

OBSERVED = ("snapshots", "gradients")  # keys of eval that change nothing in what a run comes to
SMALL_KEYS = ("name", "weights", *(name for name in Small.__dataclass_fields__ if name not in ("classes", "shape")))


@dataclass(frozen=True)
class Place:
    """One set of runs in an experiment's table, equal but for the seed. `tags` are what it can be selected by."""

    experiment: Experiment
    reading: str
    setting: str
    variant: str
    runs: tuple[Run, ...]
    full: int  # rounds that the experiment has unless it is made shorter
    tags: Mapping[str, str]

    @property
    def rounds(self) -> int:
        return self.runs[0].config.rounds

    def round(self, t: int) -> int:
        """Round t of the full experiment in runs that may be shorter: the same share of all rounds.

        At least 1.
        """
        return max(1, round(t * self.rounds / self.full))


@dataclass(frozen=True)
class Change:
    """What is asked for beside the experiments themselves."""

    quick: bool = False
    seeds: tuple[int, ...] = ()
    sets: tuple[str, ...] = ()  # KEY=VALUE
    data: Path | None = None

    def __call__(self, layer: Layer) -> Layer:
        """An experiment's layer with it."""
        changed = merged(_quickly(layer) if self.quick else layer, assignments(self.sets))
        return merged(changed, {"data": {"root": str(self.data)}} if self.data else {})

    def renamed(self, one: Experiment) -> Experiment:
        """The experiment under a name that says what is changed. A quick one has nothing of the paper beside it."""
        for word in self.sets:
            name = f"{one.name}-{re.sub(r'[^A-Za-z0-9._]+', '-', word)}"
            one = replace(one, name=name, title=f"{one.title}, with {word}")
        if self.quick:
            one = replace(one, name=f"{one.name}-quick", title=f"{one.title}: a quick try", paper={}, footnotes=())
        return one

    def seeds_of(self, experiment: Experiment) -> tuple[int, ...]:
        return self.seeds or (experiment.seeds[: quick()["limits"]["seeds"]] if self.quick else experiment.seeds)


def _quickly(layer: Layer) -> Layer:
    limits, name = quick()["limits"], layer["data"]["name"]
    small = merged(layer, quick()["all"], quick().get(name, {}))
    if small.get("model", {}).get("name") == "small":
        small = {**small, "model": {k: v for k, v in small["model"].items() if k in SMALL_KEYS}}
    small = merged(small, {"partition": {"shots": min(limits["shots"], layer["partition"]["shots"])}})
    pool = min(limits["pool"], layer.get("unlabelled", {}).get("size", 0))
    return (
        merged(small, {"unlabelled": {"size": pool}}) if pool else {k: v for k, v in small.items() if k != "unlabelled"}
    )


def identity(content: Row) -> str:
    """What runs that differ in their seed, and in what is looked at besides, have in common; `content` is what
    `runs.decisive` gives and config.json holds."""
    kept = {k: v for k, v in content.items() if k != "seed"}
    kept["eval"] = {k: v for k, v in content["eval"].items() if k not in OBSERVED}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]


def plan(experiments: Sequence[Experiment], out: Path, change: Change) -> list[Place]:
    """All places of the experiments. A run that two of them have is in one folder, and is looked at as closely as any
    experiment of the catalogue wants."""
    wanted: dict[str, Layer] = {}
    for one in catalogue().values():
        for where in one.places():
            layer = one.layer(*where)
            if set(layer.get("eval", {})) & set(OBSERVED):
                config, full = _resolved(change(layer), change(layer), (0,))[0], _rounds(layer)
                looks = wanted.setdefault(identity(decisive(config)), {"snapshots": [], "gradients": False})
                ratio = config.rounds / full
                rounds = {max(1, round(t * ratio)) for t in layer["eval"].get("snapshots", [])}
                looks["snapshots"] = sorted({*looks["snapshots"], *rounds})
                looks["gradients"] |= layer["eval"].get("gradients", False)
    return [_place(one, where, out, change, wanted) for one in experiments for where in one.places()]


def _place(
    one: Experiment, where: tuple[str, str, str], out: Path, change: Change, wanted: Mapping[str, Layer]
) -> Place:
    layer = one.layer(*where)
    found = _resolved(change(layer), layer, change.seeds_of(one))
    mark = identity(decisive(found[0]))
    if mark in wanted:
        found = [c.model_copy(update={"eval": c.eval.model_copy(update=wanted[mark])}) for c in found]
    first = found[0]
    data, ways, shots, method = first.data.name, first.partition.ways, first.partition.shots, first.method["name"]
    folder = out / f"{data}-n{ways}-k{shots}-{method}-{mark}"
    runs = tuple(Run(folder / str(c.seed), c) for c in found)
    return Place(change.renamed(one), *where, runs, _rounds(layer), _tags(first, where))


def _tags(config: Config, where: tuple[str, str, str]) -> dict[str, str]:
    reading, setting, variant = where
    return {
        "data": config.data.name,
        "n": f"n={config.partition.ways}",
        "k": f"k={config.partition.shots}",
        "setting": setting,
        "method": config.method["name"],
        "variant": variant,
        "reading": reading,
    }


def _resolved(layer: Layer, about: Layer, seeds: tuple[int, ...]) -> list[Config]:
    """The configurations, with nothing looked at besides."""
    evaluation = {k: v for k, v in layer.get("eval", {}).items() if k not in OBSERVED}
    try:
        return configs({**layer, "eval": evaluation}, seeds)
    except UserError as error:
        raise UserError(f"{error} (in {about['data']['name']}, {about['method']['name']})") from None


def _rounds(layer: Layer) -> int:
    return _resolved(layer, layer, (0,))[0].rounds


def select(places: Sequence[Place], words: Iterable[str]) -> list[Place]:
    """The places that `--only` names: words of one kind are alternatives, different kinds have to hold together.

    Kinds, in the order in which a word is looked for: data set, n=3, k=25, setting, method, variant, reading.
    """
    by_kind: dict[str, set[str]] = {}
    for word in words:
        kind = next((k for k in places[0].tags if any(p.tags[k] == word for p in places)), None)
        if kind is None:
            known = dict.fromkeys(p.tags[k] for k in ("data", "n", "k", "method", "variant", "reading") for p in places)
            raise UserError(f"--only: got '{word}', takes words from: {', '.join(w for w in known if w)}")
        by_kind.setdefault(kind, set()).add(word)
    found = [p for p in places if all(p.tags[kind] in some for kind, some in by_kind.items())]
    if not found:
        raise UserError(
            f"--only: nothing is {' and '.join(w for some in by_kind.values() for w in sorted(some))} at once"
        )
    return found


def names(places: Iterable[Place]) -> list[str]:
    """The experiments of the places by name, each once."""
    return list(dict.fromkeys(place.experiment.name for place in places))


def distinct(places: Iterable[Place]) -> list[Run]:
    """All runs of the places, each once."""
    runs: dict[Path, Run] = {}
    for place in places:
        for run in place.runs:
            runs.setdefault(run.folder, run)
    return list(runs.values())


def places_of(runs: Iterable[tuple[Path, Row, int]]) -> list[Place]:
    """Where runs belong in the tables and figures for which the paper has values, however they were made: folder,
    content of config.json and seed of each. Of two with the same seed the first counts."""
    mine: dict[str, dict[int, Path]] = {}
    for folder, content, seed in runs:
        with contextlib.suppress(KeyError, AttributeError):  # a configuration of another version
            mine.setdefault(identity(content), {}).setdefault(seed, folder)
    found = []
    for (name, reading, setting, variant), mark in _identities().items():
        if mark in mine:
            one, where = catalogue()[name], (reading, setting, variant)
            layer = one.layer(*where)
            made = _resolved(layer, layer, tuple(mine[mark]))
            runs_of = tuple(Run(folder, config) for folder, config in zip(mine[mark].values(), made, strict=True))
            found.append(Place(one, *where, runs_of, _rounds(layer), _tags(made[0], where)))
    return found


@cache
def _identities() -> dict[tuple[str, str, str, str], str]:
    """The identity of every place that the paper has a value for."""
    found = {}
    for one in catalogue().values():
        told = {(variant, setting) for _, variant, setting in one.paper}
        for reading, setting, variant in one.places():
            if (variant, setting) in told and one.group != "study":
                layer = one.layer(reading, setting, variant)
                found[one.name, reading, setting, variant] = identity(decisive(_resolved(layer, layer, (0,))[0]))
    return found
