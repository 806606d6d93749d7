"""The handwritten digits that come with scikit-learn: always there, small enough for a first run."""

import numpy as np

from fedsap.data.split import Dataset, Pixels, Split

PIXELS = Pixels((8, 8, 1), mean=(0.3053,), std=(0.3760,))


def load_digits() -> Dataset:
    """1,797 grey images, uint8 [N, 8, 8, 1]. Of each class every fifth image, in the original order, is for testing."""
    from sklearn import datasets  # takes a second, so only for those who need it

    source = datasets.load_digits()
    images = np.rint(source.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = source.target.astype(np.int64)
    test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        test[np.flatnonzero(labels == digit)[4::5]] = True
    return Dataset(
        name="digits",
        train=Split(images[~test], labels[~test]),
        test=Split(images[test], labels[test]),
        classes=tuple("0123456789"),
        mean=PIXELS.mean,
        std=PIXELS.std,
        augment="none",
        kind="shape",
    )
