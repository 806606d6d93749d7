"""Evaluation against scikit-learn and by hand; accuracies sample by sample are compared in training/test_stack.py."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import silhouette_samples
from sklearn.neighbors import NearestCentroid

from federations import SEED, pair, weights_of
from fedsap.errors import UserError
from fedsap.evaluate import _chosen, evaluate, silhouette
from fedsap.message import PerClass
from fedsap.methods import FedProto
from fedsap.models import CNN
from fedsap.prototypes import class_sums, combine, means, nearest, scores
from fedsap.training.rounds import Ask, Judge, Presence, play


def test_silhouette_is_scikit_learns():
    g = torch.Generator().manual_seed(0)
    h, y = torch.randn(60, 5, generator=g), torch.randint(3, (60,), generator=g)
    expected = silhouette_samples(h.numpy(), y.numpy(), metric="cosine").mean()
    assert silhouette(h, y) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 2]])
def test_silhouette_of_one_class_or_of_single_samples_is_none(labels):
    assert silhouette(torch.randn(3, 2), torch.tensor(labels)) is None


def test_the_same_sample_of_test_images_every_time_and_no_more_than_asked():
    one, other = _chosen([5, 9, 2], 7, seed=3), _chosen([5, 9, 2], 7, seed=3)
    assert np.array_equal(one, other)
    assert one.sum() == 7
    assert not one[0, 5:].any()
    assert not one[2, 2:].any()
    assert _chosen([5, 9, 2], 100, seed=3).sum() == 16


def test_prototypes_and_their_nearest_are_scikit_learns():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(40, 6)), np.arange(40) % 4
    bank = means(*class_sums(torch.from_numpy(x)[None], torch.from_numpy(y)[None], 4))
    model = NearestCentroid().fit(x, y)
    np.testing.assert_allclose(bank.values[0], model.centroids_)
    new = rng.normal(size=(30, 6))
    guess = scores(torch.from_numpy(new)[None], bank, "l2").argmax(-1)[0]
    np.testing.assert_array_equal(guess, model.predict(new))


def test_a_class_without_prototype_is_never_the_nearest():
    bank = PerClass(torch.zeros(1, 3, 2), torch.tensor([[False, True, False]]))
    for distance in ("l2", "cosine"):
        assert scores(torch.zeros(1, 4, 2), bank, distance).argmax(-1).tolist() == [[1] * 4]


def test_counts_weigh_the_combination():
    """By hand: (1 * 10 + 3 * 2) / 4 = 4 for class 0; class 1 has one holder."""
    local = PerClass(torch.tensor([[[10.0], [7.0]], [[2.0], [0.0]]]), torch.tensor([[True, True], [True, False]]))
    counts = torch.tensor([[1, 5], [3, 0]])
    assert combine(local, counts).values.flatten().tolist() == [4.0, 7.0]


def test_a_client_none_of_whose_classes_has_a_prototype_is_never_right():
    bank = PerClass(torch.ones(1, 2, 3), torch.zeros(1, 2, dtype=torch.bool))
    assert nearest(scores(torch.ones(1, 4, 3), bank, "l2")).tolist() == [[-1] * 4]


def test_batch_statistics_are_those_of_full_batches_in_the_order_of_the_list():
    simulation, models, _, theirs, _ = pair(FedProto(), "resnet18", sizes=(9, 17), rounds=1)
    before = {k: v.clone() for k, v in simulation.state["model"].items()}
    judge = Judge(batch_statistics=8)
    (outcome,) = play(
        FedProto(), simulation.task, simulation, seed=SEED, server=None, done=0, presence=Presence(), judge=judge
    )
    trained = [weights_of(simulation, q) for q in range(2)]
    for q, (model, (x, y)) in enumerate(zip(models, theirs, strict=True)):
        model.load_state_dict(trained[q], strict=False)
        order = torch.arange(len(y))
        filled = torch.cat([order, order[: -len(y) % 8]])
        guesses = torch.cat([copy.deepcopy(model).train()(x[part])[1].argmax(1) for part in filled.split(8)])
        share = float((guesses[: len(y)] == y).double().mean())
        assert float(outcome.scores.accuracy["head"][q]) == pytest.approx(share)
    judged = simulation.state["model"]
    assert any(not torch.equal(before[k], judged[k]) for k in judged)


def test_batch_statistics_leave_the_running_ones_alone():
    simulation, *_ = pair(FedProto(), "resnet18", sizes=(9, 17), rounds=1)
    bank = combine(PerClass(torch.zeros(2, 4, 512).double(), torch.ones(2, 4, dtype=torch.bool)))
    before = {k: v.clone() for k, v in simulation.state["model"].items()}
    simulation.evaluate_all(1, {SEED: Ask({}, {}, [0, 1], bank)}, Judge(batch_statistics=4))
    assert all(torch.equal(before[k], v) for k, v in simulation.state["model"].items())


def test_batch_statistics_are_refused_with_dropout():
    network = CNN(4, (16, 16, 3))
    simulation, *_ = pair(FedProto(), "resnet18", sizes=(9, 17), rounds=1)
    stack = replace(simulation.stack, network=network)
    bank = PerClass(torch.zeros(2, 4, 50), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(UserError, match=r"eval\.batch_statistics"):
        evaluate(stack, simulation.test, {"model": {}}, bank, chunk=4, statistics=4)
