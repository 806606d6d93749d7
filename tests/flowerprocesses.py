"""Flower's own processes on 127.0.0.1: certificates, a SuperLink, SuperNodes, and fedsap run beside them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from fedsap.deploy.certificates import write
from fedsap.deploy.start import environment

TOOLS = Path(sys.executable).parent


def free_port():
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


def until(ready, seconds=90, what="it"):
    """Waits for something to be so, not for ever."""
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end, f"{what} did not happen in {seconds} s"
        time.sleep(0.1)
    return found


@dataclass
class Federation:
    """Flower's processes in a folder; whatever was started is ended by its number when the test is over."""

    folder: Path
    secure: bool = True
    running: dict = field(default_factory=dict)
    environment: dict = field(init=False)

    def __post_init__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.environment = environment(os.environ, TOOLS) | {
            "FLWR_HOME": str(self.folder / "home"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        if self.secure:
            write(self.folder, ["127.0.0.1", "localhost"], ["n0", "n1", "n2"])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in list(self.running)[::-1]:
            self.end(name)

    def start(self, name, *command):
        log = (self.folder / f"{name}.log").open("ab")
        process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment,
            start_new_session=True,
        )  # fmt: skip
        log.close()
        self.running[name] = process
        return process

    def end(self, name, number=signal.SIGTERM):
        process = self.running.pop(name)
        below = descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(15)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def superlink(self, database=True):
        tls = (
            ["--ssl-ca-certfile", self.folder / "ca.crt", "--ssl-certfile", self.folder / "server.crt",
             "--ssl-keyfile", self.folder / "server.key", "--enable-supernode-auth"]
            if self.secure else ["--insecure"]
        )  # fmt: skip
        kept = ["--database", self.folder / "superlink.db"] if database else []
        self.start("superlink", "flower-superlink", "--host", "127.0.0.1", "--port", self.port, *tls, *kept)
        until(lambda: listening(self.port), what="a SuperLink that listens")

    def register(self, name):
        """The node's key becomes known to the SuperLink."""
        self.flwr("supernode", "register", self.folder / "nodes" / f"{name}.pub", "here", "--name", name)

    def flwr(self, *words):
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        how = f'root-certificates = "{self.folder / "ca.crt"}"' if self.secure else "insecure = true"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n{how}\n'
        )
        done = subprocess.run(
            ["flwr", *map(str, words)], env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def node(self, name, **config):
        """A SuperNode that has joined."""
        words = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in ({"name": name} | config).items())
        tls = (
            ["--root-certificates", self.folder / "ca.crt",
             "--auth-supernode-private-key", self.folder / "nodes" / name]
            if self.secure else ["--insecure"]
        )  # fmt: skip
        self.start(
            name, "flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--port", free_port(), *tls,
            "--node-config", words,
        )  # fmt: skip

    def run(self, out, *words, resume=False):
        """`fedsap run` as a user types it, started."""
        ca = ["--ca", self.folder / "ca.crt"] if self.secure else []
        return self.start(
            f"run-{time.monotonic_ns()}", TOOLS / "fedsap", "run", "--engine", "flower", "--superlink",
            f"127.0.0.1:{self.port}", *ca, "--out", out, *words, *(["--resume"] if resume else []),
        )  # fmt: skip

    def said(self):
        """All logs, for a test that fails."""
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("*.log")))


def listening(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def descendants(pid):
    """The processes that a process has started, and those that they have, from /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            parents.setdefault(int(words[1]), []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def named(pid, word):
    """Those of a process's descendants whose command has the word in it."""
    found = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if word in Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace"):
                found.append(child)
    return found
