"""From a configuration and a data set to a federation that can be played."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedsap.config import Config
from fedsap.data import Augment, Dataset, load, search_path
from fedsap.data.augment import padding
from fedsap.data.partition import Partition, partition
from fedsap.data.strong import Strong
from fedsap.data.unlabelled import with_pools
from fedsap.data.validation import held_out
from fedsap.engines.simulate import Simulation
from fedsap.errors import UserError
from fedsap.memory import keep_freed
from fedsap.methods import Method
from fedsap.methods.method import Task
from fedsap.models import Network, build
from fedsap.training.feed import Images, Key, Look, Pool
from fedsap.training.local import Hyper, Stack
from fedsap.training.rounds import Clients, Judge, Presence
from fedsap.training.streams import numbers

Index = NDArray[np.int64]
Engine = TypeVar("Engine", bound=Clients, covariant=True)


class Shares(Protocol):
    """Who holds what, in the terms of `Partition.to_dict`."""

    @property
    def hash(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Federation(Generic[Engine]):
    """Everything that `training.rounds.play_all` needs, of federations that differ in their seed only."""

    config: Config  # of the first
    partitions: Mapping[int, Shares]  # by seed
    method: Method
    task: Task
    clients: Engine
    presence: Presence
    judge: Judge
    classes: tuple[str, ...]
    device: torch.device
    checkpoint: float  # seconds between checkpoints; 0: after every round
    pictures: torch.Tensor | None = None  # test images that `Kept.image` points at, uint8 [N, H, W, C]


def dataset(config: Config) -> Dataset:
    """The configured data set."""
    root = None if config.data.root is None else Path(config.data.root)
    if config.data.name == "folder":
        return load("folder", root, size=config.data.size, channels=config.data.channels)
    return load(config.data.name, root)


def split(config: Config, data: Dataset) -> Partition:
    """Who holds what."""
    keys = config.partition.model_dump()
    seed = keys.pop("seed")
    dealt = np.flatnonzero(~_set_aside(config, data))
    labels = data.train.labels[dealt]
    made = partition(labels, num_classes=len(data.classes), seed=config.seed if seed is None else seed, **keys)
    pool = config.unlabelled
    if pool.size:
        made = with_pools(made, labels, size=pool.size, balance=pool.balance, foreign=pool.foreign, seed=pool.seed)
    return replace(
        made, indices=tuple(dealt[own] for own in made.indices), pools=tuple(dealt[own] for own in made.pools)
    )


def _set_aside(config: Config, data: Dataset) -> NDArray[np.bool_]:
    """The training images that stand in for the test images, if any."""
    labels = data.train.labels
    return held_out(labels, config.eval.held_out) if config.eval.split == "validation" else np.zeros(len(labels), bool)


def device(name: str) -> torch.device:
    """The device of that name; `auto` is a CUDA device if there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device: got 'cuda', but this machine has no CUDA device that torch can use; takes auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def build_federation(
    configs: Sequence[Config],
    data: Dataset,
    *,
    parts: Mapping[int, Partition] | None = None,
    only: Collection[int] | None = None,
) -> Federation[Simulation]:
    """The clients of runs that differ in their seed only as one stack, with their initial weights, before round 1.

    `parts` says who holds what, by seed, where it is not as `split` has it; `only` names the clients that are wanted.
    """
    config = configs[0]
    parts = {c.seed: split(c, data) for c in configs} if parts is None else parts
    where = device(config.device)
    if config.train.precision != "fp32" and where.type != "cuda":
        raise UserError(f"train.precision: got '{config.train.precision}', but the device is the CPU; takes fp32 there")
    keep_freed()
    method = config.made_method()
    shape = (int(data.train.images.shape[1]), int(data.train.images.shape[2]), int(data.train.images.shape[3]))
    network = build_network(config, len(data.classes), shape)
    keys = [Key(seed, q) for seed, one in parts.items() for q in range(one.clients) if only is None or q in only]
    judged = data.train if config.eval.split == "validation" else data.test
    among = np.flatnonzero(_set_aside(config, data)) if judged is data.train else np.arange(len(judged.labels))
    tests = {k: _tests(config, judged.labels, among, parts[k.seed].classes[k.client], k) for k in keys}
    lists = {k: parts[k.seed].indices[k.client] for k in keys}
    keys.sort(key=lambda k: (-(len(lists[k]) // config.train.batch), -len(tests[k])))
    counts = torch.stack([torch.from_numpy(parts[k.seed].counts)[k.client] for k in keys])
    pad = padding(min(shape[:2]))
    look = Look(data.mean, data.std, _augment(config, data), pad, background=data.background)
    stack = Stack(
        network,
        method,
        Images.of(data.train, [lists[k] for k in keys], where),
        tuple(keys),
        (counts > 0).to(where),
        look,
        Hyper(
            config.train.batch,
            config.train.lr,
            config.train.momentum,
            config.train.weight_decay,
            config.train.epochs,
            config.train.drop_last,
            config.train.precision,
        ),
        _pool(config, data, [parts[k.seed].pools[k.client] for k in keys], where) if config.unlabelled.size else None,
        config.made_privacy(),
    )
    largest = max((len(pool) for one in parts.values() for pool in one.pools), default=0)
    task = task_of(config, network, parts[config.seed].clients, largest)
    test = Images.of(judged, [tests[k] for k in keys], where)
    clients = Simulation(stack, test, task, reset_momentum=config.train.reset_momentum, together=config.train.together)
    return Federation(
        config, parts, method, task, clients, *rules(config), data.classes, where, config.train.checkpoint, test.images
    )


def build_network(config: Config, classes: int, shape: tuple[int, int, int]) -> Network:
    """The configured network, for images [H, W, C]."""
    chosen = {k: v for k, v in config.model.model_dump().items() if k not in ("name", "weights") and v is not None}
    weights = _weights(config)
    if weights is not None:
        chosen["weights"] = weights
    return build(config.model.name, classes=classes, shape=shape, **chosen)


def task_of(config: Config, network: Network, clients: int, pool: int) -> Task:
    """What is known before the first round, of a federation whose largest pool has `pool` samples."""
    more = config.rounds - config.train.rounds
    return Task(network, network.classes, clients, config.train.rounds, more, pool, config.pool_rounds)


def rules(config: Config) -> tuple[Presence, Judge]:
    """Who takes part in a round, and how clients are evaluated."""
    judge = Judge(
        config.eval.every,
        config.eval.proto_classes,
        config.eval.silhouette,
        config.eval.snapshots,
        config.eval.batch_statistics,
        config.eval.gradients,
    )
    return Presence(config.train.participation, config.train.failures), judge


def _weights(config: Config) -> str | None:
    """The file of initial weights, as named or in one of the places of the data."""
    name = config.model.weights
    if name == "none":
        return None
    places = search_path(None if config.data.root is None else Path(config.data.root))
    tried = [Path(name), *(place / name for place in places)]
    for path in tried:
        if path.is_file():
            return str(path)
    raise UserError(
        f"model.weights: no file {name} in {', '.join(str(p.parent) for p in dict.fromkeys(tried))}; takes "
        "torchvision's ResNet-18 weights (https://pytorch.org/vision, IMAGENET1K_V1), or none to start from random ones"
    )


def _pool(config: Config, data: Dataset, lists: Sequence[Index], where: torch.device) -> Pool:
    """The unlabelled samples of the stack, their labels set aside."""
    keys = config.unlabelled
    kind = data.kind if keys.strong == "auto" else keys.strong
    usual: Augment = "crop-flip" if data.kind == "colour" else "crop"
    channels = data.train.images.shape[3]
    grey = tuple(round(255 * m) for m in data.mean) if kind == "colour" else (data.background,) * channels
    weak = Look(
        data.mean,
        data.std,
        usual if keys.weak == "auto" else keys.weak,
        padding(min(data.train.images.shape[1:3])),
        background=data.background,
    )
    strong = Strong(kind, keys.ops, None if keys.magnitude == "random" else keys.magnitude, keys.cutout, grey)
    images = Images.of(data.train, lists, where)
    labels = images.labels.cpu().numpy()
    return Pool(
        images.images,
        images.lists,
        tuple(labels[own] for own in images.lists),
        weak,
        replace(weak, strong=strong),
        keys.batch,
        config.pool_rounds,
    )


def _augment(config: Config, data: Dataset) -> Augment:
    return data.augment if config.data.augment == "auto" else config.data.augment


def _tests(config: Config, labels: Index, among: Index, own: tuple[int, ...], key: Key) -> Index:
    """The test images of one client, of its own classes only; shuffled if a batch of them is to have all classes."""
    chosen = []
    for c in own:
        all_of = among[labels[among] == c]
        if config.eval.per_class:
            all_of = all_of[: config.eval.per_class]
        if config.eval.test == "shots" and len(all_of):
            start = key.client * config.eval.test_shots
            all_of = np.unique(all_of[np.arange(start, start + config.eval.test_shots) % len(all_of)])
        chosen.append(all_of)
    found = np.concatenate(chosen).astype(np.int64)
    return numbers(key.seed, "sample", key.client, 1).permutation(found) if config.eval.batch_statistics else found
