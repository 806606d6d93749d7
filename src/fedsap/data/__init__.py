"""Data: what there is to train on, who holds which part of it, and how a batch is augmented (`fedsap.data.augment`)."""

from fedsap.data.datasets import DATASETS, Augment, Dataset, Pixels, Split, load, pixels, search_path, shortage

__all__ = ["DATASETS", "Augment", "Dataset", "Pixels", "Split", "load", "pixels", "search_path", "shortage"]
