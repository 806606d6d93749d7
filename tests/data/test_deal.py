"""The draws one by one, on cases worked out by hand."""

import numpy as np
import pytest

from fedsap.data import deal
from fedsap.errors import UserError


@pytest.mark.parametrize(
    ("num_classes", "ways", "spread", "totals", "held"),
    [
        (62, 3, 1, (59, 64, 57), (37, 40, 37)),
        (62, 4, 1, (79, 84, 77), (43, 43, 44)),
        (62, 5, 2, (98, 97, 109), (45, 46, 50)),
        (10, 3, 1, (59, 64, 57), (10, 10, 10)),
        (10, 4, 1, (79, 84, 77), (10, 10, 10)),
        (10, 5, 2, (98, 97, 109), (10, 10, 10)),
        (100, 10, 4, (204, 201, 206), (88, 86, 88)),
        (100, 20, 6, (435, 380, 418), (100, 99, 99)),
        (100, 30, 8, (643, 616, 598), (100, 100, 100)),
    ],
)
def test_fedproto_rule_gives_the_known_totals_of_the_papers_settings(
    num_classes: int, ways: int, spread: int, totals: tuple[int, ...], held: tuple[int, ...]
) -> None:
    for seed, total, covered in zip((1234, 1235, 1236), totals, held, strict=True):
        n, _ = deal.fedproto_counts(20, num_classes, ways, 100, spread, seed)
        lists = deal.class_lists(n, num_classes, seed)
        assert n.sum() == total
        assert len({c for own in lists for c in own}) == covered


def test_fedproto_rule_with_one_way_gives_everybody_two_classes() -> None:
    n, _ = deal.fedproto_counts(20, 10, ways=1, shots=100, spread=1, seed=1234)
    assert n.tolist() == [2] * 20


def test_cursor_goes_on_from_client_to_client_and_wraps() -> None:
    pools = [np.array([10, 11, 12, 13, 14]), np.array([20, 21, 22, 23])]
    held = deal.by_cursor(pools, [[0, 1], [0], [0, 1]], np.array([2, 4, 3]))
    assert [{c: part.tolist() for c, part in own.items()} for own in held] == [
        {0: [10, 11], 1: [20, 21]},
        {0: [12, 13, 14, 10]},
        {0: [11, 12, 13], 1: [22, 23, 20]},
    ]


def test_shuffle_is_the_same_on_every_machine() -> None:
    pools = deal.class_pools(np.arange(16) % 2, 2, seed=1234)
    assert [pool.tolist() for pool in pools] == [[8, 10, 6, 2, 4, 0, 12, 14], [11, 15, 3, 7, 9, 5, 1, 13]]


def test_normal_rule_has_the_texts_mean_and_deviation() -> None:
    n, k = deal.normal_counts(clients=4000, num_classes=100, ways=30, shots=50, spread=8, seed=1234)
    assert n.mean() == pytest.approx(30, abs=0.5)
    assert n.std() == pytest.approx(8, abs=0.3)
    assert k.mean() == pytest.approx(50, abs=0.5)
    assert k.std() == pytest.approx(8, abs=0.3)


def test_normal_rule_stays_inside_its_bounds() -> None:
    n, k = deal.normal_counts(clients=500, num_classes=5, ways=3, shots=2, spread=9, seed=1)
    assert (n.min(), n.max(), k.min()) == (2, 5, 1)


def test_minimum_is_reached_by_moving_samples_from_the_largest() -> None:
    holdings = [{0: np.arange(8), 1: np.arange(20, 26)}, {}, {1: np.arange(30, 32)}]
    deal._top_up(holdings, least=4)
    assert [{c: part.tolist() for c, part in own.items()} for own in holdings] == [
        {0: [0, 1, 2, 3], 1: [20, 21, 22, 23]},
        {0: [4, 5, 6, 7]},
        {1: [30, 31, 24, 25]},
    ]


def test_samples_moved_add_to_a_class_that_is_held() -> None:
    holdings = [{0: np.arange(8)}, {0: np.arange(10, 12)}]
    deal._top_up(holdings, least=5)
    assert [own[0].tolist() for own in holdings] == [[0, 1, 2, 3, 4], [10, 11, 5, 6, 7]]


def test_a_client_that_gives_keeps_the_minimum() -> None:
    holdings = [{0: np.arange(4)}, {0: np.arange(10, 14)}, {0: np.arange(20, 21)}]
    deal._top_up(holdings, least=3)
    assert [own[0].tolist() for own in holdings] == [[0, 1, 2], [10, 11, 12], [20, 3, 13]]


def test_a_class_may_be_used_to_its_last_sample_and_no_further() -> None:
    pools = [np.arange(5)]
    assert deal.by_cursor(pools, [[0]], np.array([5]))[0][0].tolist() == [0, 1, 2, 3, 4]
    assert deal.by_stride(pools, [[0], [0]], np.array([1, 3]), stride=2)[1][0].tolist() == [2, 3, 4]
    with pytest.raises(UserError, match="client 0 is to get 6 samples of class 0, which holds 5"):
        deal.by_cursor(pools, [[0]], np.array([6]))
    with pytest.raises(UserError, match="client 1 starts at sample 2 and asks for 4 of class 0, which holds 5"):
        deal.by_stride(pools, [[0], [0]], np.array([1, 4]), stride=2)
