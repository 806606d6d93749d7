"""Random numbers by name: a stream for every (seed, purpose, client, round), independent of all others.

Nothing is ever drawn from a generator that several clients share, so what one client does depends neither on who
else is in the stack nor on when a run was stopped and resumed.
"""

from typing import Literal

import numpy as np
import torch

Purpose = Literal[
    "weights", "server", "batches", "participation", "passes", "sample", "pool", "survey", "mix", "privacy"
]  # fmt: skip
_NUMBER: dict[Purpose, int] = {
    "weights": 1, "server": 2, "batches": 3, "participation": 4, "passes": 5, "sample": 6,
    "pool": 7, "survey": 8, "mix": 9, "privacy": 10
}  # fmt: skip


def _sequence(seed: int, purpose: Purpose, client: int, t: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, _NUMBER[purpose], client, t])


def numbers(seed: int, purpose: Purpose, client: int = 0, t: int = 0) -> np.random.Generator:
    """A NumPy generator on the host.

    >>> bool(numbers(1, "batches", client=2, t=3).random() == numbers(1, "batches", client=2, t=3).random())
    True
    """
    return np.random.Generator(np.random.Philox(_sequence(seed, purpose, client, t)))


def generator(seed: int, purpose: Purpose, client: int = 0, t: int = 0) -> torch.Generator:
    """A torch generator on the host."""
    state = _sequence(seed, purpose, client, t).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) % 2**63)
