"""Models out of run folders are what the run has judged."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedsap.config import assignments, resolve
from fedsap.data import load
from fedsap.errors import UserError
from fedsap.federation import build_federation
from fedsap.from_run import of_run
from fedsap.methods import METHODS
from fedsap.predict import allowed, scores
from fedsap.runs import Run, execute_all

MEASURES = {
    "head": ("head", "all"),
    "head_own": ("head", "own"),
    "proto": ("proto", "own"),
    "proto_cos": ("cos", "own"),
}
KEYS = ["partition.clients=4", "partition.spread=2", "train.rounds=3", "eval.every=1", "eval.silhouette=0"]
POOL = ["unlabelled.size=12", "unlabelled.rounds=2"]
BUILT_IN = sorted(name for name, m in METHODS.items() if m.__module__.startswith("fedsap."))


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, digits):
    """Two seeds of every method, trained as one stack, by method and seed."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for name in BUILT_IN:
        more = POOL if METHODS[name].uses_pool else []
        more = [*more, "train.participation=0.5", "method.mix=logits"] if name == "apfl" else more
        configs = resolve(assignments([*KEYS, *more]), [name], [5, 6])
        group = [Run(folder / f"{name}-{c.seed}", c) for c in configs]
        execute_all(group, lambda some: build_federation(some, digits))
        found |= {(name, run.config.seed): run for run in group}
    return found


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_client_is_as_good_as_the_run_says(name, seed, runs, digits):
    run = runs[name, seed]
    last = run.rows()[-1]["accuracy"]
    for client in range(4):
        found = of_run(run.folder, client)
        mine = np.flatnonzero(np.isin(digits.test.labels, found.owned))
        x, y = torch.from_numpy(digits.test.images[mine]), torch.from_numpy(digits.test.labels[mine])
        for measure, (by, among) in MEASURES.items():
            if by == "head" or found.bank is not None:
                right = scores(found, x, by, allowed(found, by, among)).argmax(-1) == y
                assert float(right.float().mean()) == pytest.approx(last[measure][client], abs=1e-6), (client, measure)
    rounds = 5 if METHODS[name].uses_pool else 3
    about = {"run": f"{name}-{seed}", "data": "digits", "seed": seed, "client": 3, "round": rounds}
    assert (found.about, found.classes, found.pixels) == (about, digits.classes, digits.pixels)


def test_methods_with_prototypes_have_them(runs):
    have = {name for name in BUILT_IN if of_run(runs[name, 5].folder, 0).bank is not None}
    assert have == {"fedsap", "fedproto", "fedmps", "fednh", "fedpac", "protofssl", "fedppl"}


@pytest.fixture
def run(runs, tmp_path):
    """A run's folder to spoil."""
    return shutil.copytree(runs["fedsap", 5].folder, tmp_path / "run")


def without_clients(folder, *starts):
    path = folder / "checkpoint.safetensors"
    with safe_open(path, "pt") as file:
        about = file.metadata()
    save_file({k: v for k, v in load_file(path).items() if not k.startswith(starts)}, path, about)


def no_method(folder):
    config = json.loads((folder / "config.json").read_text())
    config["method"] = {"name": "homemade"}
    (folder / "config.json").write_text(json.dumps(config))
    names = json.loads((folder / "environment.json").read_text())
    del names["method"]
    (folder / "environment.json").write_text(json.dumps(names))


DAMAGES = {
    "no checkpoint": (lambda f: (f / "checkpoint.safetensors").unlink(), "has no checkpoint yet"),
    "a damaged one": (lambda f: (f / "checkpoint.safetensors").write_bytes(b"x"), "not a checkpoint of a run"),
    "the server's alone": (lambda f: without_clients(f, "state/", "clients"), "holds no clients, only the server"),
    "an older one": (lambda f: without_clients(f, "clients"), "does not say whose weights are whose"),
    "no partition": (lambda f: (f / "partition.json").unlink(), "partition.json: missing or damaged"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "holds no run; takes a folder that fedsap run"),
    "a key too many": (lambda f: (f / "config.json").write_text('{"planet": 1}'), "config.json: planet: got 1"),
    "an unknown method": (no_method, "method 'homemade' is not part of fedsap, and it is not said where"),
    "nothing": (shutil.rmtree, "no such file or folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_no_whole_run(damage, run):
    spoil, said = DAMAGES[damage]
    spoil(run)
    with pytest.raises(UserError, match=said) as caught:
        of_run(run, 0)
    assert "\n" not in str(caught.value)
    assert str(run) in str(caught.value)


@pytest.mark.parametrize(("number", "got"), [(None, "nothing"), (4, "4"), (-1, "-1")])
def test_a_client_that_there_is_not(number, got, run):
    with pytest.raises(UserError, match=f"--client: got {got}, takes one of the clients of .*, 0 to 3"):
        of_run(run, number)


def test_the_folder_above_runs_names_one(run):
    with pytest.raises(UserError, match=f"holds no run; takes a run's folder, such as {run}"):
        of_run(run.parent, 0)


def test_a_checkpoint_whose_clients_are_in_another_order_is_not_taken_up(runs, run, digits):
    path = run / "checkpoint.safetensors"
    with safe_open(path, "pt") as file:
        about = file.metadata()
    tensors = load_file(path)
    save_file(tensors | {"clients": tensors["clients"].flip(0)}, path, about)
    (run / "result.json").unlink()
    with pytest.raises(UserError, match=r"not a checkpoint of this run \(its clients are in another order"):
        Run(run, runs["fedsap", 5].config).execute(digits)
