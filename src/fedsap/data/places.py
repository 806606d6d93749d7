"""Where data is looked for, and what is said when it is not there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fedsap.errors import UserError

Found = TypeVar("Found")


def cache_folder() -> Path:
    """The user's own folder for things that can be made again: $XDG_CACHE_HOME/fedsap or ~/.cache/fedsap."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "fedsap"


def search_path(root: Path | None = None) -> list[Path]:
    """The places in which data is looked for, first to last: `root` (--data), $FEDSAP_DATA, the user's cache folder.

    >>> search_path(Path("scans"))[0].name
    'scans'
    >>> search_path()[-1] == cache_folder()
    True
    """
    named = [root] if root is not None else []
    if os.environ.get("FEDSAP_DATA"):
        named.append(Path(os.environ["FEDSAP_DATA"]))
    return [*(place.expanduser() for place in named), cache_folder()]


def find(what: str, root: Path | None, locate: Callable[[Path], Found | None], page: str) -> Found:
    """The first thing that `locate` sees in the search path.

    A `root` that does not exist is an error even if another place has the data: a slip of the pen in --data must not
    turn into a run on other files.
    """
    places = search_path(root)
    if root is None or places[0].exists():
        for place in places:
            try:
                if (found := locate(place)) is not None:
                    return found
            except OSError as error:
                raise UserError(f"{error.filename or place}: cannot be read ({error.strerror})") from error
    looked = ", ".join(str(place) if place.exists() else f"{place} (does not exist)" for place in places)
    raise UserError(f"data.root: {what} not found; looked in {looked}; get it from {page}")
