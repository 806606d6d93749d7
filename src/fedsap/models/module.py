"""Any torch.nn.Module as a network with a client axis, through torch.func."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, vmap

from fedsap.errors import UserError
from fedsap.models import layers, layout
from fedsap.models.network import Features, Weights

_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_WHOLE_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass(frozen=True, eq=False)
class ModuleNetwork:
    """A user's module; made by `from_module`. Names in the weights are those of its parameters and buffers."""

    make: Callable[[], nn.Module]
    shape: tuple[int, int, int]  # H, W, C of an image
    output: str  # name of the output layer
    dim: int
    low_dim: int
    classes: int
    buffers: frozenset[str]
    head_names: tuple[str, ...]
    noise: Mapping[str, tuple[int, ...]]
    template: nn.Module = field(repr=False)  # lends its forward; the weights in it are never used
    state: Weights = field(repr=False)  # the entries of its state_dict, as an example
    same: Mapping[str, str] = field(repr=False)  # names of shared parameters -> the name that holds them

    def init(self, generator: Generator) -> Weights:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        return self.load(_built(self.make, seed).state_dict())

    def __call__(
        self, weights: Weights, x: Tensor, *, train: bool = False, noise: Mapping[str, Tensor] | None = None
    ) -> Features:
        random = dict(noise or {}) if train else {}
        if train and not self.noise.keys() <= random.keys():
            raise ValueError(f"training needs noise for {', '.join(self.noise)}: [Q, B, *shape], uniform")
        self.template.train(train)
        for module in self.template.modules():
            if isinstance(module, _Dropout):
                module.calls = 0

        def one(weights: Weights, noise: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            out = functional_call(self.template, {**_constants(self.template, x), **weights, **noise}, (x,))
            return out[0], out[1], out[2 if len(out) == 3 else 0].flatten(1)

        pictures = x.permute(0, 1, 4, 2, 3).contiguous()
        used = {name: random[name] for name in self.noise} if train else {}
        if (
            torch.compiler.is_compiling() and len(x) == 1
        ):  # a graph that is run elsewhere: vmap would fix its batch size
            own = {name: tensor.squeeze(0) for name, tensor in weights.items()}
            return Features(*(v.unsqueeze(0) for v in one(own, used, pictures.squeeze(0))))
        return Features(*vmap(one)(weights, used, pictures))

    def head(self, weights: Weights, h: Tensor) -> Tensor:
        layer = self.template.get_submodule(self.output).eval()
        own = {name.removeprefix(f"{self.output}."): weights[name] for name in self.head_names}

        def one(weights: Weights, h: Tensor) -> Tensor:
            logits: Tensor = functional_call(layer, {**_constants(layer, h), **weights}, (h,))
            return logits

        logits: Tensor = vmap(one)(own, h)
        return logits

    def live(self, weights: Weights) -> Weights:
        return dict(weights)

    def export(self, weights: Weights) -> Weights:
        given = {name: weights.get(self.same.get(name, name), example) for name, example in self.state.items()}
        return {name: tensor.detach().clone() for name, tensor in given.items()}

    def load(self, state: Mapping[str, Tensor]) -> Weights:
        source = f"the state of a model {type(self.template).__name__!r}"
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state.items() if tensor.is_floating_point()}
        fixed = tuple(name for name in self.state if name not in shapes)
        loaded = layout.load(state, shapes, source, fixed, convert=False)
        return {name: tensor for name, tensor in loaded.items() if name not in self.same}


def from_module(
    build: Callable[[], nn.Module], shape: tuple[int, int, int], *, head: str | None = None
) -> ModuleNetwork:
    """Wraps a module whose forward takes x [B, C, H, W] and returns (h [B, d], logits [B, classes]) or, third, a map
    that serves as `low`.

    `build` makes a fresh module; it is called once per client. Every client has its own BatchNorm statistics. Dropout
    modules are driven by the noise of the call; other random draws in forward are refused. `head` names the output
    layer, which must turn h into the logits; without it, it is the last nn.Linear.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body, self.fc = nn.Linear(64, 16), nn.Linear(16, 10)
    ...
    ...     def forward(self, x):
    ...         h = self.body(x.flatten(1)).relu()
    ...         return h, self.fc(h)
    >>> network = from_module(Net, shape=(8, 8, 1))
    >>> network.dim, network.classes, network.head_names
    (16, 10, ('fc.weight', 'fc.bias'))
    """
    template = _built(build, seed=0)
    name = type(template).__name__
    state = template.state_dict()
    state = {k: torch.zeros_like(v) if k.endswith(".num_batches_tracked") else v.clone() for k, v in state.items()}
    owners: dict[int, str] = {}
    same: dict[str, str] = {}
    for key, parameter in template.named_parameters(remove_duplicate=False):
        if owners.setdefault(id(parameter), key) != key:
            same[key] = owners[id(parameter)]
    trained = {key for key, parameter in template.named_parameters() if parameter.requires_grad}
    output = _output_layer(template, head)
    _replace(template)
    drops = {key: module for key, module in template.named_modules() if isinstance(module, _Dropout)}
    h, logits, low = _dry_run(template, shape, name)
    network = ModuleNetwork(
        make=build,
        shape=shape,
        output=output,
        dim=h.shape[1],
        low_dim=low.shape[1],
        classes=logits.shape[1],
        buffers=frozenset(k for k, v in state.items() if v.is_floating_point() and k not in trained and k not in same),
        head_names=tuple(f"{output}.{k}" for k in _own(template.get_submodule(output)) if f"{output}.{k}" not in same),
        noise={f"{key}.u{i}": size for key, drop in drops.items() for i, size in enumerate(drop.shapes)},
        template=template,
        state=state,
        same=same,
    )
    _check(network, name)
    return network


