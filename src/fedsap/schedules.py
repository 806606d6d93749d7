"""Weights that change with the round."""

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["constant", "linear", "cosine", "sigmoid", "step"]


@dataclass(frozen=True)
class Schedule:
    """A weight that is 0 up to round `start`, `top` from round `end` on, and rises between them.

    With u = (t - start) / (end - start), clipped to [0, 1], for round t = 1, 2, ...:

        constant  top, in every round
        linear    top * u
        cosine    top * (1 - cos(pi u)) / 2
        sigmoid   top * (S(u) - S(0)) / (S(1) - S(0)),  S(u) = 1 / (1 + exp(-12 (u - 1/2)))
        step      top if u >= 1/2 else 0

    >>> schedule = Schedule("linear", start=20, end=100, top=0.7)
    >>> [round(schedule(t), 3) for t in (1, 20, 60, 100, 120)]
    [0.0, 0.0, 0.35, 0.7, 0.7]
    """

    shape: Shape = "linear"
    start: int = 20
    end: int = 100
    top: float = 0.7

    def __call__(self, t: int) -> float:
        if self.shape == "constant":
            return self.top
        if self.end <= self.start:
            u = float(t > self.start)
        else:
            u = min(max((t - self.start) / (self.end - self.start), 0.0), 1.0)
        if self.shape == "linear":
            return self.top * u
        if self.shape == "cosine":
            return self.top * (1 - math.cos(math.pi * u)) / 2
        if self.shape == "sigmoid":
            low, high = _logistic(0.0), _logistic(1.0)
            return self.top * (_logistic(u) - low) / (high - low)
        return self.top if u >= 0.5 else 0.0


def _logistic(u: float) -> float:
    return 1 / (1 + math.exp(-12 * (u - 0.5)))
