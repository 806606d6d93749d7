"""Clipping, noise and epsilon: against brute force, hand calculation and other accountants."""

import itertools
import json
import math
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, norm

from federations import pair
from fedsap import show
from fedsap.collect import collect
from fedsap.config import resolve
from fedsap.errors import UserError
from fedsap.federation import dataset
from fedsap.message import PerClass, prefixed, table
from fedsap.methods import FedMPS, FedProto, FedSAP
from fedsap.privacy import Ledger, Privacy, clipped, epsilon, noised, released, secret, sensitivity
from fedsap.report.read import load
from fedsap.report.study import arrange
from fedsap.report.tables import tables
from fedsap.runs import Run, Stopped, metrics
from fedsap.training.feed import Key
from fedsap.training.local import class_means
from test_runs import outcome, same

often = settings(derandomize=True, deadline=None, max_examples=60)
EVAL = FedProto(proto_pass="eval")


@often
@given(st.integers(0, 10_000), st.floats(1e-3, 1e3))
def test_no_vector_is_longer_than_the_clip_and_short_ones_are_as_they_were(seed, length):
    rng = np.random.default_rng(seed)
    v = torch.from_numpy(rng.normal(size=(30, 5)) * 10 ** rng.uniform(-4, 4, (30, 1)))
    made, norms = clipped(v, length), v.norm(dim=-1)
    assert (made.norm(dim=-1) <= length * (1 + 1e-12)).all()
    assert torch.equal(made[norms <= length], v[norms <= length])
    long = norms > length
    torch.testing.assert_close(made[long], v[long] / norms[long, None] * length)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_a_vector_without_a_length_adds_nothing(value):
    assert clipped(torch.tensor([value, 3e38, 1.0]), 1.0).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_each_embedding_is_clipped_before_the_mean(clip):
    simulation, models, mine, *_ = pair(EVAL, "small")
    stack = simulation.stack
    made = class_means(stack, range(4), simulation.state["model"], {"proto": "eval"}, 1, 7, clip)["proto"]
    for row, key in enumerate(stack.keys):
        x, y = mine[key.client]
        with torch.no_grad():
            h = models[key.client].eval()(x)[0]
        for c in y.unique():
            expected = sum(v * min(1.0, clip / float(v.norm())) for v in h[y == c]) / int((y == c).sum())
            torch.testing.assert_close(made.values[row, c], expected)


def change(one, other):
    return math.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(one, other, strict=True)))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kinds", [1, 2])
def test_with_a_fixed_network_no_exchange_of_one_image_moves_the_means_farther(n, kinds):
    """All data sets of n images whose embeddings, of each kind, are among the ends of the axes, and all exchanges."""
    clip = 1.5
    ends = [clip * np.array(e) for e in ((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.6, -0.8))]
    images = list(itertools.product(ends, repeat=kinds))
    largest = 0.0
    for data in itertools.combinations_with_replacement(images, n):
        for other in images:
            before, after = ([np.mean([i[k] for i in d], 0) for k in range(kinds)] for d in (data, (other, *data[1:])))
            largest = max(largest, change(before, after))
    bound = sensitivity(torch.tensor([[n, 7]]), kinds, Privacy(1.0, clip=clip, encoder="fixed"))
    assert bound[0, 0].item() == pytest.approx(largest)


