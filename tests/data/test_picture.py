"""Rows for a table and the map of clients and classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsap.data.partition import Partition, partition
from fedsap.data.picture import picture, table
from fedsap.errors import UserError


def labels_of(num_classes: int, each: int) -> np.ndarray:
    return np.arange(num_classes * each) % num_classes


def test_table_shows_ranges_and_whole_label_sets() -> None:
    split = Partition(
        rule="dirichlet",
        seed=0,
        num_classes=3,
        classes=((0, 1, 2), (1,)),
        shots=((4, 1, 2), (5,)),
        indices=(np.arange(7), np.arange(7, 12)),
    )
    assert table(split, ["cat", "dog", "owl"]) == [
        ("client", "ways", "shots", "samples", "classes"),
        ("0", "3", "1-4", "7", "all"),
        ("1", "1", "5", "5", "dog"),
    ]


@pytest.mark.parametrize("rule", ["fedproto", "dirichlet"])
def test_picture_is_written(rule: Any, tmp_path: Path) -> None:
    split = partition(labels_of(10, 300), num_classes=10, rule=rule)
    picture(split, [f"class {c}" for c in range(10)], tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_picture_of_one_client_is_written(tmp_path: Path) -> None:
    split = partition(labels_of(3, 9), num_classes=3, rule="iid", clients=1)
    picture(split, ["a", "b", "c"], tmp_path / "map.svg")
    assert "<svg" in (tmp_path / "map.svg").read_text()


def test_picture_names_a_format_it_does_not_write(tmp_path: Path) -> None:
    split = partition(labels_of(3, 9), num_classes=3, rule="iid", clients=1)
    with pytest.raises(UserError, match=r"picture: got map\.gif; takes a file name that ends in \.png"):
        picture(split, ["a", "b", "c"], tmp_path / "map.gif")


def test_names_must_be_one_per_class() -> None:
    split = partition(labels_of(3, 9), num_classes=3, rule="iid", clients=1)
    with pytest.raises(UserError, match="names: got 2 class names; takes 3"):
        table(split, ["a", "b"])
