"""What a step of FedSAP costs: as a stack, as the plain loop over clients, and as one CUDA graph per client.

All ways train the same clients on the same batches, in one process and in turn.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsap import plain
from fedsap.config import Config
from fedsap.data import Dataset
from fedsap.engines.simulate import Simulation
from fedsap.errors import UserError
from fedsap.federation import build_federation, dataset, device
from fedsap.message import Message, expand, table
from fedsap.methods import FedSAP
from fedsap.models import ResNet18, Small, client
from fedsap.models.cnn import CNN
from fedsap.models.layers import precision
from fedsap.prototypes import combine_replies
from fedsap.runs import Row
from fedsap.training.feed import Block
from fedsap.training.local import Sums, Work, advance, plan
from fedsap.training.record import Graphs
from fedsap.training.rounds import Ask

PASSES = 8  # over each weight: forward, backward, gradient out and in, momentum in and out, weight in and out
Job = Callable[[], object]
MODELS: dict[str, type[Any]] = {"small": Small, "cnn": CNN, "resnet18": ResNet18}


def compare(config: Config, clients: Sequence[int], repeat: int) -> Row:
    """A row for each number of clients and each way, with milliseconds for a step of all clients (the median).

    `ratio` is how many times faster than the plain loop, `floor` the least time in which the weights that meet data can
    be read and written as often as a step must, `difference` how far the weights part in the same steps.
    """
    config = _alike(config)
    data = dataset(config)
    rows = [row for q in clients for row in _with(config, data, q, repeat)]
    return {
        "dataset": config.data.name,
        "model": config.model.name,
        "batch": config.train.batch,
        "device": torch.cuda.get_device_name() if device(config.device).type == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rows": rows,
    }


def _alike(config: Config) -> Config:
    """The configuration with what the plain loop cannot do taken out, and clients of the same size."""
    if config.model.name not in plain.NETWORKS or config.method["name"] != "fedsap":
        raise UserError(
            f"bench: times FedSAP with {', '.join(plain.NETWORKS)}; got {config.method['name']}, {config.model.name}"
        )
    for key in ("resolution", "stem_stride", "embedding", "head_input", "head_scale", "dim"):
        if getattr(config.model, key) is not None:
            raise UserError(f"bench: the plain loop knows no model.{key}; leave it out")
    changes = {
        "model": config.model.model_copy(update={"dropout": 0.0 if config.model.name == "cnn" else None}),
        "data": config.data.model_copy(update={"augment": "none"}),
        "partition": config.partition.model_copy(update={"spread": 0, "vary_shots": False}),
    }
    return config.model_copy(update=changes)


def _with(config: Config, data: Dataset, q: int, repeat: int) -> list[Row]:
    config = config.model_copy(update={"partition": config.partition.model_copy(update={"clients": q})})
    simulation = build_federation([config], data).clients
    method, where = simulation.stack.method, simulation.stack.owned.device
    assert isinstance(method, FedSAP)
    t, everyone = config.train.rounds, range(q)
    bank: Message = {"bank": combine_replies(simulation.greet_all({config.seed: everyone})[config.seed].message)}
    weights = method.schedule(t, t)
    hyper = simulation.stack.hyper
    settings = plain.Settings(hyper.lr, hyper.momentum, weights["align"], weights["proxy"], method.proxy_scale)
    block = plan(simulation.stack, everyone, t, 0)[0]
    few = max(1, min(block.steps, 400 // q))  # the ways that take clients one by one need not take all steps
    bandwidth = _bandwidth(where)
    difference = _difference(simulation, block, t, bank, settings)

    def models() -> list[nn.Module]:
        return [_module(simulation, simulation.state["model"], row) for row in everyone]

    ways: dict[str, tuple[Job, int]] = {}
    ways["plain loop"] = (_loop(simulation, models(), block, few, bank, settings), few)
    if where.type == "cuda":
        ways["a graph per client"] = (_graphs(simulation, models(), block, few, bank, settings), few)
    for kind in ("fp32", "tf32", "bf16") if where.type == "cuda" else ("fp32",):
        ways[f"stack {kind}"] = (_stack(simulation, block, bank, settings, kind), block.steps)
    times: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, int] = {}
    for turn in range(repeat + 1):  # the first turn records, compiles and fills caches
        for name, (job, steps) in ways.items():
            if where.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = _timed(job, where) / steps
            if turn:
                times[name].append(seconds)
            if where.type == "cuda":
                memory[name] = torch.cuda.max_memory_allocated()
    live = simulation.stack.live(simulation.state["model"])
    buffers = simulation.stack.network.buffers
    floor = PASSES * sum(v.nbytes for k, v in live.items() if k not in buffers) / bandwidth
    medians = {name: statistics.median(some) for name, some in times.items()}
    return [
        {
            "clients": q,
            "way": name,
            "ms": 1000 * seconds,
            "ratio": medians["plain loop"] / seconds,
            "client_steps_per_second": q / seconds,
            "bandwidth": bandwidth,
            "floor_ms": 1000 * floor,
            "share_of_floor": floor / seconds,
            "memory": memory.get(name),
            "difference": difference if name == "stack fp32" else None,
        }
        for name, seconds in medians.items()
    ]


def _pictures(
    simulation: Simulation, block: Block, clients: int, steps: int
) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
    """For each of the first rows: its images as floats [N, C, H, W], labels, and the indices of each batch."""
    stack, found = simulation.stack, []
    for row, own in enumerate(stack.train.lists[:clients]):
        mine = torch.from_numpy(own).to(stack.owned.device)
        x = stack.look(stack.train.images[mine]).permute(0, 3, 1, 2).contiguous()
        place = {int(i): n for n, i in enumerate(own)}
        batches = [
            torch.tensor([place[i] for i in block.samples[row, s].tolist()], device=mine.device) for s in range(steps)
        ]
        found.append((x, stack.train.labels[mine], batches))
    return found


def _loop(
    simulation: Simulation, models: list[nn.Module], block: Block, steps: int, bank: Message, settings: plain.Settings
) -> Job:
    """One client after another, eager: what the code of FedProto and most libraries do."""
    pictures = _pictures(simulation, block, len(models), steps)
    protos = table(bank, "bank")
    known = {c: protos.values[c] for c in protos.mask.nonzero().flatten().tolist()}

    def job() -> None:
        with torch.backends.cudnn.flags(allow_tf32=False):  # the same arithmetic as the stack's
            for model, (x, y, batches) in zip(models, pictures, strict=True):
                plain.local_steps(model, x, y, batches, known, settings)

    return job


def _graphs(
    simulation: Simulation, models: list[nn.Module], block: Block, steps: int, bank: Message, settings: plain.Settings
) -> Job:
    """One client after another, each step of a client one CUDA graph."""
    protos = table(bank, "bank")
    target, there = protos.values, protos.mask
    graphs: list[Any] = []
    pictures = _pictures(simulation, block, len(models), steps)
    for model, (x, y, batches) in zip(models, pictures, strict=True):
        index, step = torch.stack(batches), torch.zeros(1, dtype=torch.long, device=x.device)
        weights: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        moments = [torch.zeros_like(p) for p in weights]
        graph = _recorded(model.train(), weights, moments, x, y, index, step, target, there, settings)
        graphs.append((graph, step, (model, moments, x, y, index, bank)))  # a graph does not keep what it reads

    def job() -> None:
        for graph, step, _ in graphs:
            step.zero_()
            for _ in range(steps):
                graph.replay()

    return job


def _recorded(
    model: nn.Module,
    weights: list[Tensor],
    moments: list[Tensor],
    images: Tensor,
    labels: Tensor,
    index: Tensor,
    step: Tensor,
    bank: Tensor,
    there: Tensor,
    settings: plain.Settings,
) -> Any:
    def once() -> None:
        batch = index.index_select(0, step)[0]
        x, y = images[batch], labels[batch]
        h, logits = model(x)
        loss = F.cross_entropy(logits, y) + settings.align * F.mse_loss(h, bank[y])
        cosines = (F.normalize(h, dim=1) @ F.normalize(bank, dim=1).T).masked_fill(~there, -1e9)
        loss = loss + settings.proxy * F.cross_entropy(settings.scale * cosines, y)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            torch._foreach_mul_(moments, settings.momentum)
            torch._foreach_add_(moments, gradients)
            torch._foreach_add_(weights, moments, alpha=-settings.lr)
        step.add_(1)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        once()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    step.zero_()
    with torch.backends.cudnn.flags(allow_tf32=False), torch.cuda.graph(graph):
        once()
    return graph


def _stack(simulation: Simulation, block: Block, bank: Message, settings: plain.Settings, kind: Any) -> Job:
    stack, q = simulation.stack, len(simulation.stack.keys)
    schedule = {"align": settings.align, "proxy": settings.proxy}
    down = expand(bank, q)
    if stack.owned.device.type != "cuda":
        weight = {k: torch.tensor(v, dtype=stack.look.dtype) for k, v in schedule.items()}
        state = {n: stack.live(w) for n, w in simulation.state.items()}
        momentum = {n: stack.live(w) for n, w in simulation.momentum.items()}
        work = Work(state, momentum, down, stack.owned, weight, {}, Sums(q, stack.classes))

        def job() -> None:
            for s in range(block.steps):
                advance(stack, work, 0, block.rows, block.batch(s), [])

        return job
    recorder = Graphs(stack, q)
    live, moving = ({n: stack.live(w) for n, w in sets.items()} for sets in (simulation.state, simulation.momentum))
    recorded = recorder.load(live, moving, down, stack.owned, schedule)

    def replayed() -> None:
        with precision(kind):
            recorder.play(recorded, 0, block, [])

    return replayed


def _difference(simulation: Simulation, block: Block, t: int, bank: Message, settings: plain.Settings) -> float:
    """||stack - loop|| / ||loop|| over the weights and statistics of a client after a round, the largest of three."""
    start = {k: v.clone() for k, v in simulation.state["model"].items()}
    few = range(min(3, len(simulation.stack.keys)))
    models = [_module(simulation, start, row) for row in few]
    _loop(simulation, models, block, block.steps, bank, settings)()
    simulation.train_all(t, {simulation.stack.keys[0].seed: Ask(bank, {}, range(len(simulation.stack.keys)))})
    worst = 0.0
    for row, model in enumerate(models):
        mine, other = simulation.stack.network.export(client(simulation.state["model"], row)), model.state_dict()
        names = [k for k, v in mine.items() if v.is_floating_point()]
        gap = sum(float((mine[k] - other[k]).double().square().sum()) for k in names)
        worst = max(worst, (gap / sum(float(other[k].double().square().sum()) for k in names)) ** 0.5)
    for k, v in start.items():
        simulation.state["model"][k].copy_(v)
    return worst


def _module(simulation: Simulation, weights: dict[str, Tensor], row: int) -> nn.Module:
    """The client of a row as a torch.nn module."""
    network, images = simulation.stack.network, simulation.stack.train.images
    name = next(n for n, kind in MODELS.items() if isinstance(network, kind))
    state = network.export(client(weights, row))
    shape = (int(images.shape[1]), int(images.shape[2]), int(images.shape[3]))
    return plain.module(name, simulation.stack.classes, shape, state).to(images.device)


def _bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy in the device's memory, read and written."""
    one = torch.ones(2**28 if device.type == "cuda" else 2**25, device=device)
    other = torch.empty_like(one)
    times = [_timed(lambda: other.copy_(one), device) for _ in range(6)]
    return 2 * one.nbytes / min(times[1:])


