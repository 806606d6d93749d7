"""What a set of runs shows: settings, variants of methods, and what was varied on purpose."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from fedsap.config import PrivacyKeys
from fedsap.methods import METHODS, Method
from fedsap.report.read import Floats, RunData, mean_of
from fedsap.runs import flat

DATASETS = {
    "digits": "Digits",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "femnist": "FEMNIST",
    "folder": "Own images",
}
SHORT = {
    "partition.shots": "k",
    "unlabelled.size": "|U|",
    "unlabelled.foreign": "foreign",
    "partition.clients": "clients",
    "partition.rule": "rule",
    "train.rounds": "rounds",
}
BESIDE = ("seed", "eval.snapshots", "eval.gradients", "engine")  # keys in which seeds of one variant may differ
OPTIONAL = tuple(f"model.{k}" for k in ("reinit_stem", "dropout", "embedding", "head_input", "head_scale", "dim"))
PRIVACY = flat({"privacy": PrivacyKeys().model_dump()})  # of runs that say nothing of it
Key = tuple[tuple[str, str], ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Variant:
    """One method with its options in one setting, over seeds: one curve, one cell of a table."""

    setting: str
    label: str
    options: dict[str, Any]
    runs: tuple[RunData, ...]

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    @property
    def finished(self) -> tuple[RunData, ...]:
        return tuple(run for run in self.runs if run.over)


@dataclass(frozen=True)
class Setting:
    """A data set and how it is dealt out."""

    label: str
    dataset: str
    short: str  # the label without the data set
    content: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Study:
    """All runs of a report, arranged. `labels` are the methods in the order of the tables, a variant each."""

    settings: tuple[Setting, ...]
    labels: tuple[str, ...]
    variants: tuple[Variant, ...]

    def find(self, setting: str, label: str) -> Variant | None:
        return next((v for v in self.variants if v.setting == setting and v.label == label), None)

    def of(self, setting: str) -> list[Variant]:
        return [v for v in self.variants if v.setting == setting]

    @property
    def runs(self) -> list[RunData]:
        return [run for v in self.variants for run in v.runs]


def title(method: str) -> str:
    """A method's name for people.

    >>> title("fedsap"), title("someones-own")
    ('FedSAP', 'someones-own')
    """
    return METHODS[method].title if method in METHODS else method


def shares_prototypes(method: str) -> bool:
    """Does the server hold prototypes? (Evaluation measures some for a method without; they are nobody's.)

    >>> shares_prototypes("fedproto"), shares_prototypes("fedavg")
    (True, False)
    """
    return method not in METHODS or METHODS[method].bank is not Method.bank


def arrange(runs: Sequence[RunData]) -> Study:
    """Runs by setting and variant; each is named by what tells it from the others and by no more."""
    parts = [_parts(run) for run in runs]
    settings = _settings([setting for setting, _ in parts])
    order = {name: i for i, name in enumerate(METHODS)}
    grouped = _group(zip(runs, parts, strict=True), lambda pair: (_key(pair[1][0]), _key(pair[1][1])))
    labels = _labels([pairs[0][1] for pairs in grouped.values()])
    variants = []
    for pairs, label in zip(grouped.values(), labels, strict=True):
        seeds = sorted((run for run, _ in pairs), key=lambda run: run.seed)
        variants.append(Variant(settings[_key(pairs[0][1][0])].label, label, pairs[0][1][1], tuple(seeds)))
    variants.sort(key=lambda v: (order.get(v.method, len(order)), v.label))
    ordered = sorted(settings.values(), key=_place)
    return Study(tuple(ordered), tuple(dict.fromkeys(v.label for v in variants)), tuple(variants))


def _parts(run: RunData) -> tuple[dict[str, Any], dict[str, Any]]:
    """The setting and the method's options."""
    content = PRIVACY | {k: v for k, v in flat(run.config).items() if k not in BESIDE}
    options = {k: v for k, v in content.items() if k.startswith(("method.", "privacy.")) or k in OPTIONAL}
    return {k: v for k, v in content.items() if k not in options}, options


def _key(content: dict[str, Any]) -> Key:
    return tuple(sorted((k, repr(v)) for k, v in content.items()))


def _group(items: Iterable[T], key: Callable[[T], Hashable]) -> dict[Hashable, list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _varying(contents: Sequence[dict[str, Any]]) -> list[str]:
    """The keys whose values differ, in order of first appearance."""
    keys = dict.fromkeys(k for content in contents for k in content)
    return [k for k in keys if len({repr(content.get(k)) for content in contents}) > 1]


def _settings(contents: Sequence[dict[str, Any]]) -> dict[Key, Setting]:
    unique = {_key(content): content for content in contents}
    found: dict[Key, Setting] = {}
    for same in _group(unique.items(), lambda item: (item[1]["data.name"], item[1]["partition.ways"])).values():
        varying = _varying([content for _, content in same])
        for key, content in same:
            dataset = DATASETS.get(content["data.name"], str(content["data.name"]))
            short = [f"n={content['partition.ways']}", *(_said(k, content.get(k)) for k in varying)]
            found[key] = Setting(f"{dataset}, {', '.join(short)}", dataset, ", ".join(short), content)
    return found


def _place(setting: Setting) -> tuple[Any, ...]:
    names = list(DATASETS.values())
    known = names.index(setting.dataset) if setting.dataset in names else len(names)
    number = {k: v for k, v in setting.content.items() if isinstance(v, int | float)}
    return known, setting.dataset, number.get("partition.ways", 0), number.get("partition.shots", 0), setting.label


def _labels(parts: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """A label for each of (setting, options): the method, and the options in which it is not the usual variant."""
    varying = {
        name: _varying([options for _, options in same])
        for name, same in _group(parts, lambda pair: pair[1]["method.name"]).items()
    }
    preset = {  # what only follows the setting tells no variants apart
        name: [k for k in keys if any(len(_values(k, same)) > 1 for same in _by_setting(parts, name))]
        for name, keys in varying.items()
    }
    usual = {
        (name, k): _usual(str(name), k, [o for _, o in parts if o["method.name"] == name])
        for name in preset
        for k in preset[name]
    }
    labels = []
    for _, options in parts:
        name = options["method.name"]
        extra = ", ".join(_said(k, options.get(k)) for k in preset[name] if repr(options.get(k)) != usual[name, k])
        labels.append(f"{title(name)} ({extra})" if extra else title(name))
    return labels


def _usual(name: str, key: str, contents: Sequence[dict[str, Any]]) -> str:
    """The value that goes without saying: the default, if a variant has it, or else the most frequent one."""
    values = [repr(content.get(key)) for content in contents]
    known = {k: repr(v) for k, v in PRIVACY.items()}
    if name in METHODS:
        known |= {f"method.{f.name}": repr(f.default) for f in dataclasses.fields(METHODS[name])}
    return known[key] if known.get(key) in values else max(values, key=values.count)


def _by_setting(parts: Sequence[tuple[dict[str, Any], dict[str, Any]]], name: Hashable) -> list[list[dict[str, Any]]]:
    mine = [pair for pair in parts if pair[1]["method.name"] == name]
    return [[options for _, options in same] for same in _group(mine, lambda pair: _key(pair[0])).values()]


def _values(key: str, contents: Sequence[dict[str, Any]]) -> set[str]:
    return {repr(content.get(key)) for content in contents}


def _said(key: str, value: Any) -> str:
    """A key and its value as short as people say it.

    >>> _said("partition.shots", 25), _said("method.align_start", None)
    ('k=25', 'align_start=auto')
    """
    said = "auto" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
    return f"{SHORT.get(key, key.rpartition('.')[2])}={said}"


POOL = {  # what is said of unlabelled samples; those in per cent first
    "accepted": "Accepted samples",
    "right": "Right among the accepted",
    "right_all": "Right among all",
    "rejected": "Rejected of foreign classes",
    "margin": "Least margin",
    "distance": "Largest distance",
}
SHARES = tuple(POOL)[:4]


@dataclass(frozen=True)
class Curve:
    """A quantity over rounds [E]: mean and standard deviation (n - 1; zero for one) over the seeds that reached it."""

    rounds: list[int]
    mean: Floats
    std: Floats


def over_rounds(runs: Sequence[RunData], measure: str) -> Curve:
    """`measure`: one of evaluate.MEASURES, "silhouette", "loss:TERM", "noted:NAME", or "unlabelled:FIGURE"."""
    series: dict[int, list[float]] = {}
    for run in runs:
        if measure.startswith("loss:"):
            at, values = run.rounds, run.loss.get(measure[5:], np.full(len(run.rounds), np.nan))
        elif measure.startswith("noted:"):
            at, values = run.judged, run.noted.get(measure[6:], np.full(len(run.judged), np.nan))
        elif measure.startswith("unlabelled:"):
            at, values = run.rounds, run.unlabelled.get(measure[11:], np.full(len(run.rounds), np.nan))
        else:
            at, values = run.judged, run.silhouette if measure == "silhouette" else run.mean[measure]
        for t, value in zip(at.tolist(), values.tolist(), strict=True):
            series.setdefault(t, []).append(value)
    rounds = sorted(series)
    some = [np.array([v for v in series[t] if not np.isnan(v)]) for t in rounds]
    return Curve(
        rounds, np.array([mean_of(v) for v in some]), np.array([v.std(ddof=1) if len(v) > 1 else 0.0 for v in some])
    )


@dataclass(frozen=True)
class Score:
    """A number over seeds: mean, standard deviation (None with one seed), and the values."""

    mean: float | None
    std: float | None
    values: tuple[float, ...]


def score(values: Iterable[float]) -> Score:
    """Mean and spread of what is there.

    >>> score([0.5, 0.75, float("nan")]).mean
    0.625
    """
    some = tuple(v for v in values if not np.isnan(v))
    if not some:
        return Score(None, None, ())
    return Score(sum(some) / len(some), float(np.std(some, ddof=1)) if len(some) > 1 else None, some)


def last(runs: Sequence[RunData], measure: str) -> Score:
    """The last evaluated round of each run."""
    return score(float((run.silhouette if measure == "silhouette" else run.mean[measure])[-1]) for run in runs)


@dataclass(frozen=True)
class Sweep:
    """Variants of one method that differ in one key alone (and the seed): (value, runs) in order."""

    setting: str  # what is the same for all
    label: str
    points: tuple[tuple[Any, tuple[RunData, ...]], ...]


def sweeps(study: Study, key: str) -> list[Sweep]:
    """Where `key` takes at least two values and all else is equal."""
    resolved = [(v, _resolved(v, key)) for v in study.variants if v.finished]
    groups = _group(
        [(v, c) for v, c in resolved if key in c], lambda pair: _key({k: x for k, x in pair[1].items() if k != key})
    )
    found: list[tuple[dict[str, Any], list[tuple[Any, tuple[RunData, ...]]]]] = []
    for same in groups.values():
        points = [(content[key], v.finished) for v, content in same]
        if len(points) > 1:
            points.sort(key=lambda point: (isinstance(point[0], str), point[0]))
            found.append(({k: x for k, x in same[0][1].items() if k != key}, points))
    parts = [
        (
            {k: x for k, x in content.items() if not k.startswith("method.") and k not in OPTIONAL},
            {k: x for k, x in content.items() if k.startswith("method.") or k in OPTIONAL},
        )
        for content, _ in found
    ]
    settings = _settings([setting for setting, _ in parts])
    labels = _labels(parts)
    return [
        Sweep(settings[_key(part[0])].label, label, tuple(points))
        for part, label, (_, points) in zip(parts, labels, found, strict=True)
    ]


SHAPES = ("constant", "linear", "cosine", "sigmoid", "step")


def _resolved(variant: Variant, key: str) -> dict[str, Any]:
    """The configuration with what follows from other keys filled in."""
    setting, options = _parts(variant.runs[0])
    content = {**setting, **options}
    if "method.align_start" in content and content["method.align_start"] is None:
        content["method.align_start"] = int(variant.runs[0].config["train"]["rounds"]) // 5
    if key == "method.align_start" and content.get("method.schedule_shape") == "constant":
        content.pop("method.align_start")
    return content
