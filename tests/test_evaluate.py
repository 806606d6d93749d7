"""Evaluation against scikit-learn and by hand; accuracies sample by sample are compared in training/test_stack.py."""

import numpy as np
import pytest
import torch
from sklearn.metrics import silhouette_samples
from sklearn.neighbors import NearestCentroid

from fedsap.evaluate import _chosen, silhouette
from fedsap.message import PerClass
from fedsap.prototypes import class_sums, combine, means, nearest, scores


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
