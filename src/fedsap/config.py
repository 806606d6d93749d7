"""The configuration of a run: what the keys are, where their values come from, and what is said of a wrong one."""

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fedsap import presets
from fedsap.data import DATASETS
from fedsap.data.partition import Rule, Slices
from fedsap.data.strong import LEVELS
from fedsap.data.unlabelled import Balance
from fedsap.errors import UserError
from fedsap.methods import METHODS, Method, named
from fedsap.presets import Layer
from fedsap.privacy import Encoder, Privacy, Source, refusal

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataKeys(Section):
    name: str = Field("digits", description="data set: " + ", ".join(DATASETS))
    root: str | None = Field(None, description="folder of the data; unset: --data, $FEDSAP_DATA, the user's cache")
    augment: Literal["auto", "none", "crop", "crop-flip"] = Field(
        "auto", description="training images; auto: the data set's"
    )
    size: Count = Field(64, description="side in pixels to which a folder of images is resized")
    channels: Literal[1, 3] = Field(3, description="a folder of images is read as grey (1) or colour (3)")


class PartitionKeys(Section):
    rule: Rule = Field("fedproto", description="fedproto: uniform ways and shots; normal: the paper's text; or another")
    clients: Count = Field(20, description="number of clients")
    ways: Count = Field(3, description="classes per client, on average")
    shots: Count = Field(100, description="samples per class, on average")
    spread: Annotated[int, Field(ge=0)] = Field(1, description="half-range (fedproto) or deviation (normal) of both")
    vary_shots: bool = Field(True, description="draw shots per client, or give each exactly `shots`")
    slices: Slices = Field("cursor", description="cursor: disjoint while a class lasts; stride: fixed offsets")
    stride: Count = Field(110, description="offset between clients with slices = stride")
    shuffle: bool = Field(True, description="shuffle within classes before dealing")
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        0.1, description="concentration of rule = dirichlet"
    )
    min_samples: Count = Field(10, description="least samples of a client with rule = dirichlet")
    seed: Annotated[int, Field(ge=0)] | None = Field(None, description="unset: the run's seed")


class UnlabelledKeys(Section):
    size: Annotated[int, Field(ge=0)] = Field(0, description="unlabelled samples of each client; 0: there are none")
    rounds: Count = Field(50, description="rounds in which they are used")
    start: Annotated[int, Field(ge=0)] | None = Field(
        None, description="the last round before these; unset: train.rounds, so that they come after it"
    )
    balance: Balance = Field("even", description="a pool has as much of each of its classes, or random shares")
    foreign: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of a pool that is of classes the client does not hold"
    )
    seed: Annotated[int, Field(ge=0)] | None = Field(None, description="unset: the partition's seed")
    batch: Count = Field(8, description="unlabelled samples that go with each batch of labelled ones")
    weak: Literal["auto", "none", "crop", "crop-flip"] = Field(
        "auto", description="weak view; auto: crop and flip of colour images, crop of handwriting"
    )
    strong: Literal["auto", "colour", "shape"] = Field(
        "auto", description="RandAugment of strong views: all operations, or those on the shape; auto: the data set's"
    )
    ops: Count = Field(2, description="operations of RandAugment, one after another")
    magnitude: Annotated[int, Field(ge=0, le=LEVELS)] | Literal["random"] = Field(
        10, description="their strength, 0 to 30, or random for each"
    )
    cutout: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5, description="side of the square cut out of strong views, as a share of the image's; 0: none"
    )


class ModelKeys(Section):
    name: str = Field("small", description="small, cnn, resnet18, or package.module:function of your own")
    weights: str = Field(
        "none", description="ImageNet weights for resnet18: a .pth or .npz file, sought beside the data too"
    )
    resolution: Count | None = Field(None, description="resize images to this side on the device (resnet18)")
    stem_stride: Literal[4, 2, 1] | None = Field(
        None, description="shrink images by this in conv1 and the pool after it; unset: 4 (resnet18)"
    )
    reinit_stem: bool | None = Field(None, description="draw conv1 and bn1 anew after loading (resnet18)")
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(None, description="dropout of cnn; unset: 0.5")
    embedding: Literal["relu", "linear", "unit"] | None = Field(
        None, description="h after the last ReLU (unset), before it, or after it and of length 1"
    )
    head_input: Literal["raw", "normalized", "cosine"] | None = Field(
        None, description="the head reads h (unset), or h / ||h||, or gives cosines of h with its weights"
    )
    head_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="what head_input = cosine multiplies cosines by; unset: 16"
    )
    dim: Count | None = Field(
        None, description="d, the size of the embedding, by a linear layer after it; unset: the network's own"
    )


