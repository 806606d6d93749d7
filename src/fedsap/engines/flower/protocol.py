"""What a server asks of a node and what a node answers: a small record, and tensors.

The record is JSON and is checked field by field on arrival. The tensors travel as one safetensors file in one Flower
array, whatever their number: a Flower message costs two requests for each array it has. That format holds no code, and
says more than its length only at the price of not being read.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedsap.config import Config
from fedsap.message import Message, Packed, pack, unpack
from fedsap.training.rounds import Judge

RECORD = 2**20  # bytes that a record may have

Name = Annotated[str, Field(min_length=1, max_length=200)]
RunId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Place = Annotated[int, Field(ge=0)]  # a client's id, or a round


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")


class Hello(Record):
    """Who is there? The answer is an `Introduction`."""

    kind: Literal["hello"] = "hello"
    config: Config


class Introduction(Record):
    """A node says its name, the names of its classes, and which part of a known data set it has: `part` i of `parts`;
    none, if its data is its own."""

    name: Name
    classes: Annotated[list[Name], Field(min_length=1, max_length=65535)]
    shape: tuple[Place, Place, Place]
    part: Place | None = None
    parts: Annotated[int, Field(ge=1)] | None = None
    version: Name


class Job(Record):
    """What a node is to do with some of its clients in round `round`.

    method: where the method's class is, for those that are not fedsap's own.
    since: for each client, the round after which its state is to be taken up; 0: the beginning.
    train: those that train; what the others are told is for `judge`.
    judge: evaluate all of them first, with what was received, as the end of the round before.
    told: the payload has a bank besides, since what is broadcast has none in it (`bank`), or there is none (`none`).
    """

    kind: Literal["greet", "train", "judge"]
    run: RunId
    round: Place
    config: Config
    method: str = ""
    classes: list[Name]
    total: Annotated[int, Field(ge=1)]
    clients: Annotated[list[Place], Field(min_length=1)]
    since: list[Place]
    train: list[Place] = []
    judge: Judge | None = None
    told: Literal["down", "bank", "none"] = "down"


class Figures(Record):
    """An evaluation, client by client: `accuracy` by measure, and more numbers by name; None where there are none."""

    accuracy: dict[Name, list[Annotated[float, Field(ge=0, le=1)] | None]]
    noted: dict[Name, list[float | None]] = {}


class Answer(Record):
    """What a node says to a `Job`; tensors are in the payload.

    clients: those that did what was asked, ascending; the others are in `failed`, with the reason. lost: those of
    them whose state is gone. judged: those that `figures` are of. hash: of the partition, so that all mean the same.
    seconds: what the work took.
    """

    run: RunId
    round: Place
    clients: list[Place]
    failed: dict[Place, Annotated[str, Field(max_length=2000)]] = {}
    lost: list[Place] = []
    terms: dict[Name, list[float]] = {}
    pool: dict[Name, list[float | None]] = {}
    judged: list[Place] = []
    figures: Figures | None = None
    hash: Annotated[str, Field(max_length=64)] = ""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class Refusal(Record):
    """A node cannot do what it was asked to."""

    why: Annotated[str, Field(min_length=1, max_length=2000)]


class Bad(ValueError):
    """What came cannot be what was asked for; says why."""


def read(text: str, *kinds: type[Record]) -> Record:
    """A record that is of one of the kinds.

    >>> read('{"why": "no data"}', Answer, Refusal).why
    'no data'
    """
    if len(text) > RECORD:
        raise Bad(f"a record of {len(text):,} characters; takes {RECORD:,} at most")
    wrong: ValidationError | None = None
    try:
        keys = set(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise Bad(f"a record that is no JSON object ({error})") from None
    for kind in kinds:
        needed = {name for name, field in kind.model_fields.items() if field.is_required()}
        if needed <= keys:
            try:
                return kind.model_validate_json(text)
            except ValidationError as error:
                wrong = wrong or error
    if wrong is None:
        raise Bad(f"a record with {', '.join(sorted(map(str, keys)))[:200] or 'nothing in it'}")
    first = wrong.errors()[0]
    where = ".".join(map(str, first["loc"]))
    raise Bad(f"{where} {str(first['input'])[:80]!r}: {first['msg']}")


def written(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as one file; `tensors_of` reads it. None are no bytes.

    >>> written({})
    b''
    """
    return save({k: v.detach().cpu().contiguous() for k, v in tensors.items()}) if tensors else b""


def tensors_of(payload: bytes) -> dict[str, Tensor]:
    """The tensors of a payload; their claimed sizes have to add up to what is there.

    >>> tensors_of(written({"a": torch.ones(2)}))["a"].tolist()
    [1.0, 1.0]
    """
    if not payload:
        return {}
    try:
        return load(payload)
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise Bad(f"a payload that is not in the safetensors format ({error})") from None


def packed_for(place: str, message: Message) -> Packed:
    """One party's message, packed, under names that begin with `place`."""
    return {f"{place}/{name}": value for name, value in pack(message).items()}


def unpacked_of(place: str, tensors: Mapping[str, Tensor], classes: int) -> Message:
    """The message that `packed_for` was given.

    >>> unpacked_of("down", packed_for("down", {"w": torch.zeros(1)}), classes=2)
    {'w': tensor([0.])}
    """
    start = f"{place}/"
    try:
        return unpack({k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}, classes)
    except ValueError as error:
        raise Bad(str(error)) from None


def floats(values: Tensor) -> list[Any]:
    """A row of numbers for a record: those that are none are None.

    >>> floats(torch.tensor([0.5, torch.nan]))
    [0.5, None]
    """
    return [v if v == v and abs(v) != float("inf") else None for v in values.tolist()]


def numbers_of(values: list[float | None]) -> Tensor:
    """The inverse of `floats`."""
    return torch.tensor([float("nan") if v is None else v for v in values], dtype=torch.float32)
