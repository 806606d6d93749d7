"""Flower's real processes: its simulation, and SuperNodes with keys of their own that reach a SuperLink over TLS."""

import json
import os
import signal
import time
from functools import partial

import pytest
import torch
from flwr.app import Error
from safetensors.torch import load_file

from fedsap.runs import Stopped
from flowergrid import ProcessGrid, parts, plain, rows, same, serve
from flowerprocesses import Federation, named, until

FOUR = ("fedavg", "fedproto", "fedmps", "fedsap")
WORDS = "train.rounds=3 partition.clients=4 eval.every=1 flower.nodes=2"
NODES = {"n0": {"partition_id": 0, "num_partitions": 2}, "n1": {"partition_id": 1, "num_partitions": 2}}


def typed(words, *methods):
    sets = [w for word in words.split() for w in ("--set", word)]
    return [*sets, "--seed", "5", *(w for m in methods for w in ("--method", m))]


def over(process, federation, seconds=280):
    status = process.wait(seconds)
    assert status == 0, federation.said()


def joined(federation, nodes=NODES):
    for name, config in nodes.items():
        federation.register(name)
        federation.node(name, store=str(federation.folder / "store" / name), **config)


@pytest.fixture
def secure(tmp_path):
    with Federation(tmp_path / "flower") as federation:
        federation.superlink()
        yield federation


def test_simulation_gives_the_bits_of_one_process(tmp_path):
    with Federation(tmp_path / "flower", secure=False) as federation:
        run = federation.start(
            "run", "fedsap", "run", "--engine", "flower", "--out", tmp_path / "out", *typed(WORDS, *FOUR)
        )
        over(run, federation)
    for method in FOUR:
        same(tmp_path / "out" / f"{method}-5", plain(tmp_path / method, method, WORDS), bank=method != "fedavg")


def test_deployment_over_tls_gives_the_bits_of_one_process(tmp_path, secure):
    """FedSAP's are compared below, in the test that resumes."""
    joined(secure)
    three = [method for method in FOUR if method != "fedsap"]
    over(secure.run(tmp_path / "out", *typed(WORDS, *three)), secure)
    for method in three:
        same(tmp_path / "out" / f"{method}-5", plain(tmp_path / method, method, WORDS), bank=method != "fedavg")


def test_kill_nine_of_a_node_and_of_another_ones_app(tmp_path, secure):
    """In one round the process of a node dies, and with another node the process that trains. The round ends with the
    third; both take part again, each from the state that the server knows of. The bits are those of a federation in
    which just these answers are missing."""
    three = {f"n{i}": {"partition_id": i, "num_partitions": 3} for i in range(3)}
    joined(secure, three)
    words = "train.rounds=60 partition.clients=3 eval.every=60 flower.least=0.3"
    out = tmp_path / "out" / "fedsap-5"
    run = secure.run(tmp_path / "out", *typed(words, "fedsap"))

    def told():
        return rows(out) if (out / "metrics.jsonl").exists() else []

    until(told, 120, "round 1")
    os.kill(at_work(secure, "n1"), signal.SIGKILL)
    secure.end("n2", signal.SIGKILL)
    until(lambda: any("2" in row["failed"] for row in told()), 150, "a round without the node")

    def back():
        if secure.running.get("n2") is None or secure.running["n2"].poll() is not None:
            secure.running.pop("n2", None)  # refused until the old one is forgotten: what a supervisor does
            secure.node("n2", store=str(secure.folder / "store" / "n2"), **three["n2"])
        return told()[-1]["clients"] == [0, 1, 2]

    until(back, 200, "a round of all three")
    (tmp_path / "out" / "stop").touch()
    assert run.wait(120) == 1  # stopped, and it says how to go on
    every = told()
    lost = {(row["round"], int(c)) for row in every for c in row["failed"]}
    assert {c for _, c in lost} == {1, 2}, secure.said()
    assert not any("joined" in row for row in every)  # nobody began anew

    grid = ProcessGrid(parts(3, tmp_path / "again"))
    for node, one in enumerate(grid.nodes.values()):
        one.spoil = partial(missing, node, lost)
    with pytest.raises(Stopped):
        serve_until(grid, tmp_path / "again", len(every), words)
    mine = load_file(tmp_path / "again" / "fedsap-5" / "checkpoint.safetensors")
    theirs = load_file(out / "checkpoint.safetensors")
    assert torch.equal(mine["server/bank@values"], theirs["server/bank@values"])


def at_work(federation, name):
    """The process that a node has started for its next message; it takes seconds to get to its work."""
    log = federation.folder / f"{name}.log"
    before, pid = log.read_text().count("Start `flwr-clientapp`"), federation.running[name].pid
    old = set(named(pid, "flwr-clientapp"))  # they may take their time to end
    until(lambda: log.read_text().count("Start `flwr-clientapp`") > before, 60, "a new message")
    new = max(until(lambda: set(named(pid, "flwr-clientapp")) - old, 20, "its process"))
    time.sleep(1)  # one that has not fetched its task yet would be started again, and nothing lost
    return new


def missing(node, lost, asked, reply):
    t = json.loads(asked.content["fedsap"]["record"]).get("round")
    return Error(5, "gone") if (t, node) in lost else reply


def serve_until(grid, folder, last, words):
    """The same federation on the in-process Grid, stopped after so many rounds."""

    def came(grid, node, asked):
        if json.loads(asked.content["fedsap"]["record"]).get("round") == last:
            (folder / "stop").touch()

    grid.came = came
    serve(grid, folder, method="fedsap", set=words, seed="5")


def test_kill_nine_of_superlink_and_server_then_resume(tmp_path, secure):
    """Killed while nodes train; taken up again it ends at the bits of a run that was never stopped."""
    joined(secure)
    words = "train.rounds=4 partition.clients=4 eval.every=1"
    out = tmp_path / "out" / "fedsap-5"
    run = secure.run(tmp_path / "out", *typed(words, "fedsap"))
    until(lambda: (out / "metrics.jsonl").exists() and rows(out), 120, "round 1")
    at_work(secure, "n1")
    secure.end("superlink", signal.SIGKILL)
    assert run.wait(90) == 1
    secure.superlink()
    for name, config in NODES.items():
        if secure.running[name].poll() is not None:
            secure.running.pop(name)
            secure.node(name, store=str(secure.folder / "store" / name), **config)
    over(secure.run(tmp_path / "out", *typed(words, "fedsap"), resume=True), secure)
    same(out, plain(tmp_path, "fedsap", words))


def test_a_personal_model_of_400_megabytes_survives(tmp_path):
    words = "train.rounds=2 partition.clients=1 partition.shots=4 eval.every=2 model.name=networks:wide"
    with Federation(tmp_path / "flower", secure=False) as federation:
        federation.superlink(database=False)
        federation.node("n0", partition_id=0, num_partitions=1, store=str(tmp_path / "store"))
        over(federation.run(tmp_path / "out", *typed(words, "fedproto")), federation)
    (state,) = (tmp_path / "store").rglob("round-000002.safetensors")
    assert state.stat().st_size > 400e6
    same(tmp_path / "out" / "fedproto-5", plain(tmp_path, "fedproto", words))
