"""What a federation on several hosts needs around Flower's own processes: certificates, node keys, a checked start."""

import importlib.util

from fedsap.errors import UserError


def need_flower(command: str) -> None:
    """Says in one line how to get Flower, where it is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise UserError(f"{command}: needs packages that are not installed: pip install 'fedsap[flower]'")
