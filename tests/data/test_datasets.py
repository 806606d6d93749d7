"""Names, the search path, and the digits that are always there."""

from pathlib import Path

import numpy as np
import pytest

from fedsap.data import DATASETS, load, pixels, search_path
from fedsap.errors import UserError


@pytest.fixture
def places(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSAP_DATA", str(tmp_path / "shared"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_search_goes_from_the_argument_to_the_variable_to_the_cache(places):
    assert search_path(Path("mine")) == [Path("mine"), places / "shared", places / "cache" / "fedsap"]
    assert search_path() == [places / "shared", places / "cache" / "fedsap"]


def test_the_cache_is_in_the_home_folder_unless_said_otherwise(places, monkeypatch):
    monkeypatch.delenv("FEDSAP_DATA")
    for value in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert search_path() == [Path.home() / ".cache" / "fedsap"]


def test_a_tilde_is_the_home_folder(places):
    assert search_path(Path("~/scans"))[0] == Path.home() / "scans"


def test_digits_hold_every_fifth_image_of_each_class_for_testing():
    from sklearn.datasets import load_digits

    source = load_digits()
    dataset = load("digits")
    for digit in range(10):
        theirs = np.rint(source.images[source.target == digit] * 255 / 16)
        held = np.arange(len(theirs)) % 5 == 4
        np.testing.assert_array_equal(dataset.test.images[dataset.test.labels == digit, ..., 0], theirs[held])
        np.testing.assert_array_equal(dataset.train.images[dataset.train.labels == digit, ..., 0], theirs[~held])


def test_digits_use_the_whole_range_and_say_how_it_is_spread():
    dataset = load("digits")
    pixels = dataset.train.images / 255
    assert (dataset.train.images.min(), dataset.train.images.max()) == (0, 255)
    assert dataset.mean == (pytest.approx(pixels.mean(), abs=2e-3),)
    assert dataset.std == (pytest.approx(pixels.std(), abs=2e-3),)
    assert dataset.augment == "none"


def test_pixels_of_digits_are_known_without_the_images():
    assert pixels("digits", 64, 3) == load("digits").pixels


def test_digits_are_the_same_every_time():
    first, second = load("digits"), load("digits")
    np.testing.assert_array_equal(first.train.images, second.train.images)


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"digits"}))
def test_every_other_dataset_is_looked_for_in_files(places, name):
    with pytest.raises(UserError, match=r"^data\.root: "):
        load(name)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UserError, match=r"^data\.name: no dataset 'mnist'; there are digits, cifar10, .*folder$"):
        load("mnist")


def test_a_root_that_does_not_exist_is_not_passed_over(places):
    (places / "shared" / "cifar-10-batches-py").mkdir(parents=True)
    with pytest.raises(UserError, match=r"slip \(does not exist\), \S+shared"):
        load("cifar10", places / "slip")


def test_a_fixed_size_cannot_be_changed():
    with pytest.raises(UserError, match=r"^data\.size: 32, but the images of digits are 8x8"):
        load("digits", size=32)


def test_a_size_that_is_the_own_one_is_fine():
    assert load("digits", size=8, channels=1).train.images.shape[1:] == (8, 8, 1)
