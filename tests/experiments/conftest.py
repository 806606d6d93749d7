import pickle

import numpy as np
import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """CIFAR-10 and CIFAR-100 of 12 and 18 training and 3 test images a class, in the official formats."""
    root = tmp_path_factory.mktemp("tiny")
    rng = np.random.default_rng(0)

    def batch(path, classes, each, key):
        labels = np.arange(classes * each) % classes
        tint = rng.integers(0, 200, (classes, 1))
        pixels = (tint[labels] + rng.integers(0, 56, (len(labels), 3072))).astype(np.uint8)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps({b"data": pixels, key: labels.tolist()}, protocol=2))

    ten, hundred = root / "cifar-10-batches-py", root / "cifar-100-python"
    batch(ten / "data_batch_1", 10, 12, b"labels")
    batch(ten / "test_batch", 10, 3, b"labels")
    (ten / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"c%d" % i for i in range(10)]}, protocol=2))
    batch(hundred / "train", 100, 18, b"fine_labels")
    batch(hundred / "test", 100, 3, b"fine_labels")
    (hundred / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"c%d" % i for i in range(100)]}, protocol=2))
    return root
