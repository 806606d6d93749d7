"""One client's model in one file: what inference needs, away from the federation that it was trained in.

It is a safetensors file with these tensors, and a `Header` as JSON under "fedsap" in its metadata:

weights/NAME             what the client is judged by, under the names and in the layout of torch's state_dict
state/SET/NAME           what the method's logits read besides: FedNH's output layer, the model that APFL mixes in
bank@values, bank@mask   the prototypes [C, d] and which classes have one, if the method has a bank
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import fedsap
from fedsap.config import ModelKeys, validated_options
from fedsap.data import Pixels
from fedsap.errors import UserError
from fedsap.message import Message, PerClass, flatten, restore, table
from fedsap.methods import METHODS, Method, named
from fedsap.methods.method import State, View
from fedsap.models import Network, build, client
from fedsap.models.network import Features, Weights
from fedsap.runs import plainly


@dataclass(frozen=True)
class Model:
    """A client's model. Weights and state have a client axis of 1.

    weights: those the client is judged by. state: what `Method.logits` reads besides. bank: prototypes [C, d]. owned:
    numbers of the classes that the client holds. keys: what the network was built from. about: where it comes from, for
    people.
    """

    method: Method
    network: Network
    weights: Weights
    state: State
    bank: PerClass | None
    classes: tuple[str, ...]
    owned: tuple[int, ...]
    pixels: Pixels
    keys: ModelKeys
    about: Mapping[str, str | int]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The embedding [B, d] that is compared with the bank, and the logits [B, C]; x: [B, H, W, C], normalised."""
        return _answers(self, x, self.state)


