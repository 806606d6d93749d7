"""The real apps of server and nodes on a Grid in this process."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, Error
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from PIL import Image
from safetensors.torch import load, load_file, save

from fedsap.config import assignments, resolve
from fedsap.engines.flower.node import Site
from fedsap.engines.flower.post import FORMAT
from fedsap.errors import UserError
from fedsap.from_run import of_run
from fedsap.methods import METHODS
from fedsap.runs import Stopped
from fedsap.saved import load_model
from flowergrid import Node, ProcessGrid, parts, plain, rows, same, serve

SMALL = "train.rounds=3 partition.clients=4 eval.every=1 flower.wait=0.5 flower.timeout=20"


@pytest.mark.parametrize("method", list(METHODS))
def test_the_same_bits_as_in_process(tmp_path, method):
    words = SMALL + (" train.rounds=2 unlabelled.size=12 unlabelled.rounds=2" if METHODS[method].needs_pool else "")
    serve(ProcessGrid(parts(2, tmp_path / "nodes")), tmp_path, method=method, set=words, seed="5")
    run = plain(tmp_path, method, words)
    bank = run.rows()[-1]["accuracy"]["proto"] == rows(tmp_path / f"{method}-5")[-1]["accuracy"]["proto"]
    same(tmp_path / f"{method}-5", run, bank=bank, exact=method != "protofssl")
    assert bank or rows(tmp_path / f"{method}-5")[-1]["accuracy"]["proto"] == [None] * 4


@pytest.mark.parametrize("nodes", [1, 3, 4])
def test_it_does_not_matter_which_node_has_which_clients(tmp_path, nodes):
    serve(ProcessGrid(parts(nodes, tmp_path / "nodes")), tmp_path, method="fedsap", set=SMALL, seed="5")
    same(tmp_path / "fedsap-5", plain(tmp_path, "fedsap", SMALL))


@pytest.mark.parametrize(
    "words",
    [
        "train.participation=0.5 eval.every=2",
        "train.failures=0.4",
        "train.warm_start=true",
        "train.reset_momentum=false",
        "unlabelled.size=12 unlabelled.rounds=2 eval.every=2",
        "unlabelled.size=12 unlabelled.rounds=2 method.refresh=once",
    ],
)
def test_options_of_the_round_loop_give_the_same_bits_too(tmp_path, words):
    words = f"{SMALL} {words} flower.least=0.01"
    serve(ProcessGrid(parts(2, tmp_path / "nodes")), tmp_path, method="fedsap", set=words, seed="5")
    same(tmp_path / "fedsap-5", plain(tmp_path, "fedsap", words))


def test_a_node_is_asked_once_in_a_round(tmp_path):
    grid = ProcessGrid(parts(2, tmp_path / "nodes"))
    serve(grid, tmp_path, method="fedsap", set=SMALL, seed="5")
    assert [node.messages for node in grid.nodes.values()] == [1 + 3 + 1] * 2  # who it is, rounds, the last evaluation


@pytest.mark.parametrize("method", ["fedsap", "fednh", "apfl", "moon"])
def test_each_node_has_its_clients_models_at_the_end(tmp_path, method):
    """The same weights, and so the same answers, as the model out of the run in one process."""
    serve(ProcessGrid(parts(2, tmp_path / "nodes")), tmp_path, method=method, set=SMALL, seed="5")
    folder = plain(tmp_path, method, SMALL).folder
    x = torch.linspace(-1, 1, 64).view(1, 8, 8, 1)
    for client in range(4):
        (path,) = (tmp_path / "nodes").rglob(f"client-{client:04d}/model.safetensors")
        there, here = load_model(path), of_run(folder, client)
        for mine, other in ((there.weights, here.weights), *((w, here.state[n]) for n, w in there.state.items())):
            assert all(torch.equal(v, other[k]) for k, v in mine.items())
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(there(x), here(x), strict=True))
        assert (there.owned, there.classes) == (here.owned, here.classes)
        assert there.bank is here.bank is None or torch.equal(there.bank.values, here.bank.values)


# --- what leaves a node


def arrays(grid, way):
    """The messages that went one way, from their bytes."""
    for _, direction, objects in grid.wire:
        if direction == way:
            for name, content in objects.items():
                if content.startswith(b"Message "):
                    message = inflate_object_from_contents(name, dict(objects))
                    yield message


def test_nothing_but_the_prototypes_leaves_a_node(tmp_path):
    """Reads every message of a run: each tensor that a node sends is a prototype or a list of class numbers, and the
    record beside it has nothing that is not named here."""
    grid = ProcessGrid(parts(2, tmp_path / "nodes"))
    serve(grid, tmp_path, method="fedsap", set=SMALL, seed="5")
    messages = list(arrays(grid, "up"))
    assert len(messages) == 2 * 5
    held = json.loads((tmp_path / "fedsap-5" / "partition.json").read_text())["classes"]
    numbers = 0
    for message in messages:
        assert set(message.content) <= {"fedsap", "payload"}
        record = json.loads(message.content["fedsap"]["record"])
        allowed = {"run", "round", "clients", "failed", "lost", "terms", "pool", "judged", "figures", "hash", "seconds"}
        assert set(record) <= allowed | {"name", "classes", "shape", "part", "parts", "version"}
        for array in dict(message.content.get("payload", {})).values():
            for name, tensor in load(array.data).items():
                client, _, entry = name.partition("/")
                own = held[int(client)]
                assert (entry, tuple(tensor.shape), tensor.dtype) in (
                    ("proto@rows", (len(own), 64), torch.float32),
                    ("proto@classes", (len(own),), torch.uint16),
                )
                numbers += tensor.numel() * (entry == "proto@rows")
    told = rows(tmp_path / "fedsap-5")
    assert numbers == sum(n for row in told for n, _ in row["up"])  # what is reported is what was sent


def test_pool_labels_do_not_leave_a_node(tmp_path):
    grid = ProcessGrid(parts(2, tmp_path / "nodes"))
    words = f"{SMALL} unlabelled.size=12 unlabelled.rounds=2"
    serve(grid, tmp_path, method="fedsap", set=words, seed="5")
    names = {k.partition("/")[2] for m in arrays(grid, "up") for a in dict(m.content.get("payload", {})).values()
             for k in load(a.data)}  # fmt: skip
    assert names == {"proto@rows", "proto@classes"}


# --- what a server does not take


def tampered(change):
    """A node whose payload is changed before it leaves, once it has trained twice."""
    rounds = []

    def spoil(asked, reply):
        if json.loads(asked.content["fedsap"]["record"]).get("kind") != "train":
            return reply
        rounds.append(1)
        return change(asked, reply) if len(rounds) == 2 else reply

    return spoil


def payload(change):
    def spoil(asked, reply):
        data = change(load(reply.content["payload"]["up"].data))
        data = data if isinstance(data, bytes) else save({k: v.contiguous() for k, v in data.items()})
        reply.content["payload"]["up"] = Array("uint8", (len(data),), FORMAT, data)
        return reply

    return spoil


def record(**change):
    def spoil(asked, reply):
        text = json.loads(reply.content["fedsap"]["record"]) | change
        reply.content["fedsap"]["record"] = json.dumps(text)
        return reply

    return spoil


def foreign(tensors):
    name = next(k for k in tensors if k.endswith("@classes"))
    return tensors | {name: (tensors[name].long() + 1).to(torch.uint16)}


def narrow(tensors):
    return {k: v[:, :5] if v.dim() == 2 else v for k, v in tensors.items()}


def scaled(by):
    return lambda tensors: {k: v * by if v.is_floating_point() else v for k, v in tensors.items()}


LIES = {
    "not a number": (payload(scaled(float("nan"))), "not finite"),
    "another shape": (payload(narrow), "takes torch.float32"),
    "weights too": (payload(lambda t: t | {"1/model/fc1.weight": torch.zeros(3)}), "it sent"),
    "foreign classes": (payload(foreign), "which it does not hold|there are 10 classes"),
    "a claim of 10 GB": (payload(lambda t: b"\xff\xe3\x0bT\x02\x00\x00\x00{}"), "safetensors format"),
    "far too much": (payload(lambda t: t | {"1/x": torch.zeros(10**6)}), "bytes; takes"),
    "huge numbers": (payload(scaled(1e9)), "flower.longest"),
    "another run": (record(run="f" * 32), "of run ffffffff"),
    "another round": (record(round=1), "an answer to round 1"),
    "others' clients": (record(clients=[0]), "it speaks"),
    "loss is not a number": (record(terms={"ce": [float("nan")] * 2}), "takes a number|no JSON"),
    "other loss terms": (record(terms={"ce": [1.0, 1.0]}), "its loss has the terms"),
    "another partition": (record(hash="0" * 64), "its partition is another one"),
    "no record": (record(round="x"), "round"),
}  # fmt: skip


@pytest.mark.parametrize("lie", list(LIES))
def test_a_bad_answer_is_refused_with_its_reason_and_the_bank_is_unharmed(tmp_path, lie):
    change, why = LIES[lie]
    grid = ProcessGrid(parts(2, tmp_path / "nodes"))
    grid.nodes[101].spoil = tampered(change)
    serve(grid, tmp_path, method="fedsap", set=SMALL, seed="5")
    first, second, third = rows(tmp_path / "fedsap-5")
    assert first["failed"] == third["failed"] == {}
    assert second["clients"] == [0, 2]
    assert set(second["failed"]) == {"1", "3"}
    assert second["refused"][0]["node"] == "part 1 of 2"
    assert all(re.search(why, one["why"]) for one in second["refused"])
    assert third["clients"] == [0, 1, 2, 3]
    bank = load_file(tmp_path / "fedsap-5" / "checkpoint.safetensors")["server/bank@values"]
    assert torch.isfinite(bank).all()
    assert float(bank.norm(dim=1).max()) < 100
    # exactly as if the node had not answered in that round
    other = ProcessGrid(parts(2, tmp_path / "others"))
    other.nodes[101].spoil = tampered(lambda asked, reply: Error(0, "lost"))
    serve(other, tmp_path / "without", method="fedsap", set=SMALL, seed="5")
    assert torch.equal(
        load_file(tmp_path / "without" / "fedsap-5" / "checkpoint.safetensors")["server/bank@values"], bank
    )


def test_a_round_ends_without_a_node_that_says_nothing(tmp_path):
    grid = ProcessGrid(parts(2, tmp_path / "nodes"))
    grid.nodes[101].spoil = tampered(lambda asked, reply: None)
    serve(grid, tmp_path, method="fedsap", set=f"{SMALL} flower.timeout=1.0", seed="5")
    told = rows(tmp_path / "fedsap-5")[1]
    assert told["clients"] == [0, 2]
    assert told["failed"]["1"] == "no answer in 1 s (flower.timeout)"
    assert rows(tmp_path / "fedsap-5")[2]["clients"] == [0, 1, 2, 3]


def test_too_few_answers_stop_the_run_and_it_can_go_on(tmp_path):
    grid = ProcessGrid(parts(2, tmp_path / "nodes"))
    grid.nodes[101].spoil = tampered(lambda asked, reply: Error(8, "ClientApp stopped"))
    words = f"{SMALL} flower.least=0.9"
    with pytest.raises(
        Stopped, match=r"round 2: 2 of 4 clients answered, and flower.least takes 4 \(2 of them: ClientApp stopped"
    ):
        serve(grid, tmp_path, method="fedsap", set=words, seed="5")
    assert json.loads((tmp_path / "flower.json").read_text())["user"] is False
    grid.nodes[101].spoil = lambda asked, reply: reply
    serve(grid, tmp_path, method="fedsap", set=words, seed="5", resume=True)
    same(tmp_path / "fedsap-5", plain(tmp_path, "fedsap", SMALL))


def test_nobody_there(tmp_path):
    with pytest.raises(Stopped, match=r"0 of 4 clients are there after 0.5 s \(no other node came\)"):
        serve(ProcessGrid({}), tmp_path, method="fedsap", set=SMALL, seed="5")


HONEST = "partition.clients=10 partition.ways=4 partition.shots=12 train.rounds=40 eval.every=40 flower.longest=1e9"


def liar(change):
    """A node that spoils every answer of its training."""

    def spoil(asked, reply):
        training = json.loads(asked.content["fedsap"]["record"]).get("kind") == "train"
        return change(asked, reply) if training else reply

    return spoil


def test_one_of_ten_nodes_lies_and_the_honest_clients_hardly_notice(tmp_path):
    """Prototypes a thousand times as long: with `limit` the nine lose at most two points, and the plain mean ruins
    them."""

    def honest(name, words, change):
        grid = ProcessGrid(parts(10, tmp_path / name / "nodes"))
        if change:
            grid.nodes[103].spoil = liar(payload(change))
        serve(grid, tmp_path / name, method="fedsap", set=f"{SMALL} {HONEST} {words}", seed="5")
        told = rows(tmp_path / name / "fedsap-5")
        assert not any("refused" in row for row in told)  # nothing is wrong with the form of these lies
        accuracy = {k: [v for c, v in enumerate(told[-1]["accuracy"][k]) if c != 3] for k in ("head", "proto")}
        return {k: 100 * sum(v) / len(v) for k, v in accuracy.items()}

    clean, robust = honest("clean", "", None), honest("robust", "method.limit=1", scaled(1000.0))
    assert all(robust[k] > clean[k] - 2 for k in clean), (clean, robust)
    try:
        plain_mean = honest("mean", "", scaled(1000.0))
    except Stopped:  # losses that are no numbers: no node's answer is taken any more
        return
    assert plain_mean["proto"] < clean["proto"] - 10, (clean, plain_mean)


PRIVATE = "privacy.noise=2 privacy.clip=1"


def test_noise_is_made_on_the_nodes_and_counted_on_the_server(tmp_path):
    words = f"{SMALL} {PRIVATE}"
    serve(ProcessGrid(parts(2, tmp_path / "nodes")), tmp_path, method="fedsap", set=words, seed="5")
    same(tmp_path / "fedsap-5", plain(tmp_path, "fedsap", words))
    assert rows(tmp_path / "fedsap-5")[-1]["privacy"]["releases"] == [3] * 4


@pytest.mark.parametrize(("asked", "had"), [("", 5.0), ("privacy.noise=9", 9.0)])
def test_a_node_may_ask_for_more_noise_and_not_for_less(tmp_path, asked, had):
    (config,) = resolve(assignments(asked.split()), ["fedsap"])
    assert Site("n", tmp_path, {"privacy": {"noise": 5.0}}).adapted(config).privacy.noise == had


def test_a_node_that_asks_for_noise_sends_no_weights(tmp_path):
    (config,) = resolve({}, ["fedavg"])
    with pytest.raises(UserError, match=r"privacy.noise: this node asks for 5, but fedavg sends more than class means"):
        Site("n", tmp_path, {"privacy": {"noise": 5.0}}).adapted(config)


# --- nodes that go and come, servers that die


class Killed(Exception):
    pass


@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("method", ["fedsap", "fedavg", "fedmps"])
def test_a_server_that_dies_in_a_round_goes_on_to_the_same_bits(tmp_path, method, t):
    """Some nodes have trained round t when the server dies: the resumed one asks for it again."""

    def die(grid, node, asked):
        said = json.loads(asked.content["fedsap"]["record"])
        if said.get("round") == t and said.get("kind") == "train" and node == 101:
            raise Killed

    grid = ProcessGrid(parts(2, tmp_path / "nodes"), came=die)
    with pytest.raises(Killed):
        serve(grid, tmp_path, method=method, set=SMALL, seed="5")
    serve(ProcessGrid(parts(2, tmp_path / "nodes")), tmp_path, method=method, set=SMALL, seed="5", resume=True)
    same(tmp_path / f"{method}-5", plain(tmp_path, method, SMALL), bank=method != "fedavg")


def test_a_lost_state_is_said_and_the_client_begins_anew(tmp_path):
    def lose(grid, node, asked):
        if json.loads(asked.content["fedsap"]["record"]).get("round") == 3 and node == 101:
            for path in (tmp_path / "nodes").rglob("client-0003/*"):
                path.unlink()

    words = f"{SMALL} train.rounds=5"
    serve(ProcessGrid(parts(2, tmp_path / "nodes"), came=lose), tmp_path, method="fedsap", set=words, seed="5")
    told = rows(tmp_path / "fedsap-5")
    assert told[2]["failed"] == {"3": "its state of round 2 is not here; there is none"}
    assert told[2]["clients"] == [0, 1, 2]
    assert told[3]["clients"] == [0, 1, 2, 3]
    assert list(told[3]["joined"]) == ["3"]


def test_a_node_that_vanishes_and_comes_back_goes_on_from_its_state(tmp_path):
    """Away in round 2, back in round 3 under another number: as if it had failed once, and no more."""
    nodes = parts(2, tmp_path / "nodes")

    def leave(grid, node, asked):
        said = json.loads(asked.content["fedsap"]["record"])
        if node == 101 and said.get("round") == 2:
            grid.nodes[101].online = False
            grid.nodes[777] = Node(grid.nodes[101].config)

    serve(ProcessGrid(nodes, came=leave), tmp_path, method="fedsap", set=f"{SMALL} train.rounds=4", seed="5")
    told = rows(tmp_path / "fedsap-5")
    assert told[1]["failed"]["1"].startswith("Node Unavailable")
    assert told[-1]["clients"] == [0, 1, 2, 3]
    assert not any("joined" in row for row in told)  # it has its state of round 1


def test_answers_that_are_lost_again_and_again_do_not_cost_a_client_its_state(tmp_path):
    def lose(asked, reply):
        return Error(5, "lost") if json.loads(asked.content["fedsap"]["record"]).get("round") in (2, 3, 4) else reply

    grid = ProcessGrid(parts(2, tmp_path / "nodes"))
    grid.nodes[101].spoil = lose
    serve(grid, tmp_path, method="fedsap", set=f"{SMALL} train.rounds=6", seed="5")
    told = rows(tmp_path / "fedsap-5")
    assert [row["clients"] for row in told[3:]] == [[0, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert not any("joined" in row for row in told)


# --- own data, by name


def folders(root, name, classes, images=10, seed=0):
    """Images of one brightness for each class, with noise."""
    rng = np.random.default_rng(seed)
    for split, count in (("train", images), ("test", 6)):
        for kind in classes:
            place = root / name / split / kind
            place.mkdir(parents=True)
            for i in range(count):
                level = 30 + 25 * (sum(map(ord, kind)) % 8)
                pixels = np.clip(level + rng.normal(0, 10, (8, 8)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")


OWN = (
    "engine=flower data.name=folder data.size=8 data.channels=1 model.name=small flower.data=own partition.clients=3 "
    "train.rounds=4 eval.every=1 flower.wait=0.5 flower.timeout=20"
)


def own(tmp_path, number, folder, **more):
    config = {"name": folder, "data": str(tmp_path / folder), "store": str(tmp_path / "store" / folder)}
    return {number: Node(config | more)}


def test_folders_with_other_classes_meet_by_name(tmp_path):
    folders(tmp_path, "ark", ["cat", "dog"])
    folders(tmp_path, "zoo", ["dog", "horse"], seed=1)
    grid = ProcessGrid(own(tmp_path, 1, "zoo") | own(tmp_path, 2, "ark"))
    serve(grid, tmp_path / "out", method="fedsap", set=f"{OWN} partition.clients=2", seed="5")
    out = tmp_path / "out" / "fedsap-5"
    assert json.loads((out / "environment.json").read_text())["classes"] == ["cat", "dog", "horse"]
    assert json.loads((out / "partition.json").read_text())["classes"] == [[0, 1], [1, 2]]
    server = load_file(out / "checkpoint.safetensors")
    assert server["server/bank@mask"].tolist() == [True, True, True]
    sent = {}
    for message in arrays(grid, "up"):
        for array in dict(message.content.get("payload", {})).values():
            for name, tensor in load(array.data).items():
                if name.endswith("@classes"):
                    sent.setdefault(name.split("/")[0], set()).add(tuple(tensor.tolist()))
    assert sent == {"0": {(0, 1)}, "1": {(1, 2)}}
    assert json.loads((out / "nodes.json").read_text())["clients"] == {"ark": 0, "zoo": 1}


def test_a_late_node_takes_the_bank_is_judged_and_then_trains(tmp_path):
    folders(tmp_path, "ark", ["cat", "dog"])
    folders(tmp_path, "zoo", ["dog", "horse"], seed=1)
    folders(tmp_path, "late", ["cat", "horse"], seed=2)

    def come(grid, node, asked):
        if json.loads(asked.content["fedsap"]["record"]).get("round") == 2:
            grid.nodes |= own(tmp_path, 3, "late")

    grid = ProcessGrid(own(tmp_path, 1, "zoo") | own(tmp_path, 2, "ark"), came=come)
    serve(grid, tmp_path / "out", method="fedsap", set=f"{OWN} train.rounds=5", seed="5")
    told = rows(tmp_path / "out" / "fedsap-5")
    assert told[0]["failed"] == {"2": "its node is not there"}
    came = next(row for row in told if "joined" in row)
    assert came["round"] in (3, 4)
    assert set(came["joined"]) == {"2"}
    assert all(0 <= came["joined"]["2"][k] <= 1 for k in ("head", "proto", "proto_cos"))
    assert 2 in came["clients"]
    assert told[-1]["clients"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("classes", "words", "why"),
    [
        (["Cat", "dog"], "", r"'cat' \(ark\) and 'Cat' \(zoo\) differ"),
        (
            ["cat", "dgo"],
            'flower.classes=["cat","dog"]',
            "zoo has 'dgo', and the federation has cat, dog; did you mean 'dog'",
        ),
    ],
)
def test_disagreement_about_classes_is_a_mistake_that_says_which(tmp_path, classes, words, why):
    folders(tmp_path, "ark", ["cat", "dog"])
    folders(tmp_path, "zoo", classes, seed=1)
    grid = ProcessGrid(own(tmp_path, 1, "ark") | own(tmp_path, 2, "zoo"))
    with pytest.raises(UserError, match=why):
        serve(grid, tmp_path / "out", method="fedsap", set=f"{OWN} partition.clients=2 {words}", seed="5")
    assert json.loads((tmp_path / "out" / "flower.json").read_text())["user"] is True


def test_own_data_weights_and_a_second_architecture(tmp_path):
    """One node has a network and a batch size of its own; prototypes are all that has to fit."""
    folders(tmp_path, "ark", ["cat", "dog"])
    folders(tmp_path, "zoo", ["dog", "horse"], seed=1)
    (tmp_path / "zoo.toml").write_text('[model]\nname = "networks:build"\n[train]\nbatch = 4\n')
    grid = ProcessGrid(own(tmp_path, 1, "ark") | own(tmp_path, 2, "zoo", config=str(tmp_path / "zoo.toml")))
    serve(grid, tmp_path / "out", method="fedproto", set=f"{OWN} partition.clients=2", seed="5")
    told = rows(tmp_path / "out" / "fedproto-5")
    assert [row["clients"] for row in told] == [[0, 1]] * 4
    states = {p.parent.name: load_file(p) for p in (tmp_path / "store").rglob("round-000004.safetensors")}
    assert {k: len(v) for k, v in states.items()} == {"client-0000": 8, "client-0001": 4}
    assert told[-1]["loss"]["align"][1] > 0


def test_another_size_of_prototypes_is_refused(tmp_path):
    folders(tmp_path, "ark", ["cat", "dog"])
    folders(tmp_path, "zoo", ["dog", "horse"], seed=1)
    (tmp_path / "zoo.toml").write_text('[model]\nname = "cnn"\n[data]\nsize = 28\n')
    grid = ProcessGrid(own(tmp_path, 1, "ark") | own(tmp_path, 2, "zoo", config=str(tmp_path / "zoo.toml")))
    serve(grid, tmp_path / "out", method="fedproto", set=f"{OWN} partition.clients=2", seed="5")
    first = rows(tmp_path / "out" / "fedproto-5")[0]
    assert first["clients"] == [0]
    assert "'proto' has torch.float32 [50] per class; takes torch.float32 [64]" in first["failed"]["1"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"data": "/nowhere"}, "no folder train/ in /nowhere"),
        ({"config": "/nowhere.toml"}, "/nowhere.toml: No such file"),
        ({"toml": "[method]\nproxy = 0\n"}, "'method' is not a node's to set"),
        ({"toml": "[train]\nrounds = 7\n"}, "'train.rounds' is not a node's to set; takes batch"),
        ({"toml": "[train]\nbatch = 0\n"}, "train.batch: got 0"),
        ({"name": ""}, "this node has no name"),
    ],
)
def test_a_node_that_cannot_take_part_says_why_and_the_others_go_on(tmp_path, capsys, config, why):
    folders(tmp_path, "ark", ["cat", "dog"])
    folders(tmp_path, "zoo", ["dog", "cat"], seed=1)
    if "toml" in config:
        (tmp_path / "own.toml").write_text(config.pop("toml"))
        config["config"] = str(tmp_path / "own.toml")
    grid = ProcessGrid(own(tmp_path, 1, "ark") | own(tmp_path, 2, "zoo", **config))
    serve(grid, tmp_path / "out", method="fedsap", set=f"{OWN} partition.clients=2 train.rounds=1", seed="5")
    assert why in capsys.readouterr().out
    assert rows(tmp_path / "out" / "fedsap-5")[0]["clients"] == [0]


def test_cnn_and_resnet_meet_in_one_federation(tmp_path):
    """The example's configurations, with its images."""
    example = Path(__file__).parents[3] / "examples" / "heterogeneous"
    spec = importlib.util.spec_from_file_location("heterogeneous", example / "run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    for number, (name, (classes, _)) in enumerate(run.NODES.items()):
        run.images(tmp_path / name, classes, 60 * number, 8)
    nodes = own(tmp_path, 1, "clinic") | own(tmp_path, 2, "hospital", config=str(example / "strong.toml"))
    words = "flower.wait=0.5 train.rounds=2 eval.per_class=2"
    serve(ProcessGrid(nodes), tmp_path / "out", config=str(example / "federation.toml"), set=words, seed="5")
    told = rows(tmp_path / "out" / "fedsap-5")
    assert [row["clients"] for row in told] == [[0, 1], [0, 1]]
    assert all(v > 0 for v in told[1]["loss"]["proxy"])
    states = {p.parent.name: load_file(p) for p in (tmp_path / "store").rglob("round-000002.safetensors")}
    assert any("layer4" in name for name in states["client-0001"])
    assert {states[c]["state/model/project.weight"].shape[0] for c in states} == {64}
    assert json.loads((tmp_path / "out" / "fedsap-5" / "environment.json").read_text())["classes"] == [
        f"digit-{i}" for i in range(10)
    ]
