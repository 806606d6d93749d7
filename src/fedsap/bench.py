"""A round of FedSAP as one stack against the plain loop over clients, timed in one process on the same batches."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from fedsap import plain
from fedsap.config import Config
from fedsap.errors import UserError
from fedsap.federation import build_federation, dataset
from fedsap.message import Message, table
from fedsap.methods import FedSAP
from fedsap.models import client
from fedsap.prototypes import combine_replies
from fedsap.runs import Row
from fedsap.training.local import plan


def compare(config: Config, repeat: int) -> Row:
    """Times round 2 (prototypes are there) both ways, a few rounds in a row, `repeat` times in turn; the medians,
    their ratio, and by how much the weights differ after the same round both ways."""
    if config.model.name not in plain.NETWORKS or config.method["name"] != "fedsap":
        raise UserError(
            f"bench: times FedSAP with {', '.join(plain.NETWORKS)}; got {config.method['name']}, {config.model.name}"
        )
    changes = {"model": config.model.model_copy(update={"dropout": 0.0 if config.model.name == "cnn" else None})}
    config = config.model_copy(update=changes | {"data": config.data.model_copy(update={"augment": "none"})})
    data = dataset(config)
    federation = build_federation([config], data)
    simulation, stack = federation.clients, federation.clients.stack
    method = federation.method
    assert isinstance(method, FedSAP)
    everyone = list(range(federation.task.clients))
    rows = {key.client: row for row, key in enumerate(stack.keys)}
    start = {k: v.clone() for k, v in simulation.state["model"].items()}
    shape = (int(data.train.images.shape[1]), int(data.train.images.shape[2]), int(data.train.images.shape[3]))
    bank: Message = {
        "bank": combine_replies(federation.clients.greet_all({config.seed: everyone})[config.seed].message)
    }
    protos = table(bank, "bank")
    plain_bank = {c: protos.values[c] for c in protos.mask.nonzero().flatten().tolist()}
    weights = method.schedule(2, config.train.rounds)
    seen = [plan(stack, [rows[c]], 2, 0) for c in everyone]
    device = stack.owned.device

    def reset() -> list[torch.nn.Module]:
        for k, v in start.items():
            simulation.state["model"][k].copy_(v)
        exported = [stack.network.export(client(start, rows[c])) for c in everyone]
        return [plain.module(config.model.name, len(data.classes), shape, e).to(device) for e in exported]

    pictures = []
    for c in everyone:
        own = torch.from_numpy(stack.train.lists[rows[c]]).to(device)
        x = stack.look(stack.train.images[own]).permute(0, 3, 1, 2).contiguous()
        places = {int(i): n for n, i in enumerate(own.tolist())}
        batches = [
            torch.tensor([places[i] for i in block.samples[0, s].tolist()], device=device)
            for block in seen[c]
            for s in range(block.steps)
        ]
        pictures.append((x, stack.train.labels[own], batches))

    def loop(models: list[torch.nn.Module]) -> None:
        local = [
            plain.local_round(
                model,
                *pictures[c],
                plain_bank,
                lr=config.train.lr,
                momentum=config.train.momentum,
                align=weights["align"],
                proxy=weights["proxy"],
                scale=method.proxy_scale,
            )
            for c, model in enumerate(models)
        ]
        plain.average(local)

    def stacked() -> None:
        combine_replies(simulation.train(2, bank, {}, everyone).message)

    models = reset()
    loop(models)
    stacked()
    difference = _difference(simulation.state["model"], models, rows, stack.network.export)
    times: dict[str, list[float]] = {"loop": [], "stack": []}
    for _ in range(repeat):
        times["loop"].append(_timed(partial(loop, models), device))
        times["stack"].append(_timed(stacked, device))
    medians = {k: statistics.median(v) for k, v in times.items()}
    return {
        "dataset": config.data.name,
        "model": config.model.name,
        "clients": len(everyone),
        "steps": sum(block.steps for blocks in seen for block in blocks),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "loop_seconds": medians["loop"],
        "stack_seconds": medians["stack"],
        "ratio": medians["loop"] / medians["stack"],
        "difference": difference,
    }


ROUNDS = 5  # timed together, as they follow each other in a run


def _timed(job: Callable[[], None], device: torch.device) -> float:
    """Seconds for one of `ROUNDS` rounds in a row."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        job()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / ROUNDS


def _difference(
    state: dict[str, torch.Tensor],
    models: list[torch.nn.Module],
    rows: dict[int, int],
    export: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> float:
    """||stack - loop|| / ||loop|| over all weights and statistics of a client, the largest of all clients."""
    worst = 0.0
    for c, model in enumerate(models):
        mine, other = export(client(state, rows[c])), model.state_dict()
        names = [k for k, v in mine.items() if v.is_floating_point()]
        gap = sum(float((mine[k] - other[k]).double().square().sum()) for k in names)
        worst = max(worst, (gap / sum(float(other[k].double().square().sum()) for k in names)) ** 0.5)
    return worst
