"""Files of weights: a torch .pth or a numpy .npz, read once per process however many clients ask."""

import pickle
import zipfile
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsap.errors import UserError
from fedsap.models import layout
from fedsap.models.network import Weights

_DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    RuntimeError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
)


def read(path: str | Path, shapes: layout.Shapes, ignore: tuple[str, ...] = ()) -> Weights:
    """The file's entries in this package's layout, float32. They are shared by all callers: copy before changing them.

    Every name in `shapes` must be there with that shape; names that begin with one in `ignore` are passed over.

    >>> read("no/such/file.npz", {})
    Traceback (most recent call last):
    fedsap.errors.UserError: model.weights: no/such/file.npz is not a file; it takes a .pth or .npz file
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"model.weights: {path} is not a file; it takes a .pth or .npz file")
    status = file.stat()
    return _read(file, status.st_mtime_ns, status.st_size, tuple(shapes.items()), ignore)


@lru_cache(maxsize=2)
def _read(
    file: Path, _modified: int, size: int, shapes: tuple[tuple[str, tuple[int, ...]], ...], ignore: tuple[str, ...]
) -> Weights:
    try:
        state = _arrays(file) if file.suffix == ".npz" else _tensors(file)
    except _DAMAGE as error:
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".") or type(error).__name__
        raise UserError(f"model.weights: {file} ({size} bytes) cannot be read as {file.suffix}: {reason}") from error
    weights = layout.load(state, dict(shapes), f"model.weights: {file}", ignore)
    return {name: tensor.to(torch.float32) for name, tensor in weights.items()}


def _arrays(file: Path) -> Mapping[str, Tensor]:
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def _tensors(file: Path) -> Mapping[str, Tensor]:
    if file.suffix != ".pth":
        raise ValueError("a name ending in .pth or .npz is needed")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, KeyError):  # torch would now advise to read it all the same
        raise ValueError(
            "it holds something else than plain tensors, and is not read, since that could run code; "
            "takes what torch.save writes of a state_dict"
        ) from None
    if not isinstance(state, Mapping):
        raise ValueError(f"it holds {type(state).__name__}, not a dictionary of tensors")
    return state
