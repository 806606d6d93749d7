"""How strongly each term of the loss pulls: the norm of its gradient, client by client."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsap.message import Message, select
from fedsap.methods.method import State, Step
from fedsap.models import layers
from fedsap.models.network import Features, Weights
from fedsap.training.feed import Block
from fedsap.training.local import Stack, moving, plan


def gradient_norms(
    stack: Stack, rows: Sequence[int], state: State, down: Message, schedule: Mapping[str, float], t: int
) -> dict[str, Tensor]:
    """|| d L_k / d w || for each term L_k of the method's loss, with its weight of round t, over all weights w that the
    last phase trains; of the first batch that each client would train on in round t. [R] by term.

    `state` and `down` hold the clients `rows`, in this order. Nothing is changed.
    """
    device = stack.owned.device
    weight = {k: torch.tensor(v, dtype=stack.look.dtype, device=device) for k, v in schedule.items()}
    norms: dict[str, Tensor] = {}
    missing = torch.ones(len(rows), dtype=torch.bool, device=device)
    for block in plan(stack, rows, t, 0):
        here = torch.arange(len(rows), device=device)[block.rows]
        if not missing[here].any():
            continue
        owned = stack.owned[torch.as_tensor(rows, device=device)][block.rows]
        found = _norms(stack, block, state, select(down, block.rows), owned, weight)
        for name, value in found.items():
            own = norms.setdefault(name, value.new_zeros(len(rows)))
            own[here] = torch.where(missing[here], value, own[here])
        missing[here] = False
    return norms


def _norms(
    stack: Stack, block: Block, state: State, down: Message, owned: Tensor, weight: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    batch = block.batch(0)
    x, y = stack.look(stack.train.images[batch.samples], batch.draws), stack.train.labels[batch.samples]
    noise = {k: v.to(x) for k, v in batch.noise.items()}
    phase, buffers = stack.method.phases()[-1], stack.network.buffers
    part: State = {
        n: {k: v[block.rows].clone() if k in buffers else v[block.rows] for k, v in stack.live(w).items()}
        for n, w in state.items()
    }
    leaves = []
    for n in phase.trains:
        for k in moving(stack.network, phase, part[n]):
            part[n][k] = part[n][k].detach().requires_grad_()
            leaves.append(part[n][k])

    def forward(weights: Weights) -> Features:
        return stack.network(weights, x, train=True, noise=noise)

    with torch.enable_grad(), layers.precision(stack.hyper.precision):
        step = Step(y, forward(part["model"]), down, owned, weight, part, forward, stack.live)
        terms = phase.loss(step)
        return {
            name: sum(
                (g.detach().flatten(1).square().sum(1) for g in _gradient(term, leaves)), torch.zeros(len(y)).to(term)
            ).sqrt()
            for name, term in terms.items()
        }


def _gradient(term: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    if not term.requires_grad:
        return []
    return torch.autograd.grad(term.sum(), leaves, retain_graph=True, materialize_grads=True)
