"""The second phase: the stack does what one client and one sample at a time do, in words of the paper's equations."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import oracle
from federations import SEED, pair, weights_of
from fedsap.data.strong import Strong
from fedsap.message import table
from fedsap.methods import FedProto, FedSAP
from fedsap.models import from_module
from fedsap.training.feed import Pool
from fedsap.training.rounds import Judge, Presence, play
from fedsap.training.streams import numbers

SUPERVISED, MORE = 2, 3
SIZES, POOLS = (19, 40, 33, 5), (13, 6, 30, 11)
BASE = FedSAP(
    align_start=0, align_end=2, align_top=0.9, proxy_scale=8.0, consistency=0.7, mix=0.4, margin_quantile=0.3,
    distance_quantile=0.8,
)  # fmt: skip


def pools(order, classes, look, rounds, *, foreign=False, channels=1, side=8, sizes=POOLS):
    """Ragged pools of random images, and labels that belong to the client's own classes unless `foreign`."""
    rng = np.random.default_rng(11)
    total = sum(sizes)
    images = rng.integers(0, 256, (total, side, side, channels), dtype=np.uint8)
    ends = np.cumsum((0, *sizes))
    lists = [np.arange(ends[c], ends[c + 1]) for c in range(len(sizes))]
    truth = [rng.integers(0, classes if foreign else classes - 1, n) for n in sizes]
    truth = [t if foreign else (t + c) % classes for c, t in enumerate(truth)]
    weak = replace(look, augment="crop-flip")
    strong = replace(weak, strong=Strong("colour", fill=(100,) * channels))
    some = (tuple(v[c] for c in order) for v in (lists, truth))
    return Pool(torch.from_numpy(images), *some, weak, strong, 5, rounds)


