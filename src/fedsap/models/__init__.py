"""Networks whose weights carry a leading client axis: a small CNN, FedProto's CNN, ResNet-18, and the user's own."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from typing import Any, cast

import torch
from torch import Generator, nn

from fedsap.errors import UserError
from fedsap.models.cnn import CNN
from fedsap.models.module import ModuleNetwork, from_module
from fedsap.models.network import Features, Network, Weights
from fedsap.models.resnet import ResNet18
from fedsap.models.small import Small
from fedsap.plugins import find

__all__ = [
    "CNN",
    "MODELS",
    "Features",
    "ModuleNetwork",
    "Network",
    "ResNet18",
    "Small",
    "Weights",
    "build",
    "client",
    "count",
    "from_module",
    "stack",
]

MODELS = {
    "small": "two 3x3 convolutions, 64-dimensional embedding; for images of 8x8 to 32x32",
    "cnn": "the CNN of FedProto's FEMNIST experiments, 50-dimensional embedding, made for images of 128x128",
    "resnet18": "ResNet-18 in torchvision's layout, 512-dimensional embedding, from random or ImageNet weights",
    "package.module:function": "your own: called with classes and shape, it returns a torch.nn.Module",
}

_BUILT_IN: dict[str, type[Small] | type[CNN] | type[ResNet18]] = {"small": Small, "cnn": CNN, "resnet18": ResNet18}


def build(name: str, *, classes: int, shape: tuple[int, int, int], **options: Any) -> Network:
    """A network by name, for images of shape [H, W, C].

    Options are the fields of the network (`Small`, `CNN`, `ResNet18`). A name with a colon is imported and called with
    classes, shape and the options; what it returns is a Network, or a module that is wrapped by `from_module`.

    >>> build("cnn", classes=62, shape=(128, 128, 1), dropout=0.0).dim
    50
    >>> build("small", classes=10, shape=(8, 8, 1), depth=3)
    Traceback (most recent call last):
    fedsap.errors.UserError: model.depth is no option of model 'small'; it takes embedding, head_input, head_scale, dim
    """
    if ":" in name:
        return _imported(name, classes, shape, options)
    if name not in _BUILT_IN:
        near = get_close_matches(name, _BUILT_IN, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? It" if near else "it"
        raise UserError(f"model.name is {name!r}; {hint} takes {', '.join(_BUILT_IN)} or package.module:function")
    network = _BUILT_IN[name]
    takes = [field.name for field in fields(network) if field.name not in ("classes", "shape")]
    for option in options:
        if option not in takes:
            raise UserError(f"model.{option} is no option of model {name!r}; it takes {', '.join(takes)}")
    return network(classes=classes, shape=shape, **options)


def _imported(name: str, classes: int, shape: tuple[int, int, int], options: dict[str, Any]) -> Network:
    maker: Callable[..., Any] = find("model.name", name)
    try:
        inspect.signature(maker).bind(classes=classes, shape=shape, **options)
    except (TypeError, ValueError) as error:
        given = ", ".join(["classes", "shape", *options])
        raise UserError(f"model.name is {name!r}; it cannot be called with {given}: {error}") from None
    make = partial(maker, classes=classes, shape=shape, **options)
    made = make()
    if not isinstance(made, nn.Module):
        if not all(hasattr(made, part) for part in ("init", "head_names", "noise", "export")):
            raise UserError(
                f"model.name is {name!r}; it returned {type(made).__name__}, not a torch.nn.Module or Network"
            )
        return cast(Network, made)
    network = from_module(make, shape)
    if network.classes != classes:
        raise UserError(
            f"model.name is {name!r}; it gives {network.classes} logits, and the data has {classes} classes"
        )
    return network


def stack(per_client: Sequence[Weights]) -> Weights:
    """The weights of several clients as one dictionary with a leading client axis.

    >>> stack([{"w": torch.zeros(3)}, {"w": torch.ones(3)}])["w"].shape
    torch.Size([2, 3])
    """
    return {name: torch.stack([weights[name] for weights in per_client]) for name in per_client[0]}


def client(weights: Weights, q: int) -> Weights:
    """One client's weights out of a stack: views, not copies.

    >>> client({"w": torch.tensor([[1.0], [2.0]])}, 1)
    {'w': tensor([2.])}
    """
    return {name: tensor[q] for name, tensor in weights.items()}


def count(network: Network) -> int:
    """How many trainable weights one client has.

    >>> count(build("cnn", classes=62, shape=(128, 128, 1)))
    849332
    """
    weights = network.init(Generator().manual_seed(0))
    return sum(tensor.numel() for name, tensor in weights.items() if name not in network.buffers)
