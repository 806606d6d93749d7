"""The hooks are wide enough: the kinds of method that fedsap does not ship yet, in a few lines each, do what they
say."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from federations import SEED, pair
from fedsap.message import PerClass, prefixed, tensor, under
from fedsap.methods import FedAvg
from fedsap.methods.method import Method, Phase
from fedsap.training.rounds import Judge, Presence, play


def finish(method, network="small", rounds=3, **more):
    simulation, *_ = pair(method, network, rounds=rounds, **more)
    outcomes = play(
        method, simulation.task, simulation, seed=SEED, server=None, done=0, presence=Presence(), judge=Judge(every=1)
    )
    return simulation, list(outcomes)


@dataclass(frozen=True)
class Prox(FedAvg):
    """FedProx: a term that compares the weights with those received."""

    mu: float = 1.0

    def loss(self, step):
        old = step.live(under("model", step.down))
        gap = sum(
            (step.state["model"][k] - v).square().flatten(1).sum(1) for k, v in old.items() if k in step.state["model"]
        )
        return {"ce": self.cross_entropy(step), "prox": self.mu / 2 * gap} if old else {"ce": self.cross_entropy(step)}


def test_proximal_term_keeps_weights_near():
    def drift(mu):
        simulation, outcomes = finish(Prox(mu=mu), "resnet18", sizes=(25, 25), rounds=2)
        before = under("model", outcomes[0].server)
        names = [k for k in before if not k.endswith(("mean", "var"))]
        return float(sum((simulation.state["model"][k] - before[k]).square().sum() for k in names))

    assert drift(5.0) < 0.7 * drift(0.0)


@dataclass(frozen=True)
class Rep(Method):
    """FedRep: the head first, then the base; only the base is averaged."""

    def phases(self):
        return (Phase(self.loss, part="head", epochs=2), Phase(self.loss, part="base"))

    def broadcast(self, server, t):
        return server

    def receive(self, state, down):
        return {"model": state["model"] | under("model", down)}

    def reply(self, local):
        return prefixed("model", {k: v for k, v in local.state["model"].items() if not k.startswith("fc2")})

    def combine(self, task, server, replies, t):
        return prefixed("model", {k: v.mean(0) for k, v in under("model", replies).items()})


def test_phases_that_freeze_a_part_and_an_averaged_part():
    simulation, outcomes = finish(Rep(), rounds=1)
    model = simulation.state["model"]
    assert outcomes[0].up[0].numbers == sum(v[0].numel() for k, v in model.items() if not k.startswith("fc2"))
    head_only, *_ = pair(Rep(), "small", rounds=1)
    object.__setattr__(head_only.stack, "method", HeadOnly())
    start = {k: v.clone() for k, v in head_only.state["model"].items()}
    head_only.train(1, {}, {}, [0, 1, 2, 3])
    moved = {k for k, v in head_only.state["model"].items() if not torch.equal(v, start[k])}
    assert moved == {"fc2.weight", "fc2.bias"}


@dataclass(frozen=True)
class HeadOnly(Method):
    def phases(self):
        return (Phase(self.loss, part="head"),)


@dataclass(frozen=True)
class Moon(FedAvg):
    """MOON: features under the received and under the previous model, both frozen."""

    def join(self, task, state):
        return {**state, "previous": {k: v.clone() for k, v in state["model"].items()}}

    def receive(self, state, down):
        return {"previous": state["model"], "model": state["model"] | under("model", down)}

    def loss(self, step):
        received = under("model", step.down)
        if not received:
            return {"ce": self.cross_entropy(step)}
        with torch.no_grad():
            near, far = step.forward(received).h, step.forward(step.state["previous"]).h
        z = torch.stack([F.cosine_similarity(step.out.h, other, dim=-1) for other in (near, far)], -1) / 0.5
        return {"ce": self.cross_entropy(step), "moon": -z.log_softmax(-1)[..., 0].mean(1)}


def test_frozen_copies_of_the_received_and_the_previous_model():
    simulation, outcomes = finish(Moon(), rounds=3)
    assert (outcomes[-1].terms["moon"] > 0).all()
    was = {k: v.clone() for k, v in simulation.state["model"].items()}
    simulation.train(4, simulation.stack.method.broadcast(outcomes[-1].server, 4), {}, [0, 1, 2, 3])
    assert all(torch.equal(v, was[k]) for k, v in simulation.state["previous"].items())


@dataclass(frozen=True)
class Ditto(FedAvg):
    """Ditto: a personal model beside the averaged one, pulled towards it; the personal one is judged."""

    def join(self, task, state):
        return {**state, "personal": {k: v.clone() for k, v in state["model"].items()}}

    def phases(self):
        return (Phase(self.loss), Phase(self.personal, trains=("personal",)))

    def personal(self, step):
        out = step.forward(step.state["personal"])
        gap = sum((v - step.state["model"][k]).square().flatten(1).sum(1) for k, v in step.state["personal"].items())
        return {
            "personal": F.cross_entropy(out.logits.flatten(0, 1), step.y.flatten(), reduction="none")
            .view_as(step.y)
            .mean(1),
            "near": 0.5 * gap,
        }

    def model(self, state):
        return state["personal"]


def test_a_personal_model_beside_the_shared_one():
    simulation, outcomes = finish(Ditto(), rounds=3)
    plain, _ = finish(FedAvg(), rounds=3)
    assert all(torch.equal(v, plain.state["model"][k]) for k, v in simulation.state["model"].items())
    assert not torch.equal(simulation.state["personal"]["fc2.weight"], simulation.state["model"]["fc2.weight"])
    assert outcomes[-1].scores is not None


@dataclass(frozen=True)
class Clusters(FedAvg):
    """CFL in small: each client gets the mean of its own cluster, here even and odd ids."""

    def broadcast(self, server, t):
        return {}

    def address(self, server, t, clients):
        return {k: v[clients % 2] for k, v in server.items()}

    def combine(self, task, server, replies, t):
        groups = [
            FedAvg(weighted=False).combine(
                task,
                {},
                {k: tensor(replies, k)[t.clients % 2 == g] for k in replies if k != "samples"},
                replace(t, clients=t.clients[t.clients % 2 == g]),
            )
            for g in (0, 1)
        ]
        return {k: torch.stack([tensor(g, k) for g in groups]) for k in groups[0]}


def test_a_message_for_each_client():
    method = Clusters()
    simulation, outcomes = finish(method, rounds=2)
    server = outcomes[-1].server
    simulation.train(3, {}, method.address(server, 3, torch.arange(4)), [0, 1, 2, 3])
    fresh, _ = finish(method, rounds=2)
    received = fresh.stack.method.receive(
        fresh.state,
        method.address(server, 3, torch.tensor([k.client for k in fresh.stack.keys])),
    )
    for row, key in enumerate(fresh.stack.keys):
        assert torch.equal(received["model"]["fc2.bias"][row], tensor(server, "model/fc2.bias")[key.client % 2])
    assert outcomes[-1].down[0].numbers == sum(v[0].numel() for v in server.values())


@dataclass(frozen=True)
class Fixed(FedAvg):
    """FedNH in small: logits are cosines with a head that the server owns and moves by class means."""

    def begin(self, task, generator):
        head = F.normalize(torch.randn(task.classes, task.network.dim, generator=generator), dim=-1)
        return {"head": head.double()}

    def broadcast(self, server, t):
        return server

    def join(self, task, state):
        clients = len(next(iter(state["model"].values())))
        return {**state, "head": {"rows": torch.zeros(clients, task.classes, task.network.dim, dtype=torch.float64)}}

    def receive(self, state, down):
        return {"model": state["model"] | under("model", down), "head": {"rows": tensor(down, "head")}}

    def logits(self, out, state):
        return 10 * F.normalize(out.h, dim=-1) @ state["head"]["rows"].mT

    def loss(self, step):
        z = self.logits(step.out, step.state)
        return {"ce": F.cross_entropy(z.flatten(0, 1), step.y.flatten(), reduction="none").view_as(step.y).mean(1)}

    def represent(self, out):
        return {"proto": F.normalize(out.h, dim=-1)}

    def passes(self):
        return {"proto": "eval"}

    def reply(self, local):
        return FedAvg.reply(self, local) | {"proto": local.means["proto"]}

    def combine(self, task, server, replies, t):
        from fedsap.prototypes import combine

        mean = combine(replies["proto"]).values
        return FedAvg.combine(self, task, {}, replies, t) | {
            "head": F.normalize(0.9 * server["head"] + 0.1 * mean, dim=-1)
        }


def test_a_head_that_the_server_owns():
    simulation, outcomes = finish(Fixed(), rounds=6)
    head = tensor(outcomes[-1].server, "head")
    torch.testing.assert_close(head.norm(dim=-1), torch.ones(4, dtype=torch.float64))
    start = pair(Fixed(), "small")[0].state["model"]["fc2.weight"]
    torch.testing.assert_close(simulation.state["model"]["fc2.weight"], start)  # its own head is never used
    assert outcomes[-1].terms["ce"].mean() < outcomes[0].terms["ce"].mean()


def test_prototypes_in_training_mode_leave_running_statistics_alone():
    from fedsap.methods import FedProto

    method = FedProto(proto_pass="train")
    simulation, *_ = pair(method, "resnet18", sizes=(9, 12), rounds=1)
    other, *_ = pair(replace(method, proto_pass="eval"), "resnet18", sizes=(9, 12), rounds=1)
    a = simulation.train(1, {}, {}, [0, 1]).message["proto"]
    b = other.train(1, {}, {}, [0, 1]).message["proto"]
    assert isinstance(a, PerClass)
    assert not torch.allclose(a.values, b.values)
    for k, v in simulation.state["model"].items():
        assert torch.equal(v, other.state["model"][k]), k
