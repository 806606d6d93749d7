import pytest

import fedsap
from fedsap.engines.flower.protocol import Bad, Introduction
from fedsap.engines.flower.roster import Roster
from fedsap.errors import UserError


def said(name, classes=("a", "b"), part=None, parts=None, version=fedsap.__version__):
    return Introduction(name=name, classes=list(classes), shape=(8, 8, 1), part=part, parts=parts, version=version)


def test_places_go_by_name_not_by_arrival():
    roster = Roster(3, own=True)
    for node, name in ((11, "zoo"), (12, "ark")):
        roster.enter(node, said(name), "", [11, 12])
    roster.begin(["a", "b"])
    assert {m.name: m.clients for m in roster.members.values()} == {"ark": (0,), "zoo": (1,)}


def test_a_node_that_comes_back_has_its_place_again():
    roster = Roster(2, own=True)
    roster.enter(11, said("ark"), "", [11])
    roster.begin(["a", "b"])
    roster.retain([])
    assert roster.enter(99, said("ark"), "", [99]).clients == (0,)
    assert list(roster.members) == [99]


def test_one_that_comes_late_gets_the_next_place_and_the_one_after_it_none():
    roster = Roster(2, own=True)
    roster.enter(1, said("ark"), "", [1])
    roster.begin(["a", "b"])
    assert roster.enter(2, said("zoo"), "", [1, 2]).clients == (1,)
    with pytest.raises(Bad, match="'late' comes when all 2 places are taken"):
        roster.enter(3, said("late"), "", [1, 2, 3])


def test_a_name_cannot_be_taken_from_a_node_that_is_there():
    roster = Roster(2, own=True)
    roster.enter(1, said("ark"), "", [1])
    with pytest.raises(Bad, match="there is a node 'ark' already"):
        roster.enter(2, said("ark"), "", [1, 2])


def test_a_registered_key_has_its_own_name():
    roster = Roster(2, own=True)
    with pytest.raises(Bad, match="node 'zoo' calls itself 'ark'"):
        roster.enter(1, said("ark"), "zoo", [1])
    assert roster.strangers([1]) == []  # it is not asked again
    roster.retain([])
    assert roster.strangers([1]) == [1]


def test_a_class_that_was_not_agreed_on_is_refused():
    roster = Roster(2, own=True)
    roster.enter(1, said("ark"), "", [1])
    roster.begin(["a", "b"])
    with pytest.raises(Bad, match="zoo has 'c'"):
        roster.enter(2, said("zoo", "ac"), "", [1, 2])


def test_more_nodes_than_places_before_the_start_is_a_mistake():
    roster = Roster(1, own=True)
    for node in (1, 2):
        roster.enter(node, said(f"n{node}"), "", [1, 2])
    with pytest.raises(UserError, match=r"partition\.clients: got 1, and node 'n2' is one more"):
        roster.begin(["a", "b"])


def test_parts_of_a_data_set_share_the_clients():
    roster = Roster(5, own=False)
    for i in range(2):
        roster.enter(i, said(f"n{i}", part=i, parts=2), "", [0, 1])
    assert {c: m.name for c, m in roster.owner.items()} == {0: "n0", 2: "n0", 4: "n0", 1: "n1", 3: "n1"}
    with pytest.raises(Bad, match="node 'n2' is part 1 of 2; client 1 is 'n1's"):
        roster.enter(7, said("n2", part=1, parts=2), "", [0, 1, 7])


def test_another_version_of_fedsap_is_refused():
    with pytest.raises(Bad, match=r"node 'old' has fedsap 0\.0\.1; the server's is"):
        Roster(2, own=True).enter(1, said("old", version="0.0.1"), "", [1])


@pytest.mark.parametrize(("own", "part"), [(True, 0), (False, None)])
def test_own_data_and_parts_do_not_mix(own, part):
    with pytest.raises(Bad, match=r"and flower\.data is"):
        Roster(2, own).enter(1, said("n", part=part, parts=None if part is None else 1), "", [1])
