"""Flower's real ServerApp and ClientApp in one process, with neither Ray nor a SuperLink. Messages pass as bytes."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from fedsap.config import assignments, resolve
from fedsap.engines.flower import client_app, server_app
from fedsap.federation import dataset
from fedsap.runs import Run

RUN = 7


@dataclass
class Node:
    """One node. `spoil` may change its answer before it leaves, or put an Error or None in its place."""

    config: dict
    registered: str = ""
    online: bool = True
    spoil: Callable = lambda asked, reply: reply
    messages: int = 0


@dataclass
class ProcessGrid(Grid):
    """Nodes by their number. `wire` keeps all bytes that pass, as (node, direction, bytes)."""

    nodes: dict[int, Node]
    wire: list = field(default_factory=list)
    came: Callable = lambda grid, node, asked: None
    waiting: dict = field(default_factory=dict)
    number: int = 0

    def __post_init__(self):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, 1

    @property
    def run(self):
        return SimpleNamespace(run_id=RUN)

    def set_run(self, run):
        pass

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_node_ids(self):
        return [n for n, node in self.nodes.items() if node.online]

    def get_nodes(self):
        return [NodeInfo(node_id=n, name=self.nodes[n].registered) for n in self.get_node_ids()]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            self.number += 1
            ids.append(f"message-{self.number}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids):
        found = []
        for one in message_ids:
            if one in self.waiting:
                reply = self._play(one, self.waiting.pop(one))
                if reply is not None:  # else it never comes
                    found.append(reply)
        return found

    def _play(self, one, message):
        number = message.metadata.dst_node_id
        node = self.nodes[number]
        self.came(self, number, message)
        if not node.online:  # what a SuperLink says some time after a node has gone; it comes in the SuperLink's name
            reply = Message(Error(5, "Node Unavailable"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1
            return reply
        node.messages += 1
        context = Context(RUN, number, dict(node.config), RecordDict(), {})
        asked = self._passed(number, "down", message)
        reply = node.spoil(asked, client_app.app(asked, context))
        if isinstance(reply, Error):
            return Message(reply, reply_to=message)
        if reply is None:
            return None
        passed = self._passed(number, "up", reply)
        passed.metadata.__dict__["_reply_to_message_id"] = one
        return passed

    def _passed(self, number, way, message):
        """The message after its way as bytes."""
        name = message.metadata.message_id
        objects = {key: value.deflate() for key, value in get_all_nested_objects(message).items()}
        self.wire.append((number, way, objects))
        made = inflate_object_from_contents(message.object_id, dict(objects))
        made.metadata.__dict__["_message_id"] = name
        return made


def serve(grid, folder, **asked):
    """Runs the server's app to its end."""
    context = Context(RUN, 1, {}, RecordDict(), {"out": str(folder)} | asked)
    server_app.app(grid, context)


def parts(count, store, **more):
    """Nodes that share a known data set's clients."""
    return {
        100 + i: Node({"partition-id": i, "num-partitions": count, "store": str(store)} | more) for i in range(count)
    }


OUTSIDE = ("seconds", "silhouette", "joined", "work")  # a silhouette would need all embeddings in one place


def plain(folder, method, words, seed=5):
    """The same federation as one stack in this process."""
    (config,) = resolve(assignments(words.split()), [method], [seed])
    run = Run(folder / "plain", config)
    run.execute(dataset(config))
    return run


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(folder, run, bank=True, exact=True):
    """Row by row and tensor by tensor what the run in one process gave."""
    for there, here in zip(rows(folder), run.rows(), strict=True):
        if not bank:
            for row in (there, here):
                for name in ("proto", "proto_cos"):
                    row["accuracy"].pop(name)
        if not exact:
            losses = [[v for values in row.pop("loss").values() for v in values] for row in (there, here)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert {k: v for k, v in there.items() if k not in OUTSIDE} == {
            k: v for k, v in here.items() if k not in OUTSIDE
        }
    server, mine = load_file(folder / "checkpoint.safetensors"), load_file(run.checkpoint)
    for name in [n for n in mine if n.startswith("server/")]:
        near = torch.equal if exact else partial(torch.allclose, rtol=1e-5, atol=1e-6)
        assert near(server[name], mine[name]), name
