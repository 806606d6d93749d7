"""What the hooks promise to every method, whatever it makes of them."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import pooled
from federations import pair, played
from fedsap.message import PerClass, prefixed, under
from fedsap.methods import FedAvg, FedProto
from fedsap.methods.method import Choice, Method, Phase


def test_prototypes_in_training_mode_leave_running_statistics_alone():
    method = FedProto(proto_pass="train")
    simulation, *_ = pair(method, "resnet18", sizes=(9, 12), rounds=1)
    other, *_ = pair(replace(method, proto_pass="eval"), "resnet18", sizes=(9, 12), rounds=1)
    a = simulation.train(1, {}, {}, [0, 1]).message["proto"]
    b = other.train(1, {}, {}, [0, 1]).message["proto"]
    assert isinstance(a, PerClass)
    assert not torch.allclose(a.values, b.values)
    for k, v in simulation.state["model"].items():
        assert torch.equal(v, other.state["model"][k]), k


@dataclass(frozen=True)
class Early(FedAvg):
    """FedAvg that sends class means of before its training."""

    def passes(self):
        return {"proto": "before"}

    def reply(self, local):
        return super().reply(local) | {"proto": local.means["proto"]}


def test_means_of_before_training_are_those_of_the_received_weights():
    simulation, models, mine, *_ = pair(Early(), "resnet18", sizes=(9, 12), rounds=2)
    sent = simulation.train(1, {}, {}, [0, 1]).message["proto"]
    for q, (model, (x, y)) in enumerate(zip(models, mine, strict=True)):
        with torch.no_grad():
            h = model.eval()(x)[0]
        for c in y.unique():
            torch.testing.assert_close(sent.values[q, c], h[y == c].mean(0))


@dataclass(frozen=True)
class Twice(Method):
    """The model is trained in one phase, a copy of it, with a set of its own beside it, in another."""

    def init(self, task, generator):
        state = super().init(task, generator)
        return {**state, "copy": state["model"], "own": {"none": torch.zeros(3)}, "empty": {}}

    def phases(self):
        return (Phase(self.loss, epochs=2), Phase(self.again, trains=("copy", "empty"), epochs=2))

    def again(self, step):
        return {"copy": self.cross_entropy(step), "ten": step.y.new_full((len(step.y),), 10.0, dtype=torch.float64)}


def test_a_second_model_meets_the_same_batches():
    simulation, *_ = pair(Twice(), "resnet18", sizes=(9, 20), rounds=1)
    simulation.train(1, {}, {}, [0, 1])
    for k, v in simulation.state["model"].items():
        assert torch.equal(v, simulation.state["copy"][k]), k  # BatchNorm's statistics too
    assert torch.equal(simulation.state["own"]["none"], torch.zeros(2, 3, dtype=torch.float64))


def test_a_term_is_a_mean_over_the_steps_of_its_own_phases():
    simulation, *_ = pair(Twice(), "small", rounds=1)
    terms = simulation.train(1, {}, {}, [0, 1, 2, 3]).terms
    assert torch.equal(terms["ten"], torch.full((4,), 10.0, dtype=torch.float64))
    assert torch.equal(terms["ce"], terms["copy"])


@dataclass(frozen=True)
class Looking(FedAvg):
    """FedAvg that looks at what it received, layers in evaluation mode."""

    def loss(self, step):
        terms = {"ce": self.cross_entropy(step)}
        if step.down:
            with torch.no_grad():
                terms["seen"] = step.forward(under("model", step.down), train=False).h.square().mean((1, 2))
        return terms


def test_looking_at_received_weights_in_evaluation_mode_changes_nothing():
    simulation, *_ = pair(Looking(), "resnet18", sizes=(9, 12), rounds=2)
    other, *_ = pair(FedAvg(), "resnet18", sizes=(9, 12), rounds=2)
    down = prefixed("model", {k: v[0].clone() for k, v in simulation.state["model"].items()})
    before = {k: v.clone() for k, v in down.items()}
    told = simulation.train(2, down, {}, [0, 1])
    other.train(2, down, {}, [0, 1])
    assert all(torch.equal(v, before[k]) for k, v in down.items())
    assert (told.terms["seen"] > 0).all()
    for k, v in simulation.state["model"].items():
        assert torch.equal(v, other.state["model"][k]), k


@dataclass(frozen=True)
class HeadOnly(Method):
    part: str = "head"

    def phases(self):
        return (Phase(self.loss, part=self.part),)


@pytest.mark.parametrize("part", ["head", "base"])
def test_a_phase_moves_its_part_alone(part):
    simulation, *_ = pair(HeadOnly(part=part), "small", rounds=1)
    start = {k: v.clone() for k, v in simulation.state["model"].items()}
    simulation.train(1, {}, {}, [0, 1, 2, 3])
    moved = {k for k, v in simulation.state["model"].items() if not torch.equal(v, start[k])}
    head = {"fc2.weight", "fc2.bias"}
    assert moved == (head if part == "head" else set(start) - head)


@dataclass(frozen=True)
class Streams(Method):
    """Says in its terms what it is fed, and trains on nothing."""

    uses_pool = True

    def choose(self, start):
        places = torch.arange(start.valid.shape[1]).expand(start.valid.shape)
        few = start.valid & (places < 2)
        return Choice(places, few, other=start.valid & ~few)

    def draw(self, rng, batches):
        return {"number": np.arange(1.0, batches + 1)}

    def phases(self):
        return (Phase(self.pool, pool=True), Phase(self.loss))

    def pool(self, step):
        none = 0 * step.state["model"]["conv1.weight"].flatten(1).sum(1)
        one, other = step.pool.labels.max(1).values, step.pool.other.labels.min(1).values
        return {"one": one + none, "other": other + none, "number": step.pool.drawn["number"] + none}


def test_two_streams_numbers_of_ones_own_and_phases_of_a_pool_alone():
    simulation, *_ = pooled.federation(Streams(), rounds=1, more=1)
    first, second = played(simulation, every=9)
    assert set(first.terms) == {"ce"}
    assert set(second.terms) == {"one", "other", "number", "ce"}
    assert (second.terms["one"] <= 1).all()
    assert (second.terms["other"] >= 2).all()
    assert second.terms["number"].tolist() == [(steps + 1) / 2 for steps in (2, 5, 4, 1)]


@dataclass(frozen=True)
class OnlyPool(Streams):
    def phases(self):
        return (Phase(self.pool, pool=True),)


def test_labelled_images_are_not_looked_at_unless_asked_for():
    """BatchNorm's statistics would know."""
    simulation, *_ = pooled.federation(OnlyPool(), "resnet18", (9, 17), rounds=0, more=1)
    before = {k: v.clone() for k, v in simulation.state["model"].items()}
    list(played(simulation, every=9))
    assert all(torch.equal(v, before[k]) for k, v in simulation.state["model"].items())


@dataclass(frozen=True)
class Others(Method):
    """Labels the pool by another model than its own."""

    uses_pool = True

    def choose(self, start):
        def facts(seen):
            zero = {k: torch.zeros_like(v) for k, v in seen.state["model"].items()}
            zero["fc2.bias"] = zero["fc2.bias"] + torch.tensor([0.0, 0.0, 1.0, 0.0])
            return {"label": seen.forward(zero).logits.argmax(-1)}

        return Choice(start.of_pool(facts)["label"], start.valid)


def test_pools_can_be_looked_at_with_other_weights():
    simulation, *_ = pooled.federation(Others(), rounds=0, more=1)
    outcome, *_ = played(simulation, every=9)
    rows = [k.client for k in simulation.stack.keys]
    truth = {c: simulation.stack.pool.truth[i] for i, c in enumerate(rows)}
    right = [float((truth[c] == 2).mean()) for c in outcome.clients]
    assert outcome.figures["right"].tolist() == pytest.approx(right)