@pytest.mark.parametrize(("classes", "kinds"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_whatever_a_network_makes_of_its_images_the_means_move_no_farther(classes, kinds):
    clip = 0.5
    ends = [clip * np.array(e) for e in ((1.0, 0.0), (-1.0, 0.0), (0.0, -1.0))]
    largest = max(
        change(before, after)
        for before in itertools.product(ends, repeat=classes * kinds)
        for after in itertools.product(ends, repeat=classes * kinds)
    )
    counts = torch.tensor([[20] * classes + [0]])
    bound = sensitivity(counts, kinds, Privacy(1.0, clip=clip))
    assert bound[0, :classes].tolist() == pytest.approx([largest] * classes)
    assert bound[0, classes] == 0


def test_one_image_moves_the_means_of_other_classes_through_the_network():
    """Why a bound for a fixed network is none for one that is trained: not even the other classes stay."""
    sent = []
    for other in (False, True):
        simulation, *_ = pair(EVAL, "small")
        stack = simulation.stack
        (row,) = (r for r, key in enumerate(stack.keys) if key.client == 1)
        if other:
            place = stack.train.lists[row][0]
            stack.train.images[place] = 255 - stack.train.images[place]
            changed = int(stack.train.labels[place])
        found = simulation.train(1, {}, {}, [0, 1, 2, 3]).message["proto"]
        sent.append(found)
    moved = (sent[0].values - sent[1].values).norm(dim=-1)
    others = [c for c in range(4) if c != changed and sent[0].mask[1, c]]
    assert len(others) == 2
    assert (moved[1, others] > 1e-6).all()
    assert moved[[0, 2, 3]].max() == 0


def drawn(privacy, counts, kinds, t=1, d=2000):
    """The noise itself, [Q, C, d] by name, and the means it went onto."""
    mask = counts > 0
    zero = PerClass(torch.zeros(*counts.shape, d, dtype=torch.float64), mask)
    keys = [Key(5, q) for q in range(len(counts))]
    return noised(dict.fromkeys(kinds, zero), counts, privacy, keys, t)


@pytest.mark.parametrize("source", ["seed", "system"])
@pytest.mark.parametrize("encoder", ["trained", "fixed"])
def test_noise_is_normal_and_of_the_stated_deviation(encoder, source):
    privacy = Privacy(0.7, clip=2.0, encoder=encoder, source=source)
    counts = torch.tensor([[5, 0, 20], [3, 3, 3]])
    made = drawn(privacy, counts, ["high", "low"])
    for q, c in itertools.product(range(2), range(3)):
        n = int(counts[q, c])
        classes = int((counts[q] > 0).sum())
        expected = 0.7 * 2 * 2.0 * (math.sqrt(2 * classes) if encoder == "trained" else math.sqrt(2) / max(n, 1))
        for one in made.values():
            noise = one.values[q, c].numpy()
            if n == 0:
                assert not noise.any()
                continue
            assert np.std(noise) == pytest.approx(expected, rel=0.1)
            assert kstest(noise / expected, "norm").pvalue > (1e-3 if source == "seed" else 1e-9)


def test_noise_has_a_name_and_no_two_alike():
    privacy, counts = Privacy(1.0), torch.tensor([[5, 5], [5, 5]])
    a, b, later = (drawn(privacy, counts, ["high", "low"], t, 50) for t in (1, 1, 2))
    assert torch.equal(a["high"].values, b["high"].values)
    some = [one.values[q, c] for m in (a, later) for one in m.values() for q in range(2) for c in range(2)]
    assert len({tuple(v.tolist()) for v in some}) == len(some)


def test_secret_noise_never_comes_again():
    assert not np.array_equal(secret((4, 3)), secret((4, 3)))


@pytest.mark.parametrize("method", [EVAL, FedSAP(), FedMPS(proto_pass="eval"), FedSAP(rule="confidence")])
def test_what_a_client_sends_does_not_depend_on_who_else_is_in_the_stack(method):
    def sent(clients):
        simulation, *_ = pair(method, "small")
        simulation.stack = replace(simulation.stack, privacy=Privacy(0.1))
        return simulation.train(1, {}, {}, clients).message

    together, alone = sent([0, 1, 2, 3]), sent([2])
    for name in together:
        assert torch.equal(table(together, name).mask[2], table(alone, name).mask[0])
        torch.testing.assert_close(table(together, name).values[2], table(alone, name).values[0], rtol=1e-9, atol=1e-9)


def test_what_is_sent_is_the_clipped_means_with_noise_and_no_longer_than_the_clip():
    simulation, *_ = pair(EVAL, "small")
    privacy, rows = Privacy(0.01, clip=0.3), range(4)
    simulation.stack = replace(simulation.stack, privacy=privacy)
    message = simulation.train(1, {}, {}, [0, 1, 2, 3]).message["proto"]
    stack = simulation.stack
    means = class_means(stack, rows, simulation.state["model"], {"proto": "eval"}, 1, 7, 0.3)
    expected = released(means, simulation._counts(rows), privacy, stack.keys, 1)["proto"].values
    order = [[k.client for k in stack.keys].index(c) for c in range(4)]
    torch.testing.assert_close(message.values, expected[order])
    assert not torch.allclose(expected, means["proto"].values)
    assert (message.values.norm(dim=-1) <= 0.3 * (1 + 1e-9)).all()


@dataclass(frozen=True)
class Leaky(FedProto):
    """Says that it sends class means, and sends weights."""

    proto_pass: str = "eval"

    def reply(self, local):
        return super().reply(local) | prefixed("model", local.state["model"])


def test_with_noise_a_method_cannot_send_weights_by_mistake():
    simulation, *_ = pair(Leaky(), "small")
    simulation.stack = replace(simulation.stack, privacy=Privacy(1.0))
    with pytest.raises(KeyError):
        simulation.train(1, {}, {}, [0, 1, 2, 3])


def delta_of(eps, noise, releases):
    """The equation in the docstring, which is that of Balle and Wang."""
    m = math.sqrt(releases) / noise
    return norm.cdf(m / 2 - eps / m) - math.exp(eps) * norm.cdf(-m / 2 - eps / m)


@pytest.mark.parametrize("noise", [0.8, 4.0, 30.0])
@pytest.mark.parametrize("releases", [1, 60])
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_epsilon_is_the_one_that_delta_belongs_to(noise, releases, delta):
    assert delta_of(epsilon(noise, delta, releases), noise, releases) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize(("noise", "releases"), [(4.0, 60), (10.0, 100), (2.0, 1)])
def test_epsilon_is_that_of_an_accountant_of_compositions_and_below_looser_bounds(noise, releases):
    import dp_accounting

    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise), releases)
    found = epsilon(noise, 1e-5, releases)
    exact = dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(1e-5)
    assert found == pytest.approx(exact, rel=1e-3)
    assert found <= dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(1e-5)
    rho = releases / (2 * noise**2)  # zero-concentrated: by hand
    assert found <= rho + 2 * math.sqrt(rho * math.log(1e5))
    assert found > 0.7 * (rho + 2 * math.sqrt(rho * math.log(1e5)))


