"""Pools: what they hold for any settings, and cases worked out by hand."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsap.data.partition import Partition, partition
from fedsap.data.unlabelled import with_pools
from fedsap.errors import UserError

few = settings(max_examples=40, deadline=None, derandomize=True)


def labels_of(classes: int, each: int) -> np.ndarray:
    return np.arange(classes * each) % classes


@given(ways=st.integers(2, 5), shots=st.integers(1, 20), size=st.integers(1, 60), seed=st.integers(0, 99))
@few
def test_nobody_has_a_sample_with_and_without_label(ways: int, shots: int, size: int, seed: int) -> None:
    labels = labels_of(6, 100)
    split = partition(labels, num_classes=6, clients=5, ways=ways, shots=shots, spread=0, seed=seed)
    made = with_pools(split, labels, size=size)
    for own, mine, pool in zip(made.classes, made.indices, made.pools, strict=True):
        assert len(set(pool.tolist())) == len(pool) == size
        assert not set(pool.tolist()) & set(mine.tolist())
        counts = np.bincount(labels[pool], minlength=6)
        assert counts[list(own)].max() - counts[list(own)].min() <= 1
        assert counts.sum() == counts[list(own)].sum()
    assert [own.tolist() for own in made.indices] == [own.tolist() for own in split.indices]


def test_pools_share_nothing_while_a_class_lasts_and_say_when_they_do() -> None:
    labels = labels_of(3, 40)
    split = partition(labels, num_classes=3, clients=3, ways=2, shots=5, spread=0, seed=3, rule="normal")
    held = split.counts.sum(0)
    wide = with_pools(split, labels, size=10)
    assert wide.pool_overlap == 0
    tight = with_pools(split, labels, size=60)
    asked = np.zeros(3, int)
    for own in split.classes:
        asked[list(own)] += 30
    assert tight.pool_overlap == np.maximum(held + asked - 40, 0).sum() > 0


def test_a_class_too_small_for_labelled_and_pool_is_refused() -> None:
    labels = labels_of(3, 10)
    split = partition(labels, num_classes=3, clients=1, ways=2, shots=5, spread=0, seed=1)
    assert len(with_pools(split, labels, size=10).pools[0]) == 10
    with pytest.raises(UserError, match=r"client 0 is to get 6 samples of class . beside its labelled ones, .* has 5"):
        with_pools(split, labels, size=11)


def test_random_balance_is_unbalanced_and_whole() -> None:
    labels = labels_of(4, 500)
    split = partition(labels, num_classes=4, clients=8, ways=3, shots=5, spread=0, seed=1)
    made = with_pools(split, labels, size=90, balance="random")
    counts = [
        np.bincount(labels[pool], minlength=4)[list(own)] for own, pool in zip(made.classes, made.pools, strict=True)
    ]
    assert {int(c.sum()) for c in counts} == {90}
    assert max(int(c.max() - c.min()) for c in counts) > 30


def test_foreign_samples_are_of_classes_the_client_does_not_hold() -> None:
    labels = labels_of(5, 200)
    split = partition(labels, num_classes=5, clients=4, ways=2, shots=5, spread=0, seed=1)
    made = with_pools(split, labels, size=40, foreign=0.25)
    for own, pool in zip(made.classes, made.pools, strict=True):
        assert int((~np.isin(labels[pool], own)).sum()) == 10


@pytest.mark.parametrize("rule", ["dirichlet", "pathological", "iid"])
def test_rules_that_deal_out_everything_take_labels_away(rule: Any) -> None:
    labels = labels_of(4, 30)
    split = partition(labels, num_classes=4, clients=3, ways=3, rule=rule, alpha=1.0, seed=2)
    made = with_pools(split, labels, size=12)
    for before, mine, pool, own, shots in zip(
        split.indices, made.indices, made.pools, made.classes, made.shots, strict=True
    ):
        assert sorted([*mine.tolist(), *pool.tolist()]) == sorted(before.tolist())
        assert len(pool) == 12
        assert min(shots) >= 1
        assert np.bincount(labels[mine], minlength=4)[list(own)].tolist() == list(shots)
    with pytest.raises(UserError, match=f"rule '{rule}' deals out every sample"):
        with_pools(split, labels, size=60)
    with pytest.raises(UserError, match="leaves no samples of foreign classes"):
        with_pools(split, labels, size=5, foreign=0.5)


def test_a_pool_changes_hash_and_file_and_comes_back(tmp_path: Any) -> None:
    labels = labels_of(4, 50)
    split = partition(labels, num_classes=4, clients=3, ways=2, shots=5, spread=0, seed=1)
    made, other = with_pools(split, labels, size=8), with_pools(split, labels, size=8, seed=2)
    assert len({split.hash, made.hash, other.hash}) == 3
    made.save(tmp_path / "p.json")
    again = Partition.load(tmp_path / "p.json")
    assert again == made
    assert [p.tolist() for p in again.pools] == [p.tolist() for p in made.pools]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 0}, "takes size >= 1"),
        ({"size": 5, "foreign": 1.0}, "a share below 1"),
        ({"size": 5, "balance": "odd"}, "unlabelled.balance: got 'odd'; takes even, random"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], said: str) -> None:
    labels = labels_of(4, 50)
    split = partition(labels, num_classes=4, clients=3, ways=2, shots=5, spread=0, seed=1)
    with pytest.raises(UserError, match=said):
        with_pools(split, labels, **options)
