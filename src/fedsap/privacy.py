"""Noise on what clients send, and the epsilon that it makes: docs/privacy.md has the analysis.

In every round a client sends the class means of L kinds of vectors for its K classes. Each vector is clipped to
length S before it enters its mean, so that a mean lies in the ball of radius S whatever the network and the images are.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsap.errors import UserError
from fedsap.message import PerClass
from fedsap.methods.method import Method
from fedsap.training.feed import Key
from fedsap.training.streams import numbers

Encoder = Literal["trained", "fixed"]
Source = Literal["seed", "system"]


@dataclass(frozen=True)
class Privacy:
    """What a client does to class means before it sends them."""

    noise: float  # deviation of the noise in units of the sensitivity
    clip: float = 1.0  # S
    delta: float = 1e-5
    encoder: Encoder = "trained"
    source: Source = "seed"


def clipped(vectors: Tensor, length: float) -> Tensor:
    """Vectors with those longer than `length` shortened to it; what is not finite becomes zero.

        v / max(1, ||v|| / S)        v: [..., d]

    >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4], [torch.nan, 0.0]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000],
            [0.0000, 0.0000]])
    """
    norm = vectors.norm(dim=-1, keepdim=True)
    return torch.where(torch.isfinite(norm), vectors / (norm / length).clamp(min=1), 0.0)


def sensitivity(counts: Tensor, kinds: int, privacy: Privacy) -> Tensor:
    """How far what a client sends can move, as a bound for each class that noise of every class is scaled by, [Q, C].

        trained   2 S sqrt(K L)          any change of its images changes the network, and with it all K L means
        fixed     2 S sqrt(L) / n_c      one image changes the L means of its class alone

    `trained` bounds the length of the change of all means together, K being the number of classes with samples. `fixed`
    is true only of a network that has not seen the images. counts: [Q, C] samples of each class

    >>> counts = torch.tensor([[5, 20, 0, 10]])
    >>> sensitivity(counts, 1, Privacy(1.0, clip=0.5)).round(decimals=3).tolist()
    [[1.732, 1.732, 0.0, 1.732]]
    >>> sensitivity(counts, 1, Privacy(1.0, clip=0.5, encoder="fixed")).round(decimals=3).tolist()
    [[0.2, 0.05, 0.0, 0.1]]
    """
    there = (counts > 0).double()
    if privacy.encoder == "trained":
        return there * 2 * privacy.clip * (kinds * there.sum(1, keepdim=True)).sqrt()
    return there * 2 * privacy.clip * math.sqrt(kinds) / counts.clamp(min=1)


def noised(
    means: Mapping[str, PerClass], counts: Tensor, privacy: Privacy, keys: Sequence[Key], t: int
) -> dict[str, PerClass]:
    """Class means of clipped vectors with Gaussian noise on each coordinate, of deviation noise * sensitivity.

    means: [Q, C, d] by name, counts: [Q, C], keys: whose rows these are. With source = seed the noise of a client and
    round is always the same, so that a run can be repeated; it is no secret from anybody who knows the seed.
    """
    deviation = privacy.noise * sensitivity(counts.cpu(), len(means), privacy)
    drawn = {name: torch.zeros(one.values.shape, dtype=torch.float64) for name, one in means.items()}
    for row, key in enumerate(keys):
        rng = numbers(key.seed, "privacy", key.client, t)
        for name, one in means.items():
            own = one.mask[row].nonzero().flatten().cpu()
            shape = (len(own), *one.values.shape[2:])
            normal = rng.standard_normal(shape) if privacy.source == "seed" else secret(shape)
            drawn[name][row, own] = torch.from_numpy(normal) * deviation[row, own, None]
    return {name: PerClass(one.values + drawn[name].to(one.values), one.mask) for name, one in means.items()}


def secret(shape: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Standard normal numbers that the operating system's source of randomness gives, which no seed repeats."""
    rng = random.SystemRandom()
    return np.array([rng.gauss() for _ in range(math.prod(shape))]).reshape(shape)


def released(
    means: Mapping[str, PerClass], counts: Tensor, privacy: Privacy, keys: Sequence[Key], t: int
) -> dict[str, PerClass]:
    """`noised`, each mean brought back into the ball of radius S, where the true one is: that costs no privacy and
    makes no error larger."""
    some = noised(means, counts, privacy, keys, t)
    return {name: PerClass(clipped(one.values, privacy.clip), one.mask) for name, one in some.items()}


def epsilon(noise: float, delta: float, releases: int) -> float:
    """The epsilon of so many releases, each Gaussian noise of `noise` times its sensitivity, whatever is released later
    depending on what was before: that is one release with noise / sqrt(releases), of which the value is exact.

        delta = Phi(m/2 - eps/m) - exp(eps) Phi(-m/2 - eps/m),    m = sqrt(releases) / noise

    >>> round(epsilon(4.0, 1e-5, 1), 3) == round(epsilon(40.0, 1e-5, 100), 3)
    True
    """
    return accountant()(noise / math.sqrt(releases), delta) if releases else 0.0


def accountant() -> Callable[[float, float], float]:
    """dp-accounting's exact epsilon of the Gaussian mechanism, by its noise and delta."""
    try:
        from dp_accounting import get_epsilon_gaussian
    except ImportError:
        raise UserError("privacy.noise: needs a package that is not installed: pip install 'fedsap[privacy]'") from None
    return get_epsilon_gaussian  # type: ignore[no-any-return]


def refusal(method: Method, unlabelled: int) -> str | None:
    """Why the analysis does not hold for what a method sends, or None."""
    late = [f"{name} {when}" for name, when in method.passes().items() if when != "eval"]
    if not method.means_only:
        up = method.sends.partition(";")[0]
        return f"{method.name} sends more than class means ({up}), and noise on these protects nothing else; takes 0"
    if late:
        return (
            f"{method.name} takes class means otherwise than in a pass after training ({', '.join(late)}); "
            f"takes 0, or method.{method.name}.proto_pass=eval"
        )
    if unlabelled and method.uses_pool:
        return f"{method.name} would send what it makes of unlabelled samples; takes 0, or unlabelled.size=0"
    return None


@dataclass
class Ledger:
    """How often each client has sent something, and the epsilon that makes for it."""

    privacy: Privacy
    releases: list[int]

    def add(self, clients: Sequence[int]) -> dict[str, list[float] | list[int]]:
        """Takes in a round in which so many clients may have sent something; what its row says of privacy."""
        for client in clients:
            self.releases[client] += 1
        known = {n: epsilon(self.privacy.noise, self.privacy.delta, n) for n in set(self.releases)}
        return {"releases": list(self.releases), called(self.privacy): [round(known[n], 6) for n in self.releases]}


def called(privacy: Privacy) -> str:
    """What an epsilon is called: that of `fixed` is none of a network that is trained on the same images.

    >>> called(Privacy(1.0)), called(Privacy(1.0, encoder="fixed"))
    ('epsilon', 'epsilon_if_fixed')
    """
    return "epsilon" if privacy.encoder == "trained" else "epsilon_if_fixed"
