"""Files that are there whole or not at all, and failed writes in words."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from fedsap.errors import UserError


@contextlib.contextmanager
def plainly(path: Path) -> Iterator[None]:
    """Failed writes in words."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror or error}; make room or choose another place"
        ) from None
    except SafetensorError as error:
        raise UserError(f"{path}: cannot be written: {error}; make room or choose another place") from None


def write(path: Path, content: str | bytes) -> None:
    """Replaces a file in one step: a reader finds the old content or the new. It is readable to whom new files are.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder) / "a.json", "{}")
    ...     [path.name for path in Path(folder).iterdir()]
    ['a.json']
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: cannot be written: is no file; choose another place")  # a device, a folder
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with plainly(path):
        try:
            with scratch.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
