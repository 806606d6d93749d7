"""Methods and networks from the user's own modules."""

import importlib
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fedsap.errors import UserError


def find(key: str, name: str) -> Any:
    """What `package.module:attribute` names; modules in the current folder are found too.

    >>> find("model.name", "collections:OrderedDict").__name__
    'OrderedDict'
    """
    place, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(place)
    except (ImportError, ValueError) as error:
        raise UserError(f"{key} is {name!r}; importing {place!r} failed: {error}") from error
    found = getattr(module, attribute, None)
    if found is None:
        near = get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"{key} is {name!r}; {place!r} has no {attribute!r}{hint}")
    return found
