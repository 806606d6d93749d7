"""What is sent and what it costs."""

import numpy as np
import pytest
import torch

from fedsap.message import PerClass, cost, expand, flatten, joined, pack, restore, select, table, tensor


def message():
    mask = torch.tensor([True, False, True, False])
    return {
        "proto": PerClass(torch.arange(8.0).view(4, 2) * mask[:, None], mask),
        "w": torch.ones(3, 2),
        "b": torch.zeros(5),
    }


def test_cost_is_that_of_the_packed_arrays():
    packed = pack(message())
    found = cost(message())
    assert found.bytes == sum(a.nbytes for a in packed.values())
    assert found.numbers == sum(a.size for a in packed.values() if a.dtype.kind == "f") == 4 + 6 + 5


def test_only_rows_under_the_mask_are_packed():
    packed = pack(message())
    assert packed["proto.classes"].tolist() == [0, 2]
    np.testing.assert_array_equal(packed["proto.rows"], [[0, 1], [4, 5]])


def test_flatten_and_restore():
    again = restore(flatten(message()))
    assert again.keys() == message().keys()
    assert torch.equal(table(again, "proto").mask, table(message(), "proto").mask)
    assert torch.equal(tensor(again, "w"), torch.ones(3, 2))


def test_joined_then_selected_is_the_original():
    both = joined([expand(message(), 2), expand(message(), 1)])
    assert tensor(both, "w").shape == (3, 3, 2)
    one = select(both, torch.tensor(2))
    assert torch.equal(table(one, "proto").values, table(message(), "proto").values)
    assert cost(one) == cost(message())


def test_expanding_copies_nothing():
    whole = expand({"w": torch.ones(3, 2)}, 1000)
    assert tensor(whole, "w").untyped_storage().nbytes() == 24


def test_asking_for_the_wrong_kind_is_named():
    with pytest.raises(TypeError, match="'w' is a plain tensor"):
        table(message(), "w")
    with pytest.raises(TypeError, match="'proto' is one row per class"):
        tensor(message(), "proto")
