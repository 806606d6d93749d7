"""A client's model out of a run's folder, as the run's last evaluation saw it."""

from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsap.config import Config
from fedsap.data import pixels
from fedsap.engines.simulate import CLIENTS
from fedsap.errors import UserError
from fedsap.message import Message, expand, restore
from fedsap.methods.method import State, Task
from fedsap.models.network import Weights
from fedsap.runs import Row, read_json
from fedsap.saved import Model, judged, made_method, made_network


def of_run(folder: Path, number: int | None, *, own_code: bool = False) -> Model:
    """The model of one client after the last round that the run's checkpoint has. The data is not needed.

    >>> of_run(Path("no/such/run"), 3)
    Traceback (most recent call last):
    fedsap.errors.UserError: no/such/run: no such file or folder; takes a run's folder, or a file of fedsap export
    """
    config = _config(folder)
    there, names = _json(folder / "partition.json"), _json(folder / "environment.json")
    owned: list[list[int]] = there["classes"]
    if number is None or not 0 <= number < len(owned):
        got = "nothing" if number is None else number
        raise UserError(f"--client: got {got}, takes one of the clients of {folder}, 0 to {len(owned) - 1}")
    options = {k: v for k, v in config.method.items() if k != "name"}
    method = made_method(config.method["name"], names.get("method"), options, str(folder), own_code)
    look = pixels(config.data.name, config.data.size, config.data.channels)
    classes = tuple(names["classes"])
    network = made_network(config.model, classes, look.shape, str(folder), own_code)
    found, server, done = _checkpoint(folder / "checkpoint.safetensors", number)
    task = Task(network, len(classes), len(owned), config.train.rounds)
    state = dict.fromkeys(method.init(task, torch.Generator()), Weights()) | found  # a set may be without tensors
    down = expand(method.broadcast(server, done + 1), 1)
    down |= method.address(server, done + 1, torch.tensor([number]))
    return judged(
        method,
        network,
        method.receive(state, down),
        bank=method.bank(server),
        classes=classes,
        owned=tuple(owned[number]),
        pixels=look,
        keys=config.model,
        about={
            "run": folder.resolve().name,
            "data": config.data.name,
            "seed": config.seed,
            "client": number,
            "round": done,
        },
    )


def _config(folder: Path) -> Config:
    if not folder.exists():
        raise UserError(f"{folder}: no such file or folder; takes a run's folder, or a file of fedsap export")
    path = folder / "config.json"
    if not path.exists():
        below = sorted(found.parent for found in folder.glob("*/config.json"))
        takes = f"a run's folder, such as {below[0]}" if below else "a folder that fedsap run has written"
        raise UserError(f"{folder}: holds no run; takes {takes}")
    try:
        return Config.model_validate(_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {where}: got {first['input']!r} ({first['msg']})") from None


def _json(path: Path) -> Row:
    try:
        return read_json(path)
    except UserError:
        raise UserError(f"{path}: missing or damaged; takes the folder of a whole run") from None


def _checkpoint(path: Path, number: int) -> tuple[State, Message, int]:
    """One client's state with a client axis of 1, the server's state, and the round after which they were so."""
    if not path.exists():
        raise UserError(f"{path.parent}: has no checkpoint yet; takes a run with at least one round")
    state: State = {}
    server: dict[str, Tensor] = {}
    try:
        with safe_open(path, "pt") as file:
            keys, done = list(file.keys()), int(file.metadata()["round"])
            if not any(key.startswith("state/") for key in keys):
                raise UserError(f"{path}: holds no clients, only the server; their models lie where they were trained")
            if CLIENTS not in keys:
                raise UserError(f"{path}: does not say whose weights are whose; an older fedsap has written it")
            row = file.get_tensor(CLIENTS).tolist().index(number)
            for key in keys:
                kind, _, name = key.partition("/")
                if kind == "server":
                    server[name] = file.get_tensor(key)
                elif kind == "state":
                    which, entry = name.split("/", 1)
                    state.setdefault(which, {})[entry] = file.get_slice(key)[row : row + 1]
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise UserError(f"{path}: not a checkpoint of a run ({error})") from None
    return state, restore(server), done
