"""What a node does when it is asked: it takes up its clients' states, trains or judges them as one stack, answers."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedsap
from fedsap import config as keys
from fedsap.config import Config, merged
from fedsap.data import Dataset
from fedsap.data.partition import Partition
from fedsap.data.unlabelled import with_pools
from fedsap.engines.flower.agree import renumbered
from fedsap.engines.flower.finished import save_models
from fedsap.engines.flower.protocol import (
    Answer,
    Figures,
    Hello,
    Introduction,
    Job,
    Record,
    floats,
    packed_for,
    tensors_of,
    unpacked_of,
    written,
)
from fedsap.engines.flower.store import Store
from fedsap.engines.simulate import CLIENTS, Simulation
from fedsap.errors import UserError
from fedsap.evaluate import MEASURES, Scores
from fedsap.federation import build_federation, dataset, split
from fedsap.message import Message, PerClass, joined, select
from fedsap.methods import named
from fedsap.privacy import refusal
from fedsap.training.rounds import Ask

OWN_KEYS = {  # None: all of the section
    "data": None, "model": None, "train": ("batch", "precision", "together"), "privacy": ("noise", "source")
}  # fmt: skip
Payloads = Mapping[str, bytes]


@dataclass(frozen=True)
class Site:
    """A node as its owner has set it up.

    own: keys that are the node's, over those of the run. part, parts: which part of a known data set it has; None: all
    that is in its data folder.
    """

    name: str
    store: Path
    own: Mapping[str, Any] = field(default_factory=dict)
    part: int | None = None
    parts: int | None = None

    def adapted(self, config: Config) -> Config:
        """The run's configuration with the node's own keys."""
        theirs = config.model_dump()
        if "name" in self.own.get("model", {}):
            theirs["model"] = keys.ModelKeys().model_dump()  # what it says is of another network
        mine = keys.checked(merged(theirs, self.own))
        if mine.privacy.noise < config.privacy.noise:  # a node may ask for more noise, not for less
            mine = keys.checked(merged(mine.model_dump(), {"privacy": {"noise": config.privacy.noise}}))
        reason = refusal(mine.made_method(), mine.unlabelled.size) if mine.privacy.noise else None
        if reason:
            raise UserError(f"privacy.noise: this node asks for {mine.privacy.noise:g}, but {reason}")
        return mine

    def clients(self, total: int) -> list[int]:
        """Those of `total` clients that are this node's part of a known data set."""
        return [] if self.part is None else list(range(total))[self.part :: self.parts]


