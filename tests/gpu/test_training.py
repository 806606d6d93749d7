"""Invariant 1 on a GPU: recorded steps on kernels against plain torch modules, one client at a time, on the CPU."""

import pytest
import torch

from federations import SEED, pair
from fedsap.config import resolve
from fedsap.federation import build_federation, dataset
from fedsap.methods import METHODS, FedAvg, FedProto, FedSAP
from fedsap.models import ResNet18, resnet
from fedsap.runs import Run, Stopped, execute_all
from fedsap.training.rounds import Judge, Presence, play

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def played(method, network, rounds=3, **more):
    simulation, *_ = pair(method, network, rounds=rounds, **more)
    outcomes = list(
        play(
            method,
            simulation.task,
            simulation,
            seed=SEED,
            server=None,
            done=0,
            presence=Presence(),
            judge=Judge(every=1),
        )
    )
    return simulation, outcomes


def apart(one, other):
    """The largest relative distance between the weights of two simulations."""
    return max(
        float(
            (v.double().cpu() - other.state[n][k].double().cpu()).norm() / (1e-12 + other.state[n][k].double().norm())
        )
        for n, weights in one.state.items()
        for k, v in weights.items()
    )


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_a_recorded_round_is_the_cpus(name, dtype, tolerance):
    method = METHODS[name]()
    gpu, mine = played(method, "small", dtype=dtype, device="cuda")
    cpu, theirs = played(method, "small", dtype=dtype)
    assert gpu.recorder is not None
    assert gpu.recorder.recordings > 0, "nothing was recorded"
    assert apart(gpu, cpu) < tolerance
    for one, other in zip(mine, theirs, strict=True):
        for term, value in other.terms.items():
            assert torch.allclose(one.terms[term].double(), value.double(), rtol=100 * tolerance, atol=100 * tolerance)
        for measure, value in other.scores.accuracy.items():
            assert torch.allclose(one.scores.accuracy[measure], value, atol=0.05), measure
        assert one.scores.silhouette == pytest.approx(other.scores.silhouette, abs=1e-3)


def test_resnet_in_float64_is_the_cpus():
    gpu, _ = played(FedSAP(align_start=0), "resnet18", rounds=2, device="cuda", sizes=(9, 17), lr=0.02)
    cpu, _ = played(FedSAP(align_start=0), "resnet18", rounds=2, sizes=(9, 17), lr=0.02)
    assert apart(gpu, cpu) < 1e-9


@pytest.mark.parametrize("statistics", [0, 8])
def test_gradients_distances_and_batch_statistics_are_the_cpus(statistics):
    noted = []
    for device in ("cuda", "cpu"):
        method = FedSAP(align_start=0)
        simulation, *_ = pair(method, "resnet18", rounds=2, device=device, sizes=(9, 17), lr=0.02)
        judge = Judge(every=1, gradients=True, batch_statistics=statistics)
        *_, last = play(
            method, simulation.task, simulation, seed=SEED, server=None, done=0, presence=Presence(), judge=judge
        )
        noted.append(last.scores.noted | last.scores.accuracy)
    assert noted[0].keys() == noted[1].keys()
    for name, value in noted[0].items():
        assert torch.allclose(value.double(), noted[1][name].double(), rtol=1e-5), name


@pytest.mark.parametrize("network", ["small", "resnet18"])
def test_replayed_steps_are_the_eager_ones_to_the_bit(network):
    method = FedSAP(align_start=0)
    recorded, _ = played(method, network, dtype=torch.float32, device="cuda")
    simulation, *_ = pair(method, network, dtype=torch.float32, device="cuda")
    simulation.recorder = None
    list(play(method, simulation.task, simulation, seed=SEED, server=None, done=0, presence=Presence(), judge=Judge()))
    for k, v in recorded.state["model"].items():
        assert torch.equal(v, simulation.state["model"][k]), k


def test_one_step_of_resnet_is_as_exact_as_float32():
    """Gradients of the kernels and of plain torch in float32 against float64: both are near."""
    network = ResNet18(10, (32, 32, 3))
    one = network.init(torch.Generator().manual_seed(0))
    x = torch.randn(4, 8, 32, 32, 3)
    found = {}
    for name, dtype, device in (
        ("exact", torch.float64, "cuda"),
        ("kernels", torch.float32, "cuda"),
        ("cpu", torch.float32, "cpu"),
    ):
        weights = {k: v.to(device, dtype).expand(4, *v.shape).contiguous() for k, v in one.items()}
        leaves = {k: v.requires_grad_() for k, v in weights.items() if k not in network.buffers}
        out = network(weights | leaves, x.to(device, dtype), train=True)
        gradients = torch.autograd.grad(out.h.square().sum() + out.logits.sum(), list(leaves.values()))
        found[name] = {"h": out.h.detach(), **dict(zip(leaves, gradients, strict=True))}

    def gap(name):
        exact = found["exact"]
        pairs = [(found[name][k].double().to("cuda"), v) for k, v in exact.items()]
        return float(sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)) ** 0.5

    assert gap("kernels") < 1e-4
    assert gap("kernels") < 5 * gap("cpu") + 1e-6


@pytest.mark.parametrize("method", [FedProto(align=0.5), FedAvg()])
def test_groups_that_train_one_after_another_are_the_whole(method):
    whole, _ = played(method, "small", dtype=torch.float64, device="cuda")
    parts, _ = played(method, "small", dtype=torch.float64, device="cuda", together=3)
    assert apart(parts, whole) < 1e-12


def test_torchvisions_resnet_gives_the_same():
    models = pytest.importorskip("torchvision.models")
    theirs = models.resnet18(num_classes=10).eval().cuda()
    network = ResNet18(10, (64, 64, 3))
    weights = {k: v[None].cuda() for k, v in network.load({k: v.cpu() for k, v in theirs.state_dict().items()}).items()}
    x = torch.randn(5, 3, 64, 64, device="cuda")
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        mine = network(weights, x.permute(0, 2, 3, 1)[None]).logits[0]
        assert torch.allclose(mine, theirs(x), atol=1e-4, rtol=1e-4)
    assert resnet.ResNet18(100, (32, 32, 3)).dim == 512


def configurations(*seeds, **train):
    user = {"train": {"rounds": 4, **train}, "eval": {"every": 2}, "partition": {"clients": 6}, "device": "cuda"}
    return resolve(user, seeds=seeds)


def test_seeds_of_a_stack_are_what_each_is_alone(tmp_path):
    configs = configurations(1, 2, 3)
    data = dataset(configs[0])
    stacked = execute_all([Run(tmp_path / f"s{c.seed}", c) for c in configs], lambda some: build_federation(some, data))
    for config, one in zip(configs, stacked, strict=True):
        alone = Run(tmp_path / f"a{config.seed}", config).execute(data)
        for measure, found in alone["accuracy"].items():
            assert one["accuracy"][measure]["mean"] == pytest.approx(found["mean"], abs=0.02), measure
        assert one["partition"] == alone["partition"]


def test_stopped_and_resumed_is_never_stopped(tmp_path):
    (config,) = configurations(1, checkpoint=0.0)
    data = dataset(config)
    whole, halted = Run(tmp_path / "whole", config), Run(tmp_path / "halted", config)
    whole.execute(data)
    seen = []
    with pytest.raises(Stopped):
        halted.execute(data, on_round=seen.append, stop=lambda: len(seen) == 2)
    halted.execute(data)
    assert whole.checkpoint.read_bytes() == halted.checkpoint.read_bytes()