class _Dropout(nn.Module):
    """Stands in for a dropout module: the uniform numbers of its i-th call in a forward pass are its buffer `u<i>`."""

    def __init__(self, p: float, whole_channels: bool) -> None:
        super().__init__()
        self.p, self.whole_channels = p, whole_channels
        self.calls, self.recording = 0, True
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.recording:
            self.register_buffer(f"u{len(self.shapes)}", torch.zeros(0), persistent=False)
            self.shapes.append(tuple(x.shape[1:2] if self.whole_channels else x.shape[1:]))
            return x
        noise: Tensor = getattr(self, f"u{self.calls}")
        self.calls += 1
        return layers.dropout(x, noise.reshape(*noise.shape, *(1 for _ in range(x.dim() - noise.dim()))), self.p)


def _replace(module: nn.Module) -> None:
    """Takes the state out of the modules that keep some beside weights: dropout and the counters of BatchNorm."""
    for name, child in module.named_children():
        if isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d) and child.p < 1:
            setattr(module, name, _Dropout(child.p, isinstance(child, _WHOLE_CHANNELS)))
        elif isinstance(child, nn.modules.dropout._DropoutNd):
            raise UserError(f"{name} is {child}; only Dropout and Dropout1d to 3d with p below 1 are supported")
        if isinstance(child, _BATCH_NORM):
            if child.momentum is None:
                raise UserError(f"{name} is {child}; a BatchNorm needs a momentum here, such as 0.1")
            child.num_batches_tracked = None
        _replace(child)


def _built(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A module made with the random numbers of a seed, the caller's own stream being left as it was."""
    before = torch.default_generator.get_state()
    try:
        torch.default_generator.manual_seed(seed)
        module = build()
    finally:
        torch.default_generator.set_state(before)
    if not isinstance(module, nn.Module):
        raise UserError(f"the model's builder returned {type(module).__name__}; a torch.nn.Module is needed")
    return module.cpu().float()


def _output_layer(template: nn.Module, head: str | None) -> str:
    names: list[str] = [name for name, module in template.named_modules() if name and _own(module)]
    if head is not None:
        if head not in names:
            raise UserError(f"model {type(template).__name__!r} has no layer {head!r}; it has {', '.join(names)}")
        return head
    linear = [name for name in names if isinstance(template.get_submodule(name), nn.Linear)]
    if not linear:
        raise UserError(f"model {type(template).__name__!r} has no nn.Linear; name the output layer with `head`")
    return linear[-1]


def _own(module: nn.Module) -> list[str]:
    """Names of the weights of a module: its parameters and the buffers that hold floating point numbers."""
    return [name for name, tensor in module.state_dict().items() if tensor.is_floating_point()]


def _constants(module: nn.Module, like: Tensor) -> Weights:
    """Buffers that are no weights, where the input is: integers, and those left out of the state_dict."""
    own = set(_own(module))
    buffers = ((name, buffer) for name, buffer in module.named_buffers() if name not in own)
    return {name: b.to(like) if b.is_floating_point() else b.to(like.device) for name, b in buffers}


def _dry_run(template: nn.Module, shape: tuple[int, int, int], name: str) -> tuple[Tensor, Tensor, Tensor]:
    """One pass in training mode over two blank images, in which the dropout modules note what noise they need."""
    height, width, channels = shape
    before = torch.default_generator.get_state()
    with torch.no_grad():
        out = template.train()(torch.zeros(2, channels, height, width))
    drawn = not torch.equal(before, torch.default_generator.get_state())
    torch.default_generator.set_state(before)
    if drawn:
        raise UserError(f"model {name!r} draws random numbers in forward outside nn.Dropout; use nn.Dropout modules")
    for module in template.modules():
        if isinstance(module, _Dropout):
            module.recording = False
    if not isinstance(out, tuple | list) or len(out) not in (2, 3) or not all(isinstance(t, Tensor) for t in out):
        raise UserError(f"forward of model {name!r} must return (embedding, logits), or (embedding, logits, low)")
    h, logits, low = out[0], out[1], out[-1 if len(out) == 3 else 0].flatten(1)
    if h.dim() != 2 or logits.dim() != 2:
        raise UserError(
            f"forward of model {name!r} must return (embedding [B, d], logits [B, classes]); "
            f"for a batch of 2 it returned shapes {tuple(h.shape)} and {tuple(logits.shape)}"
        )
    return h, logits, low


def _check(network: ModuleNetwork, name: str) -> None:
    """That the module can be stacked, and that its output layer turns the embedding into the logits."""
    one = network.load(network.state)
    weights = {key: torch.stack([tensor, tensor]) for key, tensor in one.items()}
    x = torch.linspace(-1, 1, 2 * 2 * network.shape[0] * network.shape[1] * network.shape[2])
    noise = {key: torch.ones(2, 2, *size) for key, size in network.noise.items()}
    try:
        with torch.no_grad():
            network(weights, x.view(2, 2, *network.shape), train=True, noise=noise)
            out = network(weights, x.view(2, 2, *network.shape))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"model {name!r} runs for one client but not for a stack of them: {reason}") from error
    try:
        logits = network.head({key: weights[key] for key in network.head_names}, out.h)
        fits = torch.allclose(logits, out.logits, atol=1e-4, rtol=1e-3)
    except RuntimeError:
        fits = False
    if not fits:
        raise UserError(
            f"layer {network.output!r} of model {name!r} does not turn the embedding into the logits; "
            "name the one that does with `head`, or return what it reads as the embedding"
        )
