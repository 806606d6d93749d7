"""A part of the training data to choose settings on, so that the test split is looked at once."""

import numpy as np
from numpy.typing import NDArray


def held_out(labels: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Which samples are set aside: the same share of every class, the same ones in every run.

    At least one sample of each class is set aside and one is left, where there are two. labels: [N] -> bool [N]

    >>> int(held_out(np.array([0, 0, 0, 0, 1, 1]), 0.25).sum())
    2
    """
    aside = np.zeros(len(labels), bool)
    for c in np.unique(labels).tolist():
        own = np.flatnonzero(labels == c)
        count = min(max(1, round(share * len(own))), len(own) - 1)
        aside[np.random.RandomState([1, c]).permutation(own)[:count]] = True
    return aside