def read_own(layer: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A node's own keys, of which there are few: what is the same for all is the server's to say."""
    own: dict[str, Any] = {}
    for section, value in layer.items():
        if section == "device":
            own[section] = value
            continue
        if section not in OWN_KEYS or not isinstance(value, Mapping):
            raise UserError(
                f"{where}: '{section}' is not a node's to set; takes device, [data], [model], [train], [privacy]"
            )
        allowed = OWN_KEYS[section] or tuple(keys.SECTIONS[section].model_fields)
        for key in value:
            if key not in allowed:
                raise UserError(f"{where}: '{section}.{key}' is not a node's to set; takes {', '.join(allowed)}")
        own[section] = dict(value)
    return own


def answer(site: Site, asked: Record, payloads: Payloads) -> tuple[Record, dict[str, bytes]]:
    """What the node says to what it is asked, and the tensors that go with it."""
    if isinstance(asked, Hello):
        return introduce(site, asked), {}
    if isinstance(asked, Job):
        return work(site, asked, payloads)
    raise UserError(f"no answer to a {type(asked).__name__}")


def introduce(site: Site, hello: Hello) -> Introduction:
    """The node's name and its classes' names."""
    data = _loaded(site.adapted(hello.config))
    height, width, channels = map(int, data.train.images.shape[1:])
    return Introduction(
        name=site.name,
        classes=list(data.classes),
        shape=(height, width, channels),
        part=site.part,
        parts=site.parts,
        version=fedsap.__version__,
    )


def work(site: Site, job: Job, payloads: Payloads) -> tuple[Answer, dict[str, bytes]]:
    """One round of the node's clients, or a part of it."""
    began = time.perf_counter()
    if job.method:
        named(job.method)
    config = site.adapted(job.config)
    data = renumbered(_loaded(config), job.classes)
    part = _partition(site, config, data, job)
    store = Store(site.store / job.run)
    states, failed = _states(store, job)
    mine = [c for c in job.clients if c in states]
    lost = sorted(failed)
    if not mine:
        return Answer(run=job.run, round=job.round, clients=[], failed=failed, lost=lost, hash=part.hash), {}
    clients = build_federation([config], data, parts={config.seed: part}, only=mine).clients
    _take_back(clients, config.seed, states)
    shared = tensors_of(payloads.get("down", b""))
    own = tensors_of(payloads.get("own", b""))
    down = unpacked_of("down", shared, len(job.classes))
    rows = {c: unpacked_of(str(c), own, len(job.classes)) for c in mine}
    figures = None
    if job.judge is not None:
        bank = _bank(clients, job, down, shared)
        found = clients.evaluate_all(job.round - 1, {config.seed: Ask(down, _rows(rows, mine), mine, bank)}, job.judge)[
            config.seed
        ]
        figures = _figures(found, known=job.told != "none")
        if job.kind == "judge" and job.round > config.rounds:
            known = bank if job.told != "none" else None
            save_models(store.folder, clients, config, tuple(job.classes), down, rows, known, job.round - 1)
    did: list[int] = mine if job.kind == "judge" else []
    reply: Message = {}
    terms: dict[str, list[float]] = {}
    pool: dict[str, list[float | None]] = {}
    if job.kind == "greet":
        said = clients.greet_all({config.seed: mine})[config.seed]
        did, reply = said.clients, said.message
    elif job.kind == "train" and (training := [c for c in job.train if c in mine]):
        said = clients.train(job.round, down, _rows(rows, training), training)
        did, reply = said.clients, said.message
        terms = {k: v.tolist() for k, v in said.terms.items()}
        pool = {k: floats(v) for k, v in said.figures.items()}
        if all(bool(torch.isfinite(v).all()) for v in said.terms.values()):
            _keep(store, clients, config.seed, did, job)
    tensors: dict[str, Tensor] = {}
    for i, client in enumerate(did):
        tensors |= packed_for(str(client), select(reply, torch.tensor(i)))
    told = Answer(
        run=job.run,
        round=job.round,
        clients=did,
        failed=failed,
        lost=lost,
        terms=terms,
        pool=pool,
        judged=mine if figures else [],
        figures=figures,
        hash=part.hash,
        seconds=time.perf_counter() - began,
    )
    return told, {"up": written(tensors)} if tensors else {}


@cache
def _data(name: str, root: str | None, size: int, channels: int, environment: str | None) -> Dataset:  # noqa: ARG001
    """Loaded once for a process that answers more than once."""
    data = {"name": name, "root": root, "size": size, "channels": channels}
    return dataset(keys.checked({"data": data}))


def _loaded(config: Config) -> Dataset:
    data = config.data
    return _data(data.name, data.root, data.size, data.channels, os.environ.get("FEDSAP_DATA"))


def _partition(site: Site, config: Config, data: Dataset, job: Job) -> Partition:
    if site.part is not None:
        return split(config, data)
    if len(job.clients) != 1:
        raise UserError(f"{site.name} has its own data and is one client, not {len(job.clients)}")
    made = everything(data, job.clients[0], job.total, config.seed)
    pool = config.unlabelled
    if pool.size:
        made = with_pools(
            made, data.train.labels, size=pool.size, balance=pool.balance, foreign=pool.foreign, seed=pool.seed
        )
    return made


def everything(data: Dataset, client: int, total: int, seed: int) -> Partition:
    """All training images for one of `total` clients, nothing for the others.

    >>> from fedsap.data import load
    >>> everything(load("digits"), client=1, total=3, seed=0).counts.sum(1).tolist()
    [0, 1442, 0]
    """
    labels = data.train.labels
    classes, shots = np.unique(labels, return_counts=True)
    order = np.argsort(labels, kind="stable").astype(np.int64)
    nothing = np.zeros(0, np.int64)
    return Partition(
        "own",
        seed,
        len(data.classes),
        tuple(tuple(map(int, classes)) if q == client else () for q in range(total)),
        tuple(tuple(map(int, shots)) if q == client else () for q in range(total)),
        tuple(order if q == client else nothing for q in range(total)),
    )


def _states(store: Store, job: Job) -> tuple[dict[int, dict[str, Tensor]], dict[int, str]]:
    """The clients' states after the rounds that the server knows of, empty at the beginning; and whose are lost."""
    states: dict[int, dict[str, Tensor]] = {}
    failed: dict[int, str] = {}
    for client, t in zip(job.clients, job.since, strict=True):
        try:
            states[client] = store.load(client, t) if t else {}
        except UserError as error:
            failed[client] = str(error)
    return states, failed


def _take_back(clients: Simulation, seed: int, states: Mapping[int, Mapping[str, Tensor]]) -> None:
    if not any(states.values()):
        return
    order = [key.client for key in clients.stack.keys]
    for name, fresh in clients.kept(seed).items():
        if name == CLIENTS:
            continue
        rows = [states[c].get(name, fresh[i]) if states[c] else fresh[i] for i, c in enumerate(order)]
        clients.take_back(seed, name, torch.stack([row.to(fresh) for row in rows]))


def _keep(store: Store, clients: Simulation, seed: int, trained: Sequence[int], job: Job) -> None:
    since = dict(zip(job.clients, job.since, strict=True))
    kept = {name: value.cpu() for name, value in clients.kept(seed).items() if name != CLIENTS}
    for row, key in enumerate(clients.stack.keys):
        if key.client in trained:
            state = {name: value[row] for name, value in kept.items()}
            store.save(key.client, job.round, state, since[key.client])


def _rows(rows: Mapping[int, Message], clients: Sequence[int]) -> Message:
    """What each client is told for itself, with client axis."""
    each = [{k: _lifted(v) for k, v in rows[c].items()} for c in clients]
    return joined(each)


def _lifted(entry: Tensor | PerClass) -> Tensor | PerClass:
    return PerClass(entry.values[None], entry.mask[None]) if isinstance(entry, PerClass) else entry[None]


def _bank(clients: Simulation, job: Job, down: Message, shared: Mapping[str, Tensor]) -> PerClass:
    """Prototypes to classify by: those in what is broadcast, or those sent besides, or none."""
    if job.told == "bank":
        return PerClass(**{k: shared[f"bank/{k}"] for k in ("values", "mask")})
    found = clients.stack.method.bank(down) if job.told == "down" else None
    task = clients.task
    return found or PerClass(torch.zeros(task.classes, task.network.dim), torch.zeros(task.classes, dtype=torch.bool))


def _figures(scores: Scores, known: bool) -> Figures:
    accuracy = {k: floats(v) for k, v in scores.accuracy.items()}
    if not known:  # without prototypes there is no nearest one
        accuracy |= {k: [None] * len(accuracy[k]) for k in MEASURES if k.startswith("proto")}
    return Figures(accuracy=accuracy, noted={k: floats(v) for k, v in scores.noted.items()})
