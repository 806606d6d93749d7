"""Partitions: the reference's, what holds for any settings, hash and file, and every mistake's message."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsap.data.partition import Partition, partition
from fedsap.errors import UserError

REFERENCE = json.loads((Path(__file__).parent / "reference_partitions.json").read_text())
PER_CLASS = {62: 1919, 10: 5000, 100: 500}
few = settings(max_examples=40, deadline=None, derandomize=True)


def labels_of(num_classes: int, each: int) -> np.ndarray:
    return np.arange(num_classes * each) % num_classes


def parts(split: Partition) -> list[tuple[int, int, np.ndarray]]:
    """(client, class, indices) one by one, from the layout that the docstring promises."""
    found = []
    for client, (own, shots, indices) in enumerate(zip(split.classes, split.shots, split.indices, strict=True)):
        assert sum(shots) == len(indices)
        start = 0
        for c, count in zip(own, shots, strict=True):
            found.append((client, c, indices[start : start + count]))
            start += count
    return found


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: case["name"])
def test_fedproto_rule_gives_the_reference_partition(case: dict[str, Any]) -> None:
    classes = case["settings"]["num_classes"]
    split = partition(labels_of(classes, PER_CLASS[classes]), rule="fedproto", **case["settings"])
    assert [len(own) for own in split.classes] == case["n"]
    assert [set(shots) for shots in split.shots] == [{k} for k in case["k"]]
    assert [list(own) for own in split.classes] == case["classes"]


def test_a_large_setting_of_the_paper_wraps_and_says_so() -> None:
    split = partition(labels_of(100, 500), num_classes=100, ways=30, shots=50, spread=8, seed=1236)
    needed = split.counts.sum(axis=0)
    assert split.overlap == np.maximum(needed - 500, 0).sum() > 0


def test_global_random_state_is_neither_read_nor_moved() -> None:
    labels = labels_of(10, 300)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    before = random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    first = partition(labels, num_classes=10)
    after = random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    random.seed(8)
    np.random.seed(8)  # noqa: NPY002
    assert before == after
    assert partition(labels, num_classes=10) == first


def test_overlap_counts_assignments_beyond_the_first_use() -> None:
    split = Partition(
        rule="fedproto",
        seed=0,
        num_classes=3,
        classes=((0, 1), (0,), (0, 1)),
        shots=((2, 2), (3,), (2, 1)),
        indices=(np.array([1, 2, 8, 9]), np.array([2, 3, 1]), np.array([1, 4, 7])),
    )
    assert split.overlaps_by_class == {0: 3}  # 7 assignments of 1, 2, 3, 4; class 1 shares nothing
    assert split.overlap == 3
    assert split.counts.tolist() == [[2, 2, 0], [3, 0, 0], [2, 1, 0]]


def test_stride_takes_the_references_slices_in_file_order() -> None:
    split = partition(labels_of(100, 500), num_classes=100, shots=50, vary_shots=False, slices="stride", stride=5)
    for client, c, part in parts(split):
        assert part.tolist() == [c + 100 * place for place in range(5 * client, 5 * client + 50)]
    assert split.overlap > 0


def test_stride_as_long_as_the_shots_is_disjoint() -> None:
    split = partition(labels_of(10, 2200), num_classes=10, slices="stride", stride=110)
    assert split.overlap == 0


def test_without_shuffle_a_class_is_used_in_file_order() -> None:
    split = partition(labels_of(10, 300), num_classes=10, shots=20, clients=1, shuffle=False)
    for _, c, part in parts(split):
        assert part.tolist() == [c + 10 * place for place in range(len(part))]


def test_shuffle_changes_the_samples_and_not_the_classes() -> None:
    labels = labels_of(10, 300)
    mixed, plain = (partition(labels, num_classes=10, shuffle=shuffle) for shuffle in (True, False))
    assert (mixed.classes, mixed.shots) == (plain.classes, plain.shots)
    assert mixed.hash != plain.hash


@st.composite
def way_shot(draw_from: st.DrawFn) -> dict[str, Any]:
    num_classes = draw_from(st.integers(3, 12))
    return {
        "num_classes": num_classes,
        "clients": draw_from(st.integers(1, 12)),
        "ways": draw_from(st.integers(2, num_classes - 1)),
        "shots": draw_from(st.integers(1, 12)),
        "spread": draw_from(st.integers(0, 4)),
        "seed": draw_from(st.integers(0, 2**32 - 1)),
        "vary_shots": draw_from(st.booleans()),
    }


@few
@given(chosen=way_shot(), rule=st.sampled_from(["fedproto", "normal"]), each=st.integers(40, 60))
def test_way_shot_rules_hold_for_any_settings(chosen: dict[str, Any], rule: Any, each: int) -> None:
    labels = labels_of(chosen["num_classes"], each)
    split = partition(labels, rule=rule, **chosen)
    assert split.clients == chosen["clients"]
    for own, shots in zip(split.classes, split.shots, strict=True):
        assert 2 <= len(own) <= chosen["num_classes"]
        assert list(own) == sorted(set(own))
        assert len(set(shots)) == 1
        assert shots[0] >= 1
        if rule == "fedproto":
            assert abs(len(own) - chosen["ways"]) <= chosen["spread"]
            assert len(own) < chosen["num_classes"]
            assert shots[0] <= chosen["shots"] + chosen["spread"]
            assert shots[0] > chosen["shots"] - chosen["spread"] or chosen["spread"] == 0
        if not chosen["vary_shots"]:
            assert shots[0] == chosen["shots"]
    for _, c, part in parts(split):
        assert (labels[part] == c).all()
        assert len(set(part.tolist())) == len(part)


@few
@given(chosen=way_shot(), each=st.integers(16, 40))
def test_clients_share_samples_only_of_used_up_classes(chosen: dict[str, Any], each: int) -> None:
    split = partition(labels_of(chosen["num_classes"], each), **chosen)
    wanted = split.counts.sum(axis=0)
    assert split.overlaps_by_class == {c: int(wanted[c] - each) for c in np.flatnonzero(wanted > each)}
    used = np.concatenate(split.indices)
    assert split.overlap == len(used) - len(set(used.tolist()))


@few
@given(
    sizes=st.lists(st.integers(12, 40), min_size=2, max_size=8),
    clients=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
    alpha=st.sampled_from([1e-300, 1e-4, 0.1, 1.0, 100.0, 1e9]),
    rule=st.sampled_from(["dirichlet", "pathological", "iid"]),
)
def test_dealing_rules_use_every_sample_once(
    sizes: list[int], clients: int, seed: int, alpha: float, rule: Any
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    least = min(10, len(labels) // clients)
    ways = -(-len(sizes) // clients)
    split = partition(
        labels,
        num_classes=len(sizes),
        rule=rule,
        clients=clients,
        ways=ways,
        alpha=alpha,
        min_samples=least,
        seed=seed,
    )
    assert sorted(np.concatenate(split.indices).tolist()) == list(range(len(labels)))
    assert split.overlap == 0
    for _, c, part in parts(split):
        assert part.size > 0
        assert (labels[part] == c).all()
    totals = split.counts.sum(axis=1)
    if rule == "dirichlet":
        assert totals.min() >= least
    if rule == "iid":
        assert totals.max() - totals.min() <= 1
    if rule == "pathological":
        assert {len(own) for own in split.classes} == {ways}
        holders = (split.counts > 0).sum(axis=0)
        assert holders.max() - holders.min() <= 1
        for c in range(len(sizes)):
            shards = split.counts[split.counts[:, c] > 0, c]
            assert shards.max() - shards.min() <= 1


def test_dirichlet_is_skewed_when_alpha_is_small_and_even_when_it_is_large() -> None:
    labels = labels_of(10, 200)
    skewed, even = (
        partition(labels, num_classes=10, rule="dirichlet", clients=5, alpha=alpha).counts for alpha in (0.05, 1e6)
    )
    assert skewed.max() > 150
    assert np.abs(even - 40).max() <= 2


@pytest.mark.parametrize(
    ("rule", "first"),
    [
        ("fedproto", "5feff946d640e1b5"),
        ("normal", "a0533592ccea5bab"),
        ("dirichlet", "8bb170fb8e3e3c3c"),
        ("pathological", "1521bf94941f9ce5"),
        ("iid", "dcaf7edf5d6d75a9"),
    ],
)
def test_hash_is_the_same_on_every_machine(rule: Any, first: str) -> None:
    assert partition(labels_of(10, 300), num_classes=10, rule=rule, seed=1234).hash.startswith(first)


@pytest.mark.parametrize("rule", ["fedproto", "normal", "dirichlet", "pathological", "iid"])
def test_hash_changes_with_the_seed_and_with_nothing_else(rule: Any) -> None:
    labels = labels_of(10, 300)
    one, again, other = (partition(labels, num_classes=10, rule=rule, seed=seed) for seed in (1234, 1234, 1235))
    assert one == again
    assert hash(one) == hash(again)
    assert one != other
    assert one.hash != other.hash


def test_hash_sees_a_single_changed_sample() -> None:
    content = partition(labels_of(10, 300), num_classes=10).to_dict()
    content["indices"][3][0] += 1
    with pytest.raises(UserError, match="its content hashes to"):
        Partition.from_dict(content)


@pytest.mark.parametrize("rule", ["fedproto", "dirichlet"])
def test_a_saved_partition_comes_back(rule: Any, tmp_path: Path) -> None:
    split = partition(labels_of(10, 150), num_classes=10, rule=rule, shots=80)
    split.save(tmp_path / "partition.json")
    back = Partition.load(tmp_path / "partition.json")
    assert back == split
    assert back.to_dict() == split.to_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["partition.json"]


def test_a_failed_save_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    split = partition(labels_of(10, 150), num_classes=10)
    split.save(tmp_path / "partition.json")
    broken = Partition("iid", 0, 1, ((object(),),), ((1,),), (np.array([0]),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        broken.save(tmp_path / "partition.json")
    assert Partition.load(tmp_path / "partition.json") == split
    assert len(list(tmp_path.iterdir())) == 1


def test_to_dict_is_what_json_gives_back() -> None:
    content = partition(labels_of(4, 30), num_classes=4, shots=20).to_dict()
    assert content["overlap"] > 0
    assert json.loads(json.dumps(content)) == content


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "got a list"),
        ("{}", "has no entry 'rule'"),
        ('{"rule": "iid", "seed": "x"}', "does not fit"),
    ],
)
def test_a_wrong_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(UserError, match=rf"p\.json: .*{message}"):
        Partition.load(tmp_path / "p.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json: No such file"):
        Partition.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rule": "fedprot"}, r"partition\.rule: got 'fedprot'; takes fedproto, normal, dirichlet, pathological, iid"),
        ({"slices": "steps"}, r"partition\.slices: got 'steps'; takes cursor, stride"),
        ({"num_classes": 1}, r"partition\.num_classes: got 1; takes a whole number of 2 or more"),
        ({"clients": 0}, r"partition\.clients: got 0; takes a whole number of 1 or more"),
        ({"ways": 0}, r"partition\.ways: got 0; takes a whole number from 1 to 10"),
        ({"ways": 11}, r"partition\.ways: got 11; takes a whole number from 1 to 10"),
        ({"ways": 2.5}, r"partition\.ways: got 2\.5; takes a whole number"),
        ({"ways": True}, r"partition\.ways: got True; takes a whole number"),
        ({"shots": 0}, r"partition\.shots: got 0; takes a whole number of 1 or more"),
        ({"spread": -1}, r"partition\.spread: got -1; takes a whole number of 0 or more"),
        ({"seed": -1}, r"partition\.seed: got -1; takes a whole number from 0 to 4294967295"),
        ({"seed": 2**32}, r"partition\.seed: got 4294967296; takes"),
        ({"stride": 0}, r"partition\.stride: got 0; takes"),
        ({"min_samples": 0}, r"partition\.min_samples: got 0; takes"),
        ({"alpha": 0.0}, r"partition\.alpha: got 0\.0; takes a number above 0"),
        ({"alpha": float("nan")}, r"partition\.alpha: got nan; takes a number above 0"),
        ({"ways": 10, "spread": 0}, r"partition\.ways: got 10 with partition\.spread 0; .* 2 to 9 of 10 classes"),
        ({"ways": 1, "spread": 0}, r"partition\.ways: got 1 with partition\.spread 0"),
        ({"shots": 60, "spread": 0}, r"partition\.shots: client 0 is to get 60 samples of class \d, which holds 50"),
        (
            {"slices": "stride", "stride": 20, "spread": 0},
            r"partition\.stride: got 20, so client 2 starts at sample 40 and asks for 20 of class \d, which holds 50",
        ),
        ({"rule": "dirichlet", "min_samples": 26}, r"partition\.min_samples: got 26 .* 500 samples; takes at most 25"),
        ({"rule": "pathological", "clients": 4, "ways": 2}, r"partition\.ways: got 2 for 4 clients.* takes at least 3"),
        (
            {"rule": "pathological", "clients": 300, "ways": 2},
            r"partition\.clients: got 300, so that 60 share class 0, which holds 50",
        ),
        ({"rule": "iid", "clients": 501}, r"partition\.clients: got 501 for 500 samples; takes at most 500"),
    ],
)
def test_a_setting_that_does_not_fit_is_one_line_that_names_it(changed: dict[str, Any], message: str) -> None:
    given_settings = {"num_classes": 10, "shots": 20} | changed
    with pytest.raises(UserError, match=message) as caught:
        partition(labels_of(10, 50), **given_settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 3, 0], r"class 2 of 4 has no sample"),
        ([], r"takes whole numbers of shape \[N\]"),
        ([0, 1, 2, 3, 4], r"got class 4; takes 0 to 3"),
        ([0, 1, 2, 3, -1], r"got class -1; takes 0 to 3"),
        ([0.0, 1.0, 2.0, 3.0], r"got float64 of shape \[4\]"),
        ([[0, 1], [2, 3]], r"got int64 of shape \[2, 2\]"),
    ],
)
def test_labels_that_do_not_fit_are_named(labels: Any, message: str) -> None:
    with pytest.raises(UserError, match="labels: .*" + message):
        partition(labels, num_classes=4, rule="iid", clients=1)
