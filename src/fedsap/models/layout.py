"""One client's weights between this package's layout and that of torch.nn."""

import math
from collections.abc import Mapping

import torch
from torch import Generator, Tensor

from fedsap.errors import UserError
from fedsap.models.network import Weights

Shapes = Mapping[str, tuple[int, ...]]  # in torch's layout, in the order of the state_dict

_COUNTER = ".num_batches_tracked"


def internal(tensor: Tensor) -> Tensor:
    """A convolution kernel [Cout, Cin, kh, kw] becomes [kh, kw, Cin, Cout]; anything else stays. Always a copy.

    >>> internal(torch.zeros(8, 3, 5, 5)).shape
    torch.Size([5, 5, 3, 8])
    """
    tensor = tensor.permute(2, 3, 1, 0) if tensor.dim() == 4 else tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def external(tensor: Tensor) -> Tensor:
    """The inverse of `internal`.

    >>> external(torch.zeros(5, 5, 3, 8)).shape
    torch.Size([8, 3, 5, 5])
    """
    tensor = tensor.permute(3, 2, 0, 1) if tensor.dim() == 4 else tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def export(weights: Weights) -> Weights:
    """The state_dict of the equivalent torch.nn module, with the batch counters that BatchNorm modules carry at zero.

    >>> list(export({"bn.running_mean": torch.zeros(4), "bn.running_var": torch.ones(4)}))
    ['bn.running_mean', 'bn.running_var', 'bn.num_batches_tracked']
    """
    state: Weights = {}
    for name, tensor in weights.items():
        state[name] = external(tensor)
        if name.endswith(".running_var"):
            state[name.removesuffix(".running_var") + _COUNTER] = torch.zeros((), dtype=torch.long)
    return state


def load(
    state: Mapping[str, Tensor],
    shapes: Shapes,
    source: str,
    ignore: tuple[str, ...] = (),
    convert: bool = True,
) -> Weights:
    """The entries of a state_dict in this package's layout, after checking that each is there and fits.

    `source` opens the message when one does not. Batch counters, and names that begin with one in `ignore`, are passed
    over. Without `convert` only the checks are done, and the entries copied as they are.

    >>> load({"fc.weight": torch.zeros(2, 3)}, {"fc.weight": (2, 4)}, "weights.pth")
    Traceback (most recent call last):
    fedsap.errors.UserError: weights.pth: fc.weight has shape (2, 3); (2, 4) is needed
    """
    for name, shape in shapes.items():
        if name not in state:
            raise UserError(f"{source}: {name} is missing; a tensor of shape {shape} is needed")
        tensor = state[name]
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UserError(f"{source}: {name} holds {kind}; floating point numbers of shape {shape} are needed")
        if tuple(tensor.shape) != shape:
            raise UserError(f"{source}: {name} has shape {tuple(tensor.shape)}; {shape} is needed")
    for name in state:
        if name not in shapes and not name.endswith(_COUNTER) and not name.startswith(ignore or ("\0",)):
            raise UserError(f"{source}: {name} is unknown; the last entry this network has is {list(shapes)[-1]}")
    return {name: internal(state[name]) if convert else state[name].detach().clone() for name in shapes}


def projection(width: int, dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the layer that brings an embedding of `width` numbers to `dim`; none where they are the same.

    >>> projection(512, 50)
    {'project.weight': (50, 512), 'project.bias': (50,)}
    """
    return {} if width == dim else {"project.weight": (dim, width), "project.bias": (dim,)}


def uniform(shapes: Shapes, generator: Generator) -> Weights:
    """Fresh weights by torch's rule for Linear and Conv2d: weight and bias uniform within 1 / sqrt(fan in).

    >>> weights = uniform({"fc.weight": (2, 100), "fc.bias": (2,)}, Generator().manual_seed(0))
    >>> bool(weights["fc.weight"].abs().max() <= 0.1)
    True
    """
    weights: Weights = {}
    for name, shape in shapes.items():
        layer = name.rpartition(".")[0]
        bound = 1 / math.sqrt(math.prod(shapes[layer + ".weight"][1:]))
        weights[name] = internal(torch.empty(shape).uniform_(-bound, bound, generator=generator))
    return weights
