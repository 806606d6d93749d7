"""The loaders on real images, where a set of them lies beside the checkout or $FEDSAP_SHARED names it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedsap.data import load

SHARED = Path(os.environ.get("FEDSAP_SHARED") or Path(__file__).resolve().parents[3] / "shared") / "data"

pytestmark = pytest.mark.skipif(not (SHARED / "unpack.py").is_file(), reason="no real images on this machine")


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    command = [sys.executable, str(SHARED / "unpack.py"), str(folder), "cifar10", "by_class"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_cifar10(real):
    dataset = load("cifar10", real)
    assert np.bincount(dataset.train.labels).tolist() == [1500] * 10
    assert np.bincount(dataset.test.labels).tolist() == [1000] * 10
    assert dataset.classes[0] == "airplane"
    # The published mean of the training images; here is a third of them.
    mean = dataset.train.images.mean((0, 1, 2)) / 255
    np.testing.assert_allclose(mean, [0.4914, 0.4822, 0.4465], atol=0.003)


def test_femnist(real, tmp_path):
    dataset = load("femnist", real, cache=tmp_path)
    assert "".join(dataset.classes) == "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    assert np.bincount(dataset.train.labels).min() >= 70
    assert np.bincount(dataset.test.labels).min() >= 14
    assert np.median(dataset.train.images) == 255  # dark ink on white, as it lies on the disk
    again = load("femnist", real, cache=tmp_path)
    np.testing.assert_array_equal(again.test.images, dataset.test.images)