class Header(BaseModel):
    """What a file says of its tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1  # of the format
    fedsap: str = fedsap.__version__
    method: str
    origin: str  # of the method's class, module:Class
    options: dict[str, Any]
    model: ModelKeys
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    background: int
    classes: tuple[str, ...]
    owned: tuple[int, ...]
    sets: tuple[str, ...]  # of the state; some may be without tensors
    about: dict[str, str | int]


class _Read(State):
    """A state that holds what has been read of another one."""

    def __init__(self, whole: State) -> None:
        super().__init__()
        self._whole = whole

    def __missing__(self, name: str) -> Weights:
        self[name] = self._whole[name]
        return self[name]


@torch.no_grad()
def judged(
    method: Method,
    network: Network,
    state: State,
    *,
    bank: PerClass | None,
    classes: tuple[str, ...],
    owned: tuple[int, ...],
    pixels: Pixels,
    keys: ModelKeys,
    about: Mapping[str, str | int],
) -> Model:
    """The model of one client, as an evaluation sees it.

    `state` is the client's (a client axis of 1) after `Method.receive`. Of its sets only those are kept that the
    method's logits read; a forward pass over one image shows which they are.
    """
    weights = {k: v.detach() for k, v in method.model(state).items()}
    read = _Read(state)
    whole = Model(method, network, weights, read, bank, classes, owned, pixels, keys, about)
    x = torch.linspace(-1, 1, pixels.shape[0] * pixels.shape[1] * pixels.shape[2]).view(1, *pixels.shape)
    x = x.to(next(iter(weights.values())))
    _, logits = whole(x)
    kept = {name: {k: v.detach() for k, v in part.items()} for name, part in read.items()}
    if not torch.equal(_answers(whole, x, kept)[1], _answers(whole, x, state)[1]):  # read in a way that did not show
        kept = {name: {k: v.detach() for k, v in part.items()} for name, part in state.items()}
    if logits.shape != (1, len(classes)):
        raise UserError(
            f"method {method.name!r} gives logits of shape {tuple(logits.shape)} for {len(classes)} classes"
        )
    return Model(method, network, weights, kept, bank, classes, owned, pixels, keys, about)


def _answers(model: Model, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
    def forward(weights: Weights, view: View | None = None, *, train: bool = False) -> Features:  # noqa: ARG001
        return model.network(weights, x.unsqueeze(0) if view is None else view.x)

    out = forward(model.weights)
    logits = model.method.logits(out, state, forward)
    h = model.method.represent(out)[model.method.embedding]
    return h.squeeze(0), logits.squeeze(0)


def save_model(path: Path, model: Model) -> None:
    """Writes the model to a file, in one step."""
    header = Header(
        method=model.method.name,
        origin=f"{type(model.method).__module__}:{type(model.method).__qualname__}",
        options=asdict(model.method),
        model=model.keys.model_copy(update={"weights": "none"}),  # a file of that machine, and no longer needed
        **asdict(model.pixels),
        classes=model.classes,
        owned=model.owned,
        sets=tuple(model.state),
        about=dict(model.about),
    )
    tensors = {f"weights/{k}": v for k, v in model.network.export(client(model.weights, 0)).items()}
    for name, some in model.state.items():
        tensors |= {f"state/{name}/{k}": v[0] for k, v in some.items()}
    if model.bank is not None:
        tensors |= flatten({"bank": model.bank})
    tensors = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
    part = path.with_name(f".{path.name}.part")
    with plainly(path):
        try:
            save_file(tensors, part, {"fedsap": header.model_dump_json()})
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def load_model(path: Path, *, own_code: bool = False) -> Model:
    """The model that `save_model` wrote. With `own_code`, a method or a network that is not fedsap's is imported from
    where the file says; without, such a file is refused, because it could name any code."""
    header, tensors = _read(path)
    method = made_method(header.method, header.origin, header.options, str(path), own_code)
    network = made_network(header.model, header.classes, header.shape, str(path), own_code)
    try:
        loaded = network.load(_under("weights/", tensors))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    state = {name: {k: v[None] for k, v in _under(f"state/{name}/", tensors).items()} for name in header.sets}
    message: Message = restore({k: v for k, v in tensors.items() if k.startswith("bank@")})
    model = Model(
        method,
        network,
        {k: v[None] for k, v in loaded.items()},
        state,
        table(message, "bank") if message else None,
        header.classes,
        header.owned,
        Pixels(header.shape, header.mean, header.std, header.background),
        header.model,
        header.about,
    )
    _check(path, model)
    return model


def _read(path: Path) -> tuple[Header, dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            header = Header.model_validate_json((file.metadata() or {})["fedsap"])
            return header, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (it is no dictionary)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; takes a file that fedsap export has written") from None
    except KeyError:
        raise UserError(f"{path}: a safetensors file of something else; takes one of fedsap export") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a model that fedsap export has written ({error})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{path}: {where}: got {first['input']!r} ({first['msg']}); fedsap {fedsap.__version__} cannot read it"
        ) from None


def _under(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


@torch.no_grad()
def _check(path: Path, model: Model) -> None:
    """That the parts fit together, by one pass over a blank image."""
    pixels, classes = model.pixels, len(model.classes)
    fits = len(pixels.mean) == len(pixels.std) == pixels.shape[2] and all(0 <= c < classes for c in model.owned)
    try:
        h, logits = model(torch.zeros(1, *pixels.shape))
    except (RuntimeError, KeyError, IndexError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: its parts do not fit together ({reason}); export it again") from None
    fits = fits and logits.shape == (1, classes)
    if model.bank is not None:
        fits = fits and model.bank.values.shape == (classes, h.shape[1]) and model.bank.mask.shape == (classes,)
    if not fits:
        raise UserError(f"{path}: its parts do not fit together; export it again")


def made_method(name: str, origin: str | None, options: Mapping[str, Any], where: str, own_code: bool) -> Method:
    """The method with its options. `where` is who asks; `origin` is imported if the method is not one of fedsap's."""
    if name not in METHODS:
        if origin is None:
            raise UserError(f"{where}: method {name!r} is not part of fedsap, and it is not said where it comes from")
        _allow(origin, where, own_code)
        if named(origin) != name:
            raise UserError(f"{where}: {origin} is no method {name!r}")
    return METHODS[name](**validated_options(name, options))


def made_network(
    keys: ModelKeys, classes: tuple[str, ...], shape: tuple[int, int, int], where: str, own_code: bool
) -> Network:
    """The network of these keys, without files of initial weights."""
    if ":" in keys.name:
        _allow(keys.name, where, own_code)
    options = keys.model_dump(exclude={"name", "weights"}, exclude_none=True)
    return build(keys.name, classes=len(classes), shape=shape, **options)


def _allow(code: str, where: str, own_code: bool) -> None:
    if not own_code:
        raise UserError(f"{where}: needs {code}, which is not part of fedsap; --own-code imports it, if you trust it")
