"""How strongly each term of the loss pulls: the norm of its gradient, client by client."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsap.message import Message, select
from fedsap.methods.method import State
from fedsap.models import layers
from fedsap.training.feed import Block
from fedsap.training.local import Stack, plan, pose


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
    phase, buffers = stack.method.phases()[-1], stack.network.buffers
    part: State = {  # statistics of BatchNorm change in a forward pass
        n: {k: v[block.rows].clone() if k in buffers else v[block.rows] for k, v in stack.live(w).items()}
        for n, w in state.items()
    }
    with torch.enable_grad(), layers.precision(stack.hyper.precision):
        step, which = pose(stack, phase, part, down, owned, weight, block.batch(0))
        leaves = [step.state[n][k] for n, k in which]
        return {
            name: sum(
                (g.detach().flatten(1).square().sum(1) for g in _gradient(term, leaves)),
                torch.zeros_like(term.detach()),
            ).sqrt()
            for name, term in phase.loss(step).items()
        }


def _gradient(term: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    if not term.requires_grad:
        return []
    return torch.autograd.grad(term.sum(), leaves, retain_graph=True, materialize_grads=True)