class Second(oracle.Federation):
    """The oracle with unlabelled samples: `pool` as above, of clients in their order, `method` the options."""

    def __init__(self, method, pool, owned, *args, **options):
        super().__init__("fedsap", *args, **options)
        self.m, self.pool, self.owned = method, pool, owned
        self.limits, self.kept, self.said = {}, {}, {}

    def embed(self, q, x, train=False):
        return self.models[q].train(train)(x)

    def picture(self, q, places, look, draws):
        raw = self.pool.images[self.pool.lists[q][places]]
        return look(raw, {k: torch.from_numpy(v) for k, v in draws.items()}).permute(0, 3, 1, 2)

    def guess(self, q, h, logits):
        """Pseudo-label, distance to it, and margin of one embedding."""
        bank = self.banks["proto"]
        among = [c for c in bank if self.m.pseudo_classes == "bank" or c in self.owned[q]]
        near = sorted((1 - float(torch.dot(oracle.unit(h), oracle.unit(bank[c]))), c) for c in among)
        first, second = near[0], near[1] if len(near) > 1 else (2.0, None)
        label, confidence = first[1], None
        if self.m.accept == "confidence":
            own = self.owned[q] if self.m.pseudo_classes == "own" else range(len(logits))
            p = torch.softmax(torch.stack([logits[c] for c in own]), 0)
            confidence, label = float(p.max()), list(own)[int(p.argmax())]
        return label, first[0], second[0] - first[0], confidence

    def believes(self, q, guess):
        _, near, margin, confidence = guess
        least, most = self.limits.get(q, (None, None))
        return {
            "margin": lambda: margin > least and near < most,
            "fixed": lambda: margin > self.m.least_margin,
            "confidence": lambda: confidence >= self.m.confidence,
            "all": lambda: True,
        }[self.m.accept]()

    def calibrate(self, q):
        margins, distances, bank = [], [], self.banks["proto"]
        h, logits, _ = self.embed(q, self.images[q])
        for v, z, y in zip(h, logits, self.labels[q].tolist(), strict=True):
            label, _, margin, _ = self.guess(q, v, z)
            margins += [margin] if label == y else []
            distances.append(1 - float(torch.dot(oracle.unit(v), oracle.unit(bank[y]))))
        least = max(0.0, np.quantile(margins, self.m.margin_quantile)) if margins else math.inf
        return least, np.quantile(distances, self.m.distance_quantile)

    def survey(self, q, t):
        """Pseudo-label and whether it counts, for each sample of the pool."""
        if self.m.accept == "margin" and (q not in self.limits or self.m.calibrate == "round"):
            self.limits[q] = self.calibrate(q)
        n, size = len(self.pool.lists[q]), self.pool.images.shape[1:3]
        x = self.picture(q, np.arange(n), self.pool.weak, self.pool.weak.draw(numbers(SEED, "survey", q, t), n, size))
        h, logits, _ = self.embed(q, x)
        guesses = [self.guess(q, *pair) for pair in zip(h, logits, strict=True)]
        found = [(g[0], self.believes(q, g)) for g in guesses]
        if self.m.refresh == "once":
            found = self.kept.setdefault(q, found)
        return found

    def client(self, q, t):
        if t not in self.pool.rounds:
            return super().client(q, t)
        with torch.no_grad():
            found = self.survey(q, t)
        self.said[q] = found
        fed = [i for i, (_, ok) in enumerate(found) if ok or self.m.refresh == "batch"]
        model, x, y = self.models[q].train(), self.images[q], self.labels[q]
        optimiser = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)
        history, size, width = [], self.pool.images.shape[1:3], self.pool.batch
        for e in range(self.epochs):
            order = numbers(SEED, "batches", q, t * 1000 + e).permutation(len(y))
            full = len(y) // self.batch
            stop = full * self.batch if full else len(y)
            steps = max(1, full)
            rng = numbers(SEED, "pool", q, t * 1000 + e)
            turns = []
            while fed and len(turns) < steps * width:
                turns += [fed[i] for i in rng.permutation(len(fed))]
            weak, strong = (look.draw(rng, steps * width, size) for look in (self.pool.weak, self.pool.strong))
            for s, start in enumerate(range(0, stop, self.batch)):
                b = torch.from_numpy(order[start : min(start + self.batch, stop)])
                h, logits, low = model(x[b])
                terms = self.loss(t, h, logits, low, y[b])
                here = slice(s * width, (s + 1) * width)
                places = np.array((turns or [0] * (steps * width))[here])

                def view(look, draws, here=here, places=places):
                    return self.picture(q, places, look, {k: v[here] for k, v in draws.items()})

                counted = [found[i] for i in places] if fed else [(None, False)] * width
                if self.m.refresh == "batch" and fed:
                    with torch.no_grad():
                        some = model.eval()(view(self.pool.weak, weak))[:2]
                    model.train()
                    guesses = [self.guess(q, *one) for one in zip(*some, strict=True)]
                    counted = [(g[0], self.believes(q, g)) for g in guesses]
                again = model(view(self.pool.strong, strong))[0]
                bank = self.banks["proto"]
                apart = [
                    1 - torch.dot(oracle.unit(v), oracle.unit(bank[c]))
                    for v, (c, ok) in zip(again, counted, strict=True)
                    if ok and c in bank
                ]
                terms["consistency"] = self.m.consistency * (sum(apart) / len(apart) if apart else again.sum() * 0)
                optimiser.zero_grad()
                sum(terms.values()).backward()
                optimiser.step()
                history.append({k: float(v.detach()) for k, v in terms.items()})
        self.losses.append({k: float(np.mean([s[k] for s in history])) for k in history[0]})
        return []

    @torch.no_grad()
    def round(self, t):
        super().round(t)
        if t not in self.pool.rounds:
            return
        local = []
        for q, (x, y) in enumerate(zip(self.images, self.labels, strict=True)):
            accepted = [i for i, (_, ok) in enumerate(self.said[q]) if ok]
            sums, counts = {}, {}
            vectors = [(v, int(c), 1.0) for v, c in zip(self.embed(q, x)[0], y, strict=True)]
            if accepted:
                draws = self.pool.strong.draw(numbers(SEED, "mix", q, t), len(accepted), self.pool.images.shape[1:3])
                again = self.embed(q, self.picture(q, np.array(accepted), self.pool.strong, draws))[0]
                vectors += [(v, self.said[q][i][0], self.m.mix) for v, i in zip(again, accepted, strict=True)]
            for v, c, weight in vectors if self.m.mix else vectors[: len(y)]:
                sums[c], counts[c] = sums.get(c, 0) + weight * v, counts.get(c, 0) + weight
            means = {c: sums[c] / counts[c] for c in sums}
            local.append({c: oracle.unit(v) if self.m.unit and self.m.mix else v for c, v in means.items()})
        self.banks = {"proto": oracle.combine(local)}