def _timed(job: Job, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    job()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def whole(words: Sequence[str]) -> Row:
    """A run from the start of its process to results on disk: seconds, and what they went into.

    `words` are those of `fedsap run`. The run takes place in a process of its own, in a folder that is removed.
    """
    with TemporaryDirectory() as folder:
        out = Path(folder) / "runs"
        command = [sys.executable, "-m", "fedsap.cli", "run", *words, "--out", str(out), "--json"]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        total = time.perf_counter() - began
        if done.returncode:
            raise UserError(f"bench run: {done.stderr.strip().splitlines()[-1]}")
        spent: dict[str, float] = {}
        for path in sorted(out.rglob("timing.json")):
            for name, seconds in json.loads(path.read_text(encoding="utf-8")).items():
                spent[name] = spent.get(name, 0.0) + seconds
        found: Row = json.loads(done.stdout)
    spent["everything else"] = total - sum(spent.values())
    return {"seconds": total, "parts": spent, "methods": found["methods"]}


def draw(found: Row, path: Path) -> None:
    """Milliseconds of a step against the number of clients, a line for each way, and the floor."""
    from matplotlib import pyplot as plt

    from fedsap.report import look

    with look.style():
        figure, axes = plt.subplots(figsize=(5.0, 3.6), layout="constrained")
        for number, way in enumerate(dict.fromkeys(row["way"] for row in found["rows"])):
            mine = [row for row in found["rows"] if row["way"] == way]
            xs, ys = [r["clients"] for r in mine], [r["ms"] for r in mine]
            axes.plot(xs, ys, marker=look.marker(number), color=look.colour(number), ls=look.dash(number), label=way)
        once = {row["clients"]: row["floor_ms"] for row in found["rows"]}
        axes.plot(list(once), list(once.values()), linestyle=":", color="0.5", label="floor")
        axes.set(xscale="log", yscale="log", xlabel="clients", ylabel="ms for a step of all clients")
        axes.set_title(f"{found['model']} on {found['device']}")
        axes.legend(fontsize=7)
        figure.savefig(path, dpi=200)
        plt.close(figure)