def test_epsilon_by_hand():
    """z = 4, 60 messages: rho = 60 / 32 = 1.875, at most 1.875 + 2 sqrt(1.875 ln 1e5) = 11.167; exactly 9.608."""
    assert epsilon(4.0, 1e-5, 60) == pytest.approx(9.608352, abs=1e-6)
    assert epsilon(4.0, 1e-5, 0) == 0


def test_who_was_asked_has_sent_one_message_more():
    ledger = Ledger(Privacy(4.0), [0, 0, 1])
    assert ledger.add([0, 2])["releases"] == [1, 0, 2]
    said = ledger.add([2])
    assert said["releases"] == [1, 0, 3]
    assert said["epsilon"] == pytest.approx([epsilon(4.0, 1e-5, n) for n in (1, 0, 3)], abs=1e-6)
    assert list(Ledger(Privacy(4.0, encoder="fixed"), [0]).add([0])) == ["releases", "epsilon_if_fixed"]


SMALL = {
    "partition": {"clients": 4},
    "train": {"rounds": 6, "checkpoint": 0.0, "participation": 0.6, "failures": 0.3, "warm_start": True},
    "eval": {"every": 2},
    "privacy": {"noise": 2.0},
}


@pytest.fixture(scope="module")
def digits():
    return dataset(resolve({})[0])


@pytest.mark.parametrize(("method", "more"), [("fedsap", {}), ("fedmps", {"proto_pass": "eval"})])
def test_stopped_and_resumed_is_never_stopped(tmp_path, digits, method, more):
    (config,) = resolve(SMALL | {"method": more}, [method])
    whole, halted = Run(tmp_path / "whole", config), Run(tmp_path / "halted", config)
    whole.execute(digits)
    seen = []
    with pytest.raises(Stopped, match="after round 3"):
        halted.execute(digits, on_round=seen.append, stop=lambda: len(seen) == 3)
    halted.check(resume=True)
    halted.execute(digits)
    same(outcome(whole.folder), outcome(halted.folder))


