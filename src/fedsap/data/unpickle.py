"""Reading a pickle of numpy arrays without letting it run anything."""

import io
import pickle
from typing import Any

import numpy as np

from fedsap.errors import UserError


def _dtype(code: str | bytes, align: bool | int = False, copy: bool | int = False) -> np.dtype[Any]:
    # Python 2 wrote 0 and 1 for the flags, which numpy 2.4 warns about, and bytes for the code.
    text = code.decode("ascii") if isinstance(code, bytes) else code
    return np.dtype(text, align=bool(align), copy=bool(copy))


# Python 3 spells bytes as _codecs.encode(text, "latin1") in protocol 2; str.encode knows text codecs only.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): str.encode,
}
# The two functions that pickles of arrays name, under protocol 2 and 5, without importing numpy's private modules.
for _package in ("numpy.core", "numpy._core"):
    _ALLOWED[f"{_package}.multiarray", "_reconstruct"] = np.empty(1).__reduce_ex__(2)[0]
    _ALLOWED[f"{_package}.numeric", "_frombuffer"] = np.empty(1).__reduce_ex__(5)[0]


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that knows plain containers, numbers, text and numpy arrays. Python 2's strings become bytes."""

    def __init__(self, payload: bytes, where: str) -> None:
        super().__init__(io.BytesIO(payload), encoding="bytes")
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise UserError(
                f"{self.where}: refused, because the pickle asks for {module}.{name}, which could run code; "
                "only plain values and numpy arrays are read"
            )
        return _ALLOWED[module, name]


def load_arrays(payload: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle of plain values and numpy arrays, with its keys as text.

    `where` names the file in errors. Raises UserError for a damaged pickle and for one that asks for anything else.

    >>> load_arrays(pickle.dumps({b"labels": [1, 2]}, protocol=2), "test_batch")
    {'labels': [1, 2]}
    """
    try:
        value = _ArraysOnly(payload, where).load()
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, not a dictionary")
        return {key.decode("ascii") if isinstance(key, bytes) else str(key): item for key, item in value.items()}
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can fail in any of a dozen ways
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{where}: damaged pickle ({reason}); fetch the file again") from error
