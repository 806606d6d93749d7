"""What a server trains itself."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsap.models.network import Weights


def fit(
    network: Callable[[Weights, Tensor], Tensor],
    weights: Weights,
    points: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    batch: int,
    lr: float,
    dropout: float,
    generator: torch.Generator,
) -> Weights:
    """Adam on the cross-entropy of `network` over labelled vectors, in shuffled batches; the weights that come out.

    weights: one set, without client axis; points: [N, d], labels: [N]. `generator` is on the CPU.
    """
    trained = {k: v.detach().clone()[None].requires_grad_() for k, v in weights.items()}
    optimiser = torch.optim.Adam(list(trained.values()), lr=lr)
    for _ in range(epochs):
        for chosen in torch.randperm(len(points), generator=generator).split(batch):  # type: ignore[no-untyped-call]
            index = chosen.to(points.device)
            x = points[index]
            if dropout:
                keep = torch.rand(x.shape, generator=generator).to(x) >= dropout
                x = x * keep / (1 - dropout)
            optimiser.zero_grad()
            with torch.enable_grad():
                F.cross_entropy(network(trained, x[None])[0], labels[index]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return {k: v.detach()[0] for k, v in trained.items()}