class TrainKeys(Section):
    rounds: Count = Field(100, description="communication rounds")
    batch: Count = Field(8, description="mini-batch size")
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(0.01, description="learning rate of SGD")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.5, description="momentum of SGD")
    weight_decay: Rate = Field(0.0, description="weight decay of SGD")
    epochs: Count = Field(1, description="local epochs per round")
    drop_last: bool = Field(True, description="leave out the short batch at an epoch's end")
    reset_momentum: bool = Field(True, description="begin each round with zero momentum")
    participation: Share = Field(1.0, description="share of the clients asked in each round")
    failures: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="probability that an asked client does not answer"
    )
    warm_start: bool = Field(False, description="fill the prototype bank by a forward pass before round 1")
    precision: Literal["fp32", "tf32", "bf16"] = Field(
        "fp32", description="products on a GPU: exact, or with factors rounded; all that is kept stays float32"
    )
    together: Annotated[int, Field(ge=0)] = Field(
        0, description="clients that train at once; 0: as many as there is memory for"
    )
    checkpoint: Rate = Field(30.0, description="seconds between checkpoints; 0: after every round")


class EvalKeys(Section):
    every: Count = Field(5, description="rounds between evaluations; the last round always has one")
    split: Literal["test", "validation"] = Field(
        "test", description="test images, or training images that are set aside and dealt to nobody"
    )
    held_out: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="share of each training class that split = validation sets aside"
    )
    test: Literal["all", "shots"] = Field(
        "all", description="all test images of a client's classes, or a few for each client"
    )
    test_shots: Count = Field(15, description="test images per class and client with test = shots")
    per_class: Annotated[int, Field(ge=0)] = Field(
        0, description="use at most this many test images of a class; 0: all"
    )
    proto_classes: Literal["own", "all"] = Field(
        "own", description="nearest prototype among the client's classes, or all"
    )
    batch_statistics: Annotated[int, Field(ge=0)] = Field(
        0, description="BatchNorm in evaluation: 0: running statistics; n: those of batches of n images"
    )
    gradients: bool = Field(
        False, description="also measure gradients of each loss term, and embeddings' distance to their prototypes"
    )
    silhouette: Annotated[int, Field(ge=0)] = Field(5000, description="embeddings the silhouette looks at; 0: none")
    snapshots: list[Count] = Field([], description="rounds whose embeddings are kept, such as [10, 50, 100]")


class FlowerKeys(Section):
    data: Literal["partition", "own"] = Field(
        "partition", description="clients are parts of a data set, or each node is one, with all of its folder"
    )
    nodes: Annotated[int, Field(ge=0)] = Field(
        0, description="nodes of a simulation, which share the clients; 0: one for each client"
    )
    least: Share = Field(
        0.5, description="share of the clients that have to be there, and to answer, for a round to count"
    )
    wait: Rate = Field(300.0, description="seconds to wait for nodes: for all before round 1, for `least` later")
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1800.0, description="seconds after which a round goes on without those that have not answered"
    )
    longest: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1e6, description="length of the longest vector that is accepted from a node"
    )
    classes: list[str] = Field([], description="all class names, where nodes' own are not to be trusted; empty: theirs")


class PrivacyKeys(Section):
    noise: Rate = Field(
        0.0, description="deviation of the noise on what a client sends, in units of its sensitivity; 0: none"
    )
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="length to which each vector is clipped before it enters a class mean"
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(1e-5, description="delta of the epsilon that is reported")
    encoder: Encoder = Field(
        "trained", description="bound behind the noise; fixed: no guarantee for a network that is trained on the images"
    )
    source: Source = Field(
        "seed", description="noise from the seed, to be repeated, or from the operating system, to be secret"
    )


def pool_rounds(rounds: int, unlabelled: Mapping[str, Any]) -> range:
    """The rounds with unlabelled samples, from `train.rounds` and the keys of the section.

    >>> pool_rounds(100, {"size": 600, "rounds": 50, "start": None}), pool_rounds(100, {"size": 0})
    (range(101, 151), range(0, 0))
    """
    if not unlabelled.get("size"):
        return range(0)
    start = rounds if unlabelled["start"] is None else unlabelled["start"]
    return range(start + 1, start + 1 + unlabelled["rounds"])