def both(method, network="small", dtype=torch.float64, sizes=SIZES, **more):
    """Yields (outcome, oracle, simulation) after each round."""
    side, channels = (8, 1) if network == "small" else (16, 3)

    def make(order, classes, look, rounds):
        return pools(
            order,
            classes,
            look,
            rounds,
            channels=channels,
            side=side,
            foreign=method.pseudo_classes == "bank",
            sizes=POOLS[: len(sizes)],
        )

    simulation, models, mine, _, owned = pair(
        method, network, dtype=dtype, rounds=SUPERVISED, more=MORE, sizes=sizes, pool=make, **more
    )
    plain = make(range(len(sizes)), 4, simulation.stack.look, simulation.stack.pool.rounds)
    options = {"align": lambda t: 0.9 * min(t / 2, 1), "proxy": 1.0, "scale": 8.0}
    hyper = {"batch": 8, "lr": simulation.stack.hyper.lr, "momentum": 0.5, "epochs": simulation.stack.hyper.epochs}
    slow = Second(method, plain, owned, models, *([v[i] for v in mine] for i in (0, 1)), seed=SEED, **hyper, **options)
    for outcome in play(
        method, simulation.task, simulation, seed=SEED, server=None, done=0, presence=Presence(), judge=Judge(every=9)
    ):
        slow.round(outcome.t)
        yield outcome, slow, simulation


def compare(outcome, slow, simulation, tolerance):
    for row, client in enumerate(outcome.clients):
        for term, value in slow.losses[client].items():
            assert float(outcome.terms[term][row]) == pytest.approx(value, rel=100 * tolerance, abs=100 * tolerance)
        state = slow.models[client].state_dict()
        for k, v in weights_of(simulation, client).items():
            if v.is_floating_point():
                assert (v - state[k]).norm() <= tolerance * (1 + state[k].norm()), (outcome.t, client, k)
    bank = table(outcome.server, "bank")
    assert bank.mask.nonzero().flatten().tolist() == sorted(slow.banks["proto"])
    for c, p in slow.banks["proto"].items():
        assert (bank.values[c] - p).norm() <= tolerance * (1 + p.norm()), (outcome.t, c)
    if outcome.t <= SUPERVISED:
        assert outcome.figures == {}
        return
    for row, client in enumerate(outcome.clients):
        said, truth = slow.said[client], slow.pool.truth[client]
        accepted = [c == y for (c, ok), y in zip(said, truth.tolist(), strict=True) if ok]
        assert float(outcome.figures["accepted"][row]) == pytest.approx(len(accepted) / len(said))
        right = float(outcome.figures["right"][row])
        assert right == pytest.approx(np.mean(accepted)) if accepted else math.isnan(right)
        if slow.m.accept == "margin":
            assert float(outcome.figures["margin"][row]) == pytest.approx(slow.limits[client][0], rel=1e-5)
            assert float(outcome.figures["distance"][row]) == pytest.approx(slow.limits[client][1], rel=1e-5)


