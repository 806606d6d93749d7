"""The validation split: never trained on, the same in every run, and no test image."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsap.config import resolve
from fedsap.data.validation import held_out
from fedsap.errors import UserError
from fedsap.federation import build_federation, dataset, split


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_a_share_of_every_class_and_never_all_of_one(labels, share):
    labels = np.array(labels)
    aside = held_out(labels, share)
    for c in np.unique(labels):
        own = int((labels == c).sum())
        assert int((aside & (labels == c)).sum()) == (min(max(1, round(share * own)), own - 1) if own > 1 else 0)


def test_clients_train_on_none_of_it_and_are_judged_on_it_alone():
    judged = []
    for seed in (1, 2):
        config = resolve({"eval": {"split": "validation"}, "partition": {"clients": 6}}, (), [seed])[0]
        data = dataset(config)
        aside = held_out(data.train.labels, 0.2)
        part = split(config, data)
        for own, indices in zip(part.classes, part.indices, strict=True):
            assert not aside[indices].any()
            assert set(data.train.labels[indices].tolist()) == set(own)
        clients = build_federation([config], data).clients
        for row, key in enumerate(clients.stack.keys):
            images = clients.test.images[clients.test.lists[row]].numpy()
            expected = data.train.images[aside & np.isin(data.train.labels, part.classes[key.client])]
            assert sorted(map(bytes, images)) == sorted(map(bytes, expected))
        judged.append(aside)
    assert np.array_equal(*judged)


def test_pools_are_of_the_rest_too():
    config = resolve({"eval": {"split": "validation"}, "unlabelled": {"size": 12}, "partition": {"clients": 6}})[0]
    data = dataset(config)
    part = split(config, data)
    aside = held_out(data.train.labels, 0.2)
    for own, indices, pool in zip(part.classes, part.indices, part.pools, strict=True):
        assert len(pool) == 12
        assert not aside[pool].any()
        assert not set(pool) & set(indices)
        assert set(data.train.labels[pool].tolist()) <= set(own)


def test_without_it_the_partition_is_what_it_was():
    plain, changed = (resolve({"eval": {"held_out": share}})[0] for share in (0.2, 0.5))
    data = dataset(plain)
    assert split(plain, data) == split(changed, data)


def test_a_class_that_is_asked_for_more_than_is_left_is_named():
    config = resolve({"eval": {"split": "validation", "held_out": 0.95}})[0]
    with pytest.raises(UserError, match=r"partition\.shots"):
        split(config, dataset(config))


def test_partition_of_the_rest_is_the_rule_on_the_rest():
    config = resolve({"eval": {"split": "validation"}})[0]
    data = dataset(config)
    kept = np.flatnonzero(~held_out(data.train.labels, 0.2))
    rest = dataclasses.replace(
        data, train=dataclasses.replace(data.train, images=data.train.images[kept], labels=data.train.labels[kept])
    )
    alone = split(resolve({})[0], rest)
    assert [kept[own].tolist() for own in alone.indices] == [own.tolist() for own in split(config, data).indices]