class Config(Section):
    """One method, one seed: all that decides the outcome of a run."""

    preset: Literal["paper", "reference"] = Field("paper", description="values for what the keys below leave open")
    data: DataKeys = DataKeys()
    partition: PartitionKeys = PartitionKeys()
    unlabelled: UnlabelledKeys = UnlabelledKeys()
    model: ModelKeys = ModelKeys()
    method: dict[str, Any] = Field({"name": "fedsap"}, description="name, and the method's own options")
    train: TrainKeys = TrainKeys()
    eval: EvalKeys = EvalKeys()
    flower: FlowerKeys = FlowerKeys()
    privacy: PrivacyKeys = PrivacyKeys()
    seed: Annotated[int, Field(ge=0)] = Field(1234, description="the run's seed")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if there is one")
    engine: Literal["simulate", "flower"] = Field(
        "simulate", description="all clients in this process, or as nodes of Flower"
    )

    @property
    def pool_rounds(self) -> range:
        """The rounds in which unlabelled samples are used."""
        return pool_rounds(self.train.rounds, self.unlabelled.model_dump())

    @property
    def rounds(self) -> int:
        """All rounds: those of training, and those with unlabelled samples if they go on after these."""
        return max(self.train.rounds, self.pool_rounds.stop - 1)

    def made_privacy(self) -> Privacy | None:
        """What clients do to what they send, if they send anything and something is done to it."""
        used = self.privacy.noise and self.made_method().passes()
        return Privacy(**self.privacy.model_dump()) if used else None

    def made_method(self) -> Method:
        """The method with its options."""
        options = {k: v for k, v in self.method.items() if k != "name"}
        return METHODS[self.method["name"]](**options)


SECTIONS: dict[str, type[Section]] = {
    "data": DataKeys, "partition": PartitionKeys, "unlabelled": UnlabelledKeys, "model": ModelKeys, "train": TrainKeys,
    "eval": EvalKeys, "privacy": PrivacyKeys, "flower": FlowerKeys
}  # fmt: skip
TOP = ("preset", "seeds", "device", "engine")


def options(method: type[Method]) -> dict[str, dataclasses.Field[Any]]:
    """A method's own options by name."""
    return {f.name: f for f in dataclasses.fields(method)}


def read(path: Path) -> Layer:
    """A TOML file as nested dictionaries."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; takes a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}") from None


def assignments(pairs: Sequence[str]) -> Layer:
    """`section.key=value` as nested dictionaries; the value is TOML, or else a string.

    >>> assignments(["train.rounds=5", "data.name=cifar10"])
    {'train': {'rounds': 5}, 'data': {'name': 'cifar10'}}
    """
    layer: Layer = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise UserError(f"--set: got '{pair}', takes key=value, such as train.rounds=50")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *path, last = key.strip().split(".")
        at = layer
        for name in path:
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                raise UserError(f"--set: '{key}' goes below a key that has a value already")
        at[last] = value
    return layer


def merged(*layers: Mapping[str, Any]) -> Layer:
    """Nested dictionaries laid over each other; later ones win.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    result: Layer = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else value
    return result


def resolve(user: Layer, methods: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Config]:
    """One configuration per method and seed, from what the user gave; raises UserError for the first thing wrong.

    `all` stands for every method, without unlabelled samples for every one that does not need them.
    `[method]` may name options of any of the methods that run, and `[method.fedproto]` options of one of them.
    """
    known = [*TOP, *SECTIONS, "method"]
    for key in user:
        _known(key, known, "")
    for name, section in SECTIONS.items():
        _table(user, name)
        for key in user.get(name, {}):
            _known(key, section.model_fields, f"{name}.")
    _table(user, "method")
    given = user.get("method", {})
    wanted = [named(name) for name in list(methods) or _names(given.get("name", "fedsap"))]
    everything = wanted == ["all"]
    wanted = list(METHODS) if everything else wanted
    for name in wanted:
        _known(name, METHODS, "method.name=", what="method")
    _check_options({k: v for k, v in given.items() if k != "name"}, wanted)
    dataset = user.get("data", {}).get("name", "digits")
    if not isinstance(dataset, str):
        raise UserError(f"data.name: got {dataset!r}, takes a string: {', '.join(DATASETS)}")
    _known(dataset, DATASETS, "data.name=", what="data set")
    preset = user.get("preset", "paper")
    if preset not in presets.PRESETS:
        raise UserError(f"preset: got {preset!r}, takes {' or '.join(presets.PRESETS)}")
    chosen = presets.PRESETS[preset]
    below = merged(presets.DATASETS[dataset], chosen.get("", {}), chosen.get(dataset, {}))
    if user.get("model", {}).get("name") not in (None, below["model"]["name"]):
        below["model"] = {}  # what it says is of another network
        below["method"] = {m: {k: v for k, v in own.items() if k != "model"} for m, own in below["method"].items()}
    base = merged(below, user)
    all_seeds = list(seeds) or base.get("seeds", [1234])
    if not isinstance(all_seeds, list) or not all_seeds or len(set(all_seeds)) < len(all_seeds):
        raise UserError(f"seeds: got {all_seeds!r}, takes a list of different whole numbers, such as [1234, 1235]")
    if everything and not base.get("unlabelled", {}).get("size"):
        wanted = [name for name in wanted if not METHODS[name].needs_pool]
    return [_one(base, given, name, seed) for name in dict.fromkeys(wanted) for seed in all_seeds]