def test_a_run_says_what_it_has_spent_wherever_it_is_asked(tmp_path, digits):
    configs = resolve(SMALL, ["fedsap", "local"], [1, 2])
    for config in configs:
        Run(tmp_path / f"{config.method['name']}-{config.seed}", config).execute(digits)
    rows = metrics(tmp_path / "fedsap-1")
    sent = [1] * 4  # the warm start
    for row in rows:
        for client in row["clients"]:
            sent[client] += 1
        assert row["privacy"]["releases"] == sent
        assert row["privacy"]["epsilon"] == pytest.approx([epsilon(2.0, 1e-5, n) for n in sent], abs=1e-6)
    sap, local = collect([tmp_path / f"{c.method['name']}-{c.seed}" for c in configs])
    most = max(max(metrics(tmp_path / f"fedsap-{s}")[-1]["privacy"]["epsilon"]) for s in (1, 2))
    assert sap["privacy"]["epsilon"] == most
    assert f"epsilon {most:.2f}" in show.privacy(sap)
    assert "privacy" not in local
    assert show.privacy(local) is None
    (found,) = (t for t in tables(arrange(load(sorted(tmp_path.iterdir()), print))) if t.name == "privacy")
    (row,) = found.blocks[0].rows
    assert [cell.text for cell in row[2:]] == [
        "2",
        "1",
        str(max(max(r) for r in sent_by(tmp_path))),
        "1e-05",
        f"{most:.2f}",
    ]


def sent_by(folder):
    return [metrics(folder / f"fedsap-{s}")[-1]["privacy"]["releases"] for s in (1, 2)]


def test_a_report_tells_runs_with_noise_from_those_without_by_the_noise(tmp_path, digits):
    for number, noise in enumerate((0.0, 2.0)):
        (config,) = resolve(SMALL | {"privacy": {"noise": noise}}, ["fedsap"])
        Run(tmp_path / str(number), config).execute(digits)
    found = arrange(load(sorted(tmp_path.iterdir()), print))
    assert [v.label for v in found.variants] == ["FedSAP", "FedSAP (noise=2.0)"]
    assert len(found.settings) == 1


def test_a_fixed_networks_bound_is_said_to_be_no_guarantee(tmp_path, digits):
    (config,) = resolve(SMALL | {"privacy": {"noise": 2.0, "encoder": "fixed"}}, ["fedsap"])
    Run(tmp_path / "run", config).execute(digits)
    (entry,) = collect([tmp_path / "run"])
    assert "epsilon" not in entry["privacy"]
    assert "no guarantee" in show.privacy(entry)


def test_without_noise_nothing_of_it_is_in_a_run(tmp_path, digits):
    (config,) = resolve(SMALL | {"privacy": {"noise": 0.0, "clip": 3.0}}, ["fedsap"])
    Run(tmp_path / "run", config).execute(digits)
    assert "privacy" not in json.loads((tmp_path / "run" / "config.json").read_text())
    assert not any("privacy" in row for row in metrics(tmp_path / "run"))


@pytest.mark.parametrize(
    ("method", "user", "words"),
    [
        ("fedavg", {}, "sends more than class means (up: all weights)"),
        ("fednh", {}, "sends more than class means"),
        ("fedpac", {}, "sends more than class means"),
        ("fedproto", {}, "method.fedproto.proto_pass=eval"),
        ("fedmps", {}, "(high running, low running)"),
        ("fedsap", {"method": {"proto_pass": "train"}}, "(proto train)"),
        ("fedsap", {"unlabelled": {"size": 5}}, "unlabelled.size=0"),
    ],
)
def test_what_the_analysis_does_not_cover_is_refused(method, user, words):
    with pytest.raises(UserError) as error:
        resolve(user | {"privacy": {"noise": 1.0}}, [method])
    assert str(error.value).startswith("privacy.noise: got 1.0, but")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["noise", "clip", "delta"])
def test_values_that_make_no_sense_are_refused(key):
    with pytest.raises(UserError, match=rf"privacy\.{key}: got -1"):
        resolve({"privacy": {key: -1.0}})


def test_a_missing_accountant_is_named_before_anything_is_written(tmp_path, digits, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    (config,) = resolve(SMALL, ["fedsap"])
    with pytest.raises(UserError, match=r"pip install 'fedsap\[privacy\]'"):
        Run(tmp_path / "run", config).execute(digits)
    assert not (tmp_path / "run").exists()
