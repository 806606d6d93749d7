import pytest

from fedsap.data import load
from fedsap.engines.flower.agree import agree, renumbered
from fedsap.errors import UserError


def test_classes_meet_by_name_whatever_their_order():
    assert agree({"a": ["cat", "dog"], "b": ["dog", "horse"]}) == ("cat", "dog", "horse")


def test_a_known_data_set_keeps_its_order():
    assert agree({"a": ["plane", "car", "bird"], "b": ["plane", "car", "bird"]}) == ("plane", "car", "bird")


@pytest.mark.parametrize("other", ["Cat", " cat", "CAT", "cát"])
def test_names_that_differ_in_spelling_only_are_a_mistake_that_names_both_nodes(other):
    with pytest.raises(UserError, match=r"'cat' \(a\) and '.*' \(b\) differ.*; rename one"):
        agree({"a": ["cat"], "b": [other]})


def test_a_class_outside_the_fixed_ones_is_a_mistake_that_says_whose_and_which_was_meant():
    with pytest.raises(UserError, match="b has 'hors', and the federation has cat, horse; did you mean 'horse'"):
        agree({"a": ["cat"], "b": ["hors"]}, ["cat", "horse"])


def test_labels_follow_the_names():
    digits = load("digits")
    names = ("9", "0", "8", "1", "7", "2", "6", "3", "5", "4", "ten")
    moved = renumbered(digits, names)
    for split, before in ((moved.train, digits.train), (moved.test, digits.test)):
        assert [names[y] for y in split.labels[:50]] == [digits.classes[y] for y in before.labels[:50]]


def test_a_class_that_the_federation_lacks_is_a_mistake():
    with pytest.raises(UserError, match="this node has '9'"):
        renumbered(load("digits"), [str(d) for d in range(9)])