VARIANTS = {
    "as printed": BASE,
    "without norm": replace(BASE, unit=False),
    "labels alone": replace(BASE, mix=0.0),
    "any class": replace(BASE, pseudo_classes="bank"),
    "every batch": replace(BASE, refresh="batch"),
    "once": replace(BASE, refresh="once"),
    "calibrated every round": replace(BASE, calibrate="round"),
    "fixed": replace(BASE, accept="fixed", least_margin=0.02),
    "confidence": replace(BASE, accept="confidence", confidence=0.36),
    "confidence, every batch": replace(BASE, accept="confidence", confidence=0.36, refresh="batch"),
    "all": replace(BASE, accept="all"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_stack_is_one_client_at_a_time(name):
    seen = []
    for outcome, slow, simulation in both(VARIANTS[name]):
        compare(outcome, slow, simulation, 1e-9)
        seen += outcome.figures.get("accepted", torch.zeros(0)).tolist()
    assert sum(seen) > 0
    assert sum(seen) < len(seen) or name == "all"


def test_batch_statistics_of_both_views():
    for outcome, slow, simulation in both(BASE, "resnet18", sizes=(9, 17), lr=0.002):
        compare(outcome, slow, simulation, 1e-9)


def test_several_epochs_in_float32():
    for outcome, slow, simulation in both(BASE, dtype=torch.float32, epochs=2):
        compare(outcome, slow, simulation, 1e-4)


def played(method=BASE, scramble=False, name="small", **more):
    """All outcomes and the simulation, without the oracle."""

    def make(order, classes, look, rounds):
        side, channels = (8, 1) if name == "small" else (16, 3)
        made = pools(order, classes, look, rounds, side=side, channels=channels)
        return replace(made, truth=tuple((t + 1) % classes for t in made.truth)) if scramble else made

    simulation, *_ = pair(method, name, rounds=SUPERVISED, more=MORE, sizes=SIZES, pool=make, **more)
    outcomes = play(
        method, simulation.task, simulation, seed=SEED, server=None, done=0, presence=Presence(), judge=Judge(every=1)
    )
    return list(outcomes), simulation


def same(one, other):
    """Everything but what is reported of true labels."""
    for a, b in zip(one[0], other[0], strict=True):
        assert all(torch.equal(a.terms[k], b.terms[k]) for k in a.terms)
        assert torch.equal(table(a.server, "bank").values, table(b.server, "bank").values)
        assert all(torch.equal(v, b.scores.accuracy[k]) for k, v in a.scores.accuracy.items())
        assert a.scores.silhouette == b.scores.silhouette
        for name in ("accepted", "margin", "distance"):
            if name in a.figures:
                assert torch.equal(a.figures[name], b.figures[name])
    for name, weights in one[1].state.items():
        assert all(torch.equal(v, other[1].state[name][k]) for k, v in weights.items())


@pytest.mark.parametrize("refresh", ["round", "batch", "once"])
def test_labels_of_the_pool_change_nothing_but_the_accuracy_of_pseudo_labels(refresh):
    method = replace(BASE, refresh=refresh)
    one, other = played(method), played(method, scramble=True)
    same(one, other)
    assert not torch.equal(one[0][-1].figures["right_all"], other[0][-1].figures["right_all"])


class Dropping(oracle.Small):
    """The small network with dropout: noise of its own for each view."""

    def __init__(self):
        super().__init__(4)
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, x):
        h, _, low = super().forward(x)
        h = self.drop(h)
        return h, self.fc2(h), low


def test_clients_train_in_groups_as_they_do_at_once():
    one, other = (played(network=from_module(Dropping, (8, 8, 1)), together=n) for n in (0, 1))
    same(one, other)
    assert (one[0][-1].terms["consistency"] > 0).any()


def test_a_method_that_has_no_use_for_a_pool_trains_on():
    outcomes, _ = played(FedProto())
    assert len(outcomes) == SUPERVISED + MORE
    assert all(outcome.figures == {} for outcome in outcomes)
