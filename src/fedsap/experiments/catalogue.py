"""What there is to reproduce: the files in `paper/`, read and checked.

An experiment is a table of runs: settings (how the data is dealt out) by variants (methods with options) by readings of
what the paper leaves open, each with some seeds. A cell is one measure of the runs of one place in that table, with the
paper's mean and standard deviation where it gives them.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedsap.collect import ACCURACIES
from fedsap.config import Config, merged, resolve
from fedsap.errors import UserError
from fedsap.methods import METHODS
from fedsap.presets import Layer

FOLDER = Path(__file__).parent / "paper"
MEASURES = (*ACCURACIES, "silhouette", "up", "up_client")
TEXT = ""  # the reading that sets nothing


@dataclass(frozen=True)
class Claim:
    """What the paper gives for a cell, in the unit of the measure."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Footnote:
    """A remark on some cells: those that match what is set; on the whole table if nothing is."""

    text: str
    setting: str | None = None
    variant: str | None = None
    measure: str | None = None

    @property
    def general(self) -> bool:
        return not (self.setting or self.variant or self.measure)

    def concerns(self, setting: str, variant: str, measure: str | None) -> bool:
        """Is this about that cell, or, without a measure, about that row?

        >>> Footnote("", variant="fedavg").concerns("cifar10-n3", "fedavg", None)
        True
        """
        said = (self.setting or setting) == setting and (self.variant or variant) == variant
        return said and not self.general and self.measure == measure


@dataclass(frozen=True)
class Experiment:
    """One table or figure. `variants` and `readings` are layers of configuration by name, `settings` too."""

    name: str
    title: str
    place: str
    settings: dict[str, Layer]
    variants: dict[str, Layer]
    measures: tuple[str, ...]
    seeds: tuple[int, ...]
    order: int
    group: str = ""
    says: str = ""
    keys: Layer = field(default_factory=dict)  # for all of its runs
    readings: dict[str, Layer] = field(default_factory=lambda: {TEXT: {}})
    paper: dict[tuple[str, str, str], Claim] = field(default_factory=dict)  # by measure, variant and setting
    footnotes: tuple[Footnote, ...] = ()
    data: str = ""  # what its data set is called in its table, if not by its own name
    base: str = ""  # the variant that the others are compared with, where the paper has nothing
    hidden: dict[str, list[str]] = field(default_factory=dict)  # measures that a variant does not have, by variant

    def places(self) -> Iterator[tuple[str, str, str]]:
        """Reading, setting and variant of every set of runs."""
        for reading in self.readings:
            for setting in self.settings:
                for variant in self.variants:
                    yield reading, setting, variant

    def layer(self, reading: str, setting: str, variant: str) -> Layer:
        """What the experiment sets for these runs."""
        layer = merged(self.settings[setting], self.keys, self.variants[variant], self.readings[reading])
        idle = set() if METHODS[layer["method"]["name"]].uses_pool else {"unlabelled"}
        return {k: v for k, v in layer.items() if k not in idle}


def configs(layer: Layer, seeds: tuple[int, ...]) -> list[Config]:
    """The runs of a layer, one for each seed."""
    return resolve(layer, (), seeds)


@cache
def catalogue() -> dict[str, Experiment]:
    """All experiments by name, in their order."""
    settings = _toml("settings.toml")
    names = sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem not in ("settings", "quick"))
    raw = {name: _toml(f"{name}.toml") for name in names}
    found = [_experiment(name, content, settings, raw) for name, content in raw.items()]
    return {one.name: one for one in sorted(found, key=lambda one: one.order)}


def groups() -> dict[str, list[str]]:
    """Names that stand for several experiments: 'all', and the groups that the files name."""
    found: dict[str, list[str]] = {}
    for one in catalogue().values():
        if one.group:
            found.setdefault(one.group, []).append(one.name)
    return {**found, "all": [one.name for one in catalogue().values() if one.group in ("", "figures")]}


def chosen(words: list[str]) -> list[Experiment]:
    """The experiments that are named, each once."""
    every, several = catalogue(), groups()
    for word in words:
        if word not in every and word not in several:
            raise UserError(f"reproduce: got '{word}', takes {', '.join([*every, *several])}")
    names = dict.fromkeys(name for word in words for name in several.get(word, [word]))
    return [every[name] for name in names]


@cache
def quick() -> Layer:
    """What `--quick` lays over everything: a section for each data set and 'all' for the rest."""
    return _toml("quick.toml")


def _toml(name: str) -> Layer:
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))


def _experiment(name: str, content: Layer, settings: Layer, raw: Mapping[str, Layer]) -> Experiment:
    content = dict(content)
    source = raw[content.pop("paper_of", name)]
    chosen_settings = content.pop("settings")
    claims: dict[tuple[str, str, str], Claim] = {}
    for measure, rows in source.get("paper", {}).items():
        for variant, values in rows.items():
            for setting, value in zip(source["settings"], values, strict=True):
                if setting in chosen_settings and variant in content["variants"]:
                    claims[measure, variant, setting] = Claim(*value)
    content.pop("paper", None)
    readings = content.pop("readings", {TEXT: {}})
    if "together" in content:
        single = raw[content.pop("readings_of")]["readings"]
        readings = {" + ".join(names): merged(*(single[n] for n in names)) for names in content.pop("together")}
    measures = content.pop("measures", list(source.get("paper", {})))
    for measure in measures:
        if measure.partition("@")[0] not in MEASURES:
            raise ValueError(f"{name}.toml: no measure {measure}")
    return Experiment(
        name,
        settings={one: settings[one] for one in chosen_settings},
        variants={one: _named(one, layer) for one, layer in content.pop("variants").items()},
        measures=tuple(measures),
        seeds=tuple(content.pop("seeds")),
        readings=readings,
        paper=claims,
        footnotes=tuple(Footnote(**one) for one in content.pop("footnotes", [])),
        **content,
    )


def _named(variant: str, layer: dict[str, Any]) -> Layer:
    """A variant that names no method is the method of its own name."""
    return layer if "method" in layer else {**layer, "method": {"name": variant}}
