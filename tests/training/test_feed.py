"""The order in which samples are visited."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsap.data import Split
from fedsap.training.feed import Images, Key, Look, epoch

LOOK = Look((0.5,), (0.5,), "none", 0)


def blocks(sizes, batch, drop_last, t=1, keys=None, noise=None, rows=None):
    total = sum(sizes)
    split = Split(np.zeros((total, 2, 2, 1), np.uint8), np.zeros(total, np.int64))
    ends = np.cumsum([0, *sizes])
    lists = [np.arange(ends[i], ends[i + 1]) for i in range(len(sizes))]
    data = Images.of(split, lists, torch.device("cpu"))
    rows = list(range(len(sizes))) if rows is None else rows
    keys = keys or [Key(1, i) for i in range(len(sizes))]
    return epoch(data, rows, keys, t, 0, batch=batch, drop_last=drop_last, look=LOOK, noise=noise or {}), lists, rows


def visited(found, rows):
    """Each row's batches, in order."""
    seen = {r: [] for r in rows}
    for block in found:
        positions = np.arange(len(rows))[block.rows] if isinstance(block.rows, slice) else block.rows.numpy()
        for i, position in enumerate(positions):
            seen[rows[position]] += [block.samples[i, s].tolist() for s in range(block.steps)]
    return seen


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 9))
def test_every_sample_once_and_only_the_last_batch_short(sizes, batch):
    found, lists, rows = blocks(sizes, batch, drop_last=False)
    for r, batches in visited(found, rows).items():
        assert sorted(sample for b in batches for sample in b) == lists[r].tolist()
        assert all(len(b) == batch for b in batches[:-1])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 9))
def test_dropping_the_short_batch(sizes, batch):
    found, lists, rows = blocks(sizes, batch, drop_last=True)
    for r, batches in visited(found, rows).items():
        n = len(lists[r])
        assert [len(b) for b in batches] == ([batch] * (n // batch) or [n])  # one short batch is better than none


def test_a_clients_order_depends_on_its_key_and_the_round_alone():
    alone, _, _ = blocks([20], 5, False, keys=[Key(1, 3)])
    among, _, _ = blocks([20, 31, 8], 5, False, keys=[Key(1, 3), Key(1, 4), Key(1, 5)])
    later, _, _ = blocks([20], 5, False, t=2, keys=[Key(1, 3)])
    assert visited(alone, [0])[0] == visited(among, [0, 1, 2])[0]
    assert visited(alone, [0])[0] != visited(later, [0])[0]


def test_rows_sorted_by_length_stay_slices():
    found, _, _ = blocks([40, 24, 8], 8, True)
    assert [block.rows for block in found] == [slice(0, 3), slice(0, 2), slice(0, 1)]


def test_noise_comes_with_its_sample():
    found, _, _ = blocks([10, 6], 4, False, noise={"drop": (3,)})
    for block in found:
        assert block.noise["drop"].shape == (*block.samples.shape, 3)
        assert 0 <= float(block.noise["drop"].min()) <= float(block.noise["drop"].max()) < 1
