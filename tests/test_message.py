"""What is sent and what it costs."""

import pytest
import torch

from fedsap.message import PerClass, cost, expand, flatten, joined, pack, restore, select, table, tensor, unpack


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
    assert found.numbers == sum(a.numel() for a in packed.values() if a.is_floating_point()) == 4 + 6 + 5


def test_only_rows_under_the_mask_are_packed():
    packed = pack(message())
    assert packed["proto@classes"].tolist() == [0, 2]
    assert packed["proto@rows"].tolist() == [[0, 1], [4, 5]]


@pytest.mark.parametrize("mask", [[True, False, True, False], [False] * 4, [True] * 4])
def test_unpacked_is_what_was_packed(mask):
    sent = message() | {"samples": torch.tensor(7.0, dtype=torch.float64)}
    seen = torch.tensor(mask)
    sent["proto"] = PerClass(torch.arange(8.0).view(4, 2) * seen[:, None], seen)
    again = unpack(pack(sent), classes=4)
    assert again.keys() == sent.keys()
    assert torch.equal(table(again, "proto").values, table(sent, "proto").values)
    assert torch.equal(table(again, "proto").mask, seen)
    for name in ("w", "b", "samples"):
        assert torch.equal(tensor(again, name), tensor(sent, name))
        assert tensor(again, name).dtype == tensor(sent, name).dtype


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        (None, "no list of class numbers"),
        (torch.tensor([0.0, 1.0]), "no list of class numbers"),
        (torch.tensor([0]), "2 rows for the classes"),
        (torch.tensor([1, 0]), "2 rows for the classes"),
        (torch.tensor([1, 1]), "2 rows for the classes"),
        (torch.tensor([-1, 1]), "2 rows for the classes"),
        (torch.tensor([1, 4]), "a row for class 4, and there are 4 classes"),
    ],
)
def test_what_cannot_have_been_packed_is_refused(numbers, says):
    packed = {"proto@rows": torch.ones(2, 3)} | ({} if numbers is None else {"proto@classes": numbers})
    with pytest.raises(ValueError, match=says):
        unpack(packed, classes=4)


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
