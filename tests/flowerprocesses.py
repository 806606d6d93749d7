"""Flower's own processes on 127.0.0.1: certificates, a SuperLink, SuperNodes, and fedsap run beside them."""

import contextlib
import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedsap.engines.flower.launch import QUIET

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
        self.environment = os.environ | QUIET | {
            "FLWR_HOME": str(self.folder / "home"),
            "PATH": f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        if self.secure:
            certificates(self.folder)

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
        self.flwr("supernode", "register", self.folder / f"{name}.pub", "here", "--name", name)

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
            ["--root-certificates", self.folder / "ca.crt", "--auth-supernode-private-key", self.folder / name]
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


def certificates(folder, nodes=("n0", "n1", "n2")):
    """A certificate authority, a certificate for 127.0.0.1, and a key pair for each node."""
    now = datetime.datetime.now(datetime.UTC)

    def key(name, form=serialization.PrivateFormat.PKCS8):
        made = ec.generate_private_key(ec.SECP384R1())
        secret = made.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        (folder / name).write_bytes(secret)
        return made

    def signed(subject, public, issuer, by, *extensions):
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    ca, server = key("ca.key"), key("server.key")
    authority = x509.BasicConstraints(ca=True, path_length=None)
    (folder / "ca.crt").write_bytes(signed("test CA", ca.public_key(), "test CA", ca, authority))
    here = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    (folder / "server.crt").write_bytes(signed("localhost", server.public_key(), "test CA", ca, here))
    for name in nodes:
        public = key(name, serialization.PrivateFormat.OpenSSH).public_key()
        (folder / f"{name}.pub").write_bytes(
            public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        )
