"""`fedsap run --engine flower`: hands runs to a SuperLink, of its own for a simulation, and watches their folders."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedsap.config import Config, merged
from fedsap.deploy import need_flower
from fedsap.deploy.start import environment as environment_of
from fedsap.errors import UserError
from fedsap.methods import place_of
from fedsap.runs import Row, Run, Stopped, read_json

STATUS, LOG, STOP = "flower.json", "flower.log", "stop"  # beside the runs: why they ended, what Flower said, a request
APP = """[project]
name = "fedsap-run"
version = "1.0.0"
description = "What fedsap run hands to Flower"
license = "Apache-2.0"
dependencies = ["flwr"]

[tool.flwr.app]
publisher = "fedsap"

[tool.flwr.app.components]
serverapp = "fedsap.engines.flower.server_app:app"
clientapp = "fedsap.engines.flower.client_app:app"

[tool.flwr.app.config]
"""


@dataclass(frozen=True)
class SuperLink:
    """Where a SuperLink is; `ca` is the certificate that it is known by, None for one without TLS."""

    address: str
    ca: Path | None = None


def play(
    runs: Sequence[Run],
    layer: Mapping[str, Any],
    folder: Path,
    *,
    superlink: SuperLink | None,
    resume: bool,
    hear: Callable[[Run, Row], None],
    stop: Callable[[], bool],
) -> None:
    """Has the runs played on Flower, and passes on what appears in their folders. They are written where the SuperLink
    is: this is meant for the same machine."""
    need_flower("--engine flower")
    if superlink is not None:
        _answers(superlink)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name in (STATUS, STOP):
        (folder / name).unlink(missing_ok=True)
    config = runs[0].config
    root = config.data.root  # from where the user is, not from where Flower runs its processes
    job = {
        "layer": layer if root is None else merged(layer, {"data": {"root": str(Path(root).absolute())}}),
        "methods": list(dict.fromkeys(place_of(one.config.method["name"]) for one in runs)),
        "seeds": list(dict.fromkeys(one.config.seed for one in runs)),
    }
    asked = {"job": json.dumps(job), "out": str(folder), "resume": resume, "store": str(folder / "nodes")}
    with tempfile.TemporaryDirectory(prefix="fedsap-flower-") as scratch, contextlib.ExitStack() as stack:
        home = Path(scratch)
        path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])  # the user's methods and networks
        # At rest this takes a tenth of a core, so it is for our own SuperLink alone, which ends with the run.
        mine = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "FLWR_HOME": str(home / "flwr"), "PYTHONPATH": path}
        environment = environment_of(os.environ, Path(sys.executable).parent) | mine
        log = stack.enter_context((folder / LOG).open("ab"))
        simulated = superlink is None
        where = superlink or stack.enter_context(_own_superlink(environment, log))
        app = _app(home / "app", asked if simulated else {k: v for k, v in asked.items() if k != "store"})
        _connection(home / "flwr", where)
        command = ["flwr", "run", str(app), "here", "--stream"]
        if simulated:
            command += ["--federation-config", _nodes(config)]
        flower = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _watch(flower, runs, folder, hear, stop)
        finally:
            _end(flower)
    missing = [one for one in runs if one.result is None]
    if (folder / STATUS).exists():
        said = read_json(folder / STATUS)
        raise (UserError if said.get("user") else Stopped)(str(said.get("why")))
    if missing and (folder / STOP).exists():
        (folder / STOP).unlink()
        raise Stopped(f"stopped after round {missing[0].done}")
    if missing:
        raise Stopped(f"Flower ended the run{_last_error(folder / LOG)}; {folder / LOG} says more")


def _answers(superlink: SuperLink) -> None:
    """Complains of a SuperLink that is not there, before anything is written."""
    host, _, port = superlink.address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--superlink: got '{superlink.address}', takes HOST:PORT such as 127.0.0.1:8000")
    if superlink.ca is not None and not superlink.ca.is_file():
        raise UserError(f"--ca: no file {superlink.ca}; takes the certificate of the authority, ca.crt")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"--superlink: {superlink.address} does not answer ({why}); fedsap server starts one") from None


def _last_error(log: Path) -> str:
    """The last line of a log that names an error, if there is one."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [line.strip() for line in lines if re.match(r"\s*([\w.]+Error|[\w.]+Exception|OSError|Error):? ", line)]
    return f" ({found[-1][:200]})" if found else ""


def _watch(
    flower: subprocess.Popen[bytes],
    runs: Sequence[Run],
    folder: Path,
    hear: Callable[[Run, Row], None],
    stop: Callable[[], bool],
) -> None:
    """Passes on new rows until Flower is through."""
    seen = {one: len(one.rows()) for one in runs}
    while True:
        over = flower.poll() is not None
        for one in runs:
            rows = one.rows()
            for row in rows[seen[one] :]:
                hear(one, row)
            seen[one] = len(rows)
        if over:
            return
        if stop():
            (folder / STOP).touch()
        time.sleep(0.3)


@contextlib.contextmanager
def _own_superlink(environment: Mapping[str, str], log: Any) -> Iterator[SuperLink]:
    """A SuperLink for one simulation, on this machine's own address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        _healthy(process, port)
        yield SuperLink(f"127.0.0.1:{port}")
    finally:
        _end(process, group=True)


def _healthy(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return
        time.sleep(0.2)
    raise Stopped(f"Flower's SuperLink did not start (status {process.poll()})")


def _end(process: subprocess.Popen[bytes], group: bool = False) -> None:
    """Ends a process, and what it has started, if it is still there."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            if group:
                os.killpg(process.pid, number)
            elif process.poll() is None:
                process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue
        if not group:
            return


def _app(folder: Path, asked: Mapping[str, Any]) -> Path:
    """The app that Flower is given: no code, only where ours is and what to do."""
    folder.mkdir(parents=True)
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in asked.items()]
    (folder / "pyproject.toml").write_text(APP + "\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _connection(home: Path, where: SuperLink) -> None:
    home.mkdir(parents=True, exist_ok=True)
    how = f"root-certificates = {json.dumps(str(where.ca.absolute()))}" if where.ca else "insecure = true"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = {json.dumps(where.address)}\n{how}\n',
        encoding="utf-8",
    )


def _nodes(config: Config) -> str:
    """A simulation's size, in Flower's words."""
    nodes = min(config.flower.nodes or config.partition.clients, config.partition.clients)
    words = [f"num-supernodes={nodes}", "client-resources-num-cpus=1"]
    if torch.cuda.is_available() and config.device != "cpu":
        words.append(f"client-resources-num-gpus={1 / max(1, min(nodes, os.cpu_count() or 1)):.4f}")
    return " ".join(words)
