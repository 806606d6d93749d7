import importlib.util
import json
from pathlib import Path

import pytest

from fedsap.config import resolve
from fedsap.federation import dataset
from fedsap.runs import Run, read_json

ROOT = Path(__file__).parents[2]
SMALL = {
    "partition": {"clients": 6},
    "train": {"rounds": 4},
    "eval": {"every": 2, "snapshots": [2, 4]},
}


@pytest.fixture(scope="session")
def fabricated():
    """The module that writes run folders without training."""
    spec = importlib.util.spec_from_file_location("report_runs", ROOT / "benchmarks" / "report_runs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """Two seeds of FedSAP, FedProto and FedAvg on digits, with snapshots. Not to be written to."""
    out = tmp_path_factory.mktemp("trained")
    configs = resolve(SMALL, ["fedsap", "fedproto", "fedavg"], [1, 2])
    loaded = dataset(configs[0])
    for config in configs:
        Run(out / f"{config.method['name']}-{config.seed}", config).execute(loaded)
    return out


@pytest.fixture(scope="session")
def studies(tmp_path_factory, fabricated) -> Path:
    """Runs in which shots, schedule, start, scale and the proxy were varied, and two phases named."""
    out = tmp_path_factory.mktemp("studies")
    data = fabricated.dataset("cifar10", 10)
    base = {"data": {"name": "cifar10"}, "train": {"rounds": 20}, "partition": {"clients": 5}}
    varied = {
        "k5": {"partition": {"clients": 5, "shots": 5}},
        "k25": {"partition": {"clients": 5, "shots": 25}},
        "plain": {},
        "cosine": {"method": {"schedule_shape": "cosine"}},
        "constant": {"method": {"schedule_shape": "constant"}},
        "start1": {"method": {"align_start": 1}},
        "s8": {"method": {"proxy_scale": 8.0}},
        "no-proxy": {"method": {"proxy": 0.0}},
    }
    for name, change in varied.items():
        for config in resolve({**base, **change}, ["fedsap"], [1, 2]):
            fabricated.fabricate(out / name / f"fedsap-{config.seed}", config, data)
    for name in ("k5", "k25", "plain"):
        for config in resolve({**base, **varied[name]}, ["fedproto"], [1, 2]):
            fabricated.fabricate(out / name / f"fedproto-{config.seed}", config, data)
    for seed in (1, 2):
        path = out / "k25" / f"fedsap-{seed}" / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["phase"] = "supervised" if row["round"] <= 10 else "refinement"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


@pytest.fixture(scope="session")
def results():
    """The result.json files of some folder by method and seed."""

    def read(out: Path):
        found = [read_json(path) for path in sorted(out.rglob("result.json"))]
        return {(one["method"], one["seed"]): one for one in found}

    return read


@pytest.fixture(scope="session")
def written(trained, tmp_path_factory) -> Path:
    """The report of `trained`."""
    from fedsap.report import write_report

    out = tmp_path_factory.mktemp("written")
    assert [path.name for path in write_report([trained], out)] == ["report.html", "report.md", "report.tex"]
    return out