def _one(base: Layer, given: Layer, name: str, seed: int) -> Config:
    mine = options(METHODS[name])
    preset = dict(base.get("method", {}).get(name, {}))
    model = merged(preset.pop("model", {}), base.get("model", {}))
    layers = [preset, {k: v for k, v in given.items() if k in mine}, given.get(name, {})]
    method = validated_options(name, merged(*layers))
    content = {k: v for k, v in base.items() if k not in ("seeds", "method", "model")}
    config = checked(content | {"model": model, "method": {"name": name} | method, "seed": seed})
    late = [t for t in config.eval.snapshots if t > config.rounds]
    if late:
        raise UserError(f"eval.snapshots: got {late[0]}, takes rounds up to the last one ({config.rounds})")
    if config.engine == "flower" and config.eval.snapshots:
        raise UserError("eval.snapshots: embeddings and images do not leave Flower's nodes; takes [] with this engine")
    if METHODS[name].needs_pool and not config.unlabelled.size:
        raise UserError(
            f"unlabelled.size: got 0, and method.name={name} needs unlabelled samples; takes how many each client has, "
            "such as 60"
        )
    reason = config.made_method().degenerate()
    if reason:
        raise UserError(f"method.name={name}: {reason}; choose other values, or that method")
    reason = refusal(config.made_method(), config.unlabelled.size) if config.privacy.noise else None
    if reason:
        raise UserError(f"privacy.noise: got {config.privacy.noise}, but {reason}")
    return config


def checked(layer: Mapping[str, Any]) -> Config:
    """One configuration from nested keys, methods' options and presets left as they are.

    >>> checked({"train": {"rounds": 3}}).train.rounds
    3
    """
    try:
        return Config.model_validate(layer)
    except ValidationError as error:
        raise _said(error, "") from None


def validated_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a method, checked, defaults filled in."""
    method = METHODS[name]
    hints = get_type_hints(method, include_extras=True)
    values: dict[str, Any] = {}
    for key, field in options(method).items():
        value = given.get(key, field.default)
        try:
            checked = TypeAdapter(hints[key], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            raise _said(error, f"method.{key}") from None
        if isinstance(checked, int | float) and not 0 <= checked < float("inf"):
            raise UserError(f"method.{key}: got {checked}, takes a number that is not negative")
        values[key] = checked
    return values


def _check_options(given: Layer, wanted: Sequence[str]) -> None:
    for key, value in given.items():
        if isinstance(value, dict):
            _known(key, METHODS, "method.")
            for inner in value:
                _known(inner, options(METHODS[key]), f"method.{key}.")
        elif key in METHODS:
            raise UserError(f"method.{key}: got {value!r}, takes options below it, such as method.{key}.start")
        else:
            _known(key, {k for name in wanted for k in options(METHODS[name])}, "method.")


def _names(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return value
    raise UserError(f"method.name: got {value!r}, takes a method's name or a list of them: {', '.join(METHODS)}")


def _table(user: Layer, name: str) -> None:
    if not isinstance(user.get(name, {}), dict):
        raise UserError(f"{name}: got {user[name]!r}, takes keys below it, such as {name}.name")


def _known(key: str, known: Any, prefix: str, what: str = "key") -> None:
    names = list(known)
    if key in names:
        return
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean '{prefix}{near[0]}'?" if near else f"known: {', '.join(names)}"
    raise UserError(f"unknown {what} '{prefix}{key}'; {hint}")


def _said(error: ValidationError, key: str) -> UserError:
    """The first complaint in one line: key, value, what it takes."""
    first = error.errors()[0]
    where = ".".join([key, *map(str, first["loc"])] if key else map(str, first["loc"]))
    takes = first["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return UserError(f"{where}: got {first['input']!r}, takes {takes}")
