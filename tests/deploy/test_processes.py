"""Flower's own processes on this machine, over TLS with node keys, directly and through nginx with the shipped file.

A SuperLink, a node or a run takes seconds to start, so they are started once and several tests look at them.
"""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fedsap.deploy.certificates import write
from fedsap.deploy.start import OFF, environment

SHIPPED = Path(__file__).parents[2] / "deploy"
BIN = Path(sys.executable).parent
PATIENCE = 60  # seconds, on a machine that has other things to do


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def changed(text, **pairs):
    """`text` with each old part in place of its new one; all must be there."""
    for old, new in pairs.values():
        assert old in text
        text = text.replace(old, str(new))
    return text


class Process:
    """One that this test has started, with what it says in a file; it is ended by its id."""

    def __init__(self, log, *words, env):
        self.log = log
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                [str(word) for word in words], env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def said(self):
        return re.sub(r"\x1b\[\d+m", "", self.log.read_text(errors="replace"))

    def wait_for(self, line):
        until = time.monotonic() + PATIENCE
        while line not in self.said():
            assert self.popen.poll() is None, f"ended with {self.popen.returncode}:\n{self.said()}"
            assert time.monotonic() < until, f"'{line}' not said:\n{self.said()}"
            time.sleep(0.1)

    def ended(self, asked=None):
        """The exit status, after signal `asked`."""
        if asked is not None:
            self.popen.send_signal(asked)
        return self.popen.wait(PATIENCE)

    def stop(self):
        """Ends what is left of it and of what it has started in its session."""
        try:
            if self.popen.poll() is None:
                self.ended(signal.SIGTERM)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait(PATIENCE)


@contextmanager
def running(log, *words, env):
    process = Process(log, *words, env=env)
    try:
        yield process
    finally:
        process.stop()


class Federation:
    """A folder with certificates, keys and logs, and the ports of this test."""

    def __init__(self, folder):
        self.folder, self.port, self.proxy_port = folder, free_port(), free_port()
        write(folder, ["localhost"], ["hospital-a", "stranger"])
        given = {**os.environ, "FLWR_HOME": str(folder / "flwr"), "XDG_DATA_HOME": str(folder / "share")}
        self.env = {key: value for key, value in given.items() if key not in OFF}
        (folder / "flwr").mkdir()
        shipped = (SHIPPED / "flwr" / "config.toml").read_text()
        settings = changed(shipped, port=("127.0.0.1:8000", f"127.0.0.1:{self.port}"), files=("/etc/fedsap", folder))
        (folder / "flwr" / "config.toml").write_text(settings)

    def fedsap(self, name, *words):
        return running(self.folder / f"{name}.log", sys.executable, "-m", "fedsap.cli", *words, env=self.env)

    def node(self, name, port, key, *words, ca="ca.crt"):
        files = ("--ca", self.folder / ca, "--key", self.folder / "nodes" / key)
        call = ("--superlink", f"localhost:{port}", "--client-port", free_port())
        return self.fedsap(name, "node", "hospital-a", *call, *files, *words)

    def flwr(self, *words):
        """Flower's own command line, with the shipped settings."""
        env = environment(self.env, BIN)
        done = subprocess.run([BIN / "flwr", *words], capture_output=True, text=True, timeout=PATIENCE, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def post(self, port, path, body=b"", kind="application/protobuf", method="POST"):
        """Status and answer of a request whose path is sent as it is written."""
        trust = ssl.create_default_context(cafile=self.folder / "ca.crt")
        line = http.client.HTTPSConnection("localhost", port, timeout=PATIENCE, context=trust)
        try:
            line.request(method, path, body, {"Content-Type": kind})
            answer = line.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            line.close()


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return Federation(tmp_path_factory.mktemp("federation"))


@pytest.fixture(scope="module")
def server(federation):
    files = {"--ca": "ca.crt", "--cert": "server.crt", "--key": "server.key"}
    tls = [word for option, name in files.items() for word in (option, federation.folder / name)]
    with federation.fedsap("server", "server", "--port", federation.port, *tls) as process:
        process.wait_for("Uvicorn running on https://127.0.0.1")
        federation.flwr("supernode", "register", f"{federation.folder}/nodes/hospital-a.pub", "fedsap")
        yield process
        assert process.ended(signal.SIGTERM) in (0, -signal.SIGTERM)  # the signal reaches Flower's process itself


def nginx_program():
    found = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        why = "no nginx on this machine: the proxy was NOT tested"
        if os.environ.get("FEDSAP_PROXY") == "required":
            pytest.fail(why)
        pytest.skip(why)
    return found


@pytest.fixture(scope="module")
def proxy(federation, server, tmp_path_factory):
    """The port of nginx with the shipped file: its addresses, ports and paths replaced, nothing else."""
    program, prefix, port = nginx_program(), tmp_path_factory.mktemp("nginx"), federation.proxy_port
    shipped = changed(
        (SHIPPED / "nginx" / "fedsap.conf").read_text(),
        superlink=("server 127.0.0.1:8000;", f"server 127.0.0.1:{federation.port};"),
        listen=("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        listen6=("listen [::]:443 ssl;", ""),
        files=("/etc/fedsap", federation.folder),
        log=("/var/log/nginx", prefix),
    )
    (prefix / "fedsap.conf").write_text(shipped)
    user = "user root;" if os.geteuid() == 0 else ""  # pytest's folders are closed to others
    places = " ".join(f"{n}_temp_path {n};" for n in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (prefix / "nginx.conf").write_text(
        f"{user} daemon off; pid nginx.pid; events {{}} http {{ {places} include fedsap.conf; }}"
    )
    words = (program, "-p", f"{prefix}/", "-c", "nginx.conf", "-e", "stderr")
    with running(prefix / "nginx.log", *words, env=dict(os.environ)) as process:
        until = time.monotonic() + PATIENCE
        while True:
            assert process.popen.poll() is None, process.said()
            assert time.monotonic() < until, process.said()
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port


@pytest.fixture(scope="module")
def turned_away(federation, server):
    """Exit status and words of three nodes that should not get in, started at once."""
    write(federation.folder / "other", ["localhost"])
    superlink, flower = f"localhost:{federation.port}", BIN / "flower-supernode"
    keyless = (flower, "--superlink", superlink, "--root-certificates", federation.folder / "ca.crt")
    with (
        federation.node("unregistered", federation.port, "stranger") as unregistered,
        federation.node("other-authority", federation.port, "hospital-a", ca="other/ca.crt") as other,
        running(
            federation.folder / "keyless.log", *keyless, "--port", free_port(), env=environment(federation.env, BIN)
        ) as no_key,
    ):
        all_ = {"unregistered": unregistered, "other authority": other, "no key": no_key}
        return {name: (process.ended(), process.said()) for name, process in all_.items()}


@pytest.mark.parametrize(
    ("who", "line"),
    [
        ("unregistered", "[code: 2004] Failed to activate SuperNode."),
        ("no key", "[code: 2001] SuperNode authentication is enabled."),
        ("other authority", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_a_node_without_the_right_key_and_certificate_does_not_get_in(turned_away, who, line):
    status, said = turned_away[who]
    assert status == 1
    assert line in said
    assert "SuperNode ID" not in said


def test_a_node_with_a_registered_key_gets_in_and_signs_off_when_stopped(federation, server):
    def status():
        (node,) = json.loads(federation.flwr("supernode", "list", "--format", "json"))["nodes"]
        return node["status"]

    with federation.node("direct", federation.port, "hospital-a") as node:
        node.wait_for("SuperNode ID")
        assert status() == "online"
        assert node.ended(signal.SIGTERM) == 0
    assert status() == "offline"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks at a process as Linux shows it")
def test_the_started_process_is_flowers_and_silent(server):
    about = Path("/proc") / str(server.popen.pid)
    assert Path(about.joinpath("cmdline").read_bytes().split(b"\0")[1].decode()).name == "flower-superlink"
    assert {f"{key}={value}".encode() for key, value in OFF.items()} <= set(
        (about / "environ").read_bytes().split(b"\0")
    )


CLOSED = (
    "/v1/control/list-nodes", "/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/runtime/responses",
    "/", "/docs", "/openapi.json", "/health", "/v1/fleet",
    "/v1/fleet/../control/list-nodes", "/v1/fleet/%2e%2e/control/list-nodes", "/v1/fleet/..%2fcontrol%2flist-nodes",
    "/v1/fleet//../control/list-nodes", "//v1//control/list-nodes", "/v1/fleet/%252e%252e/control/list-nodes",
    "/v1/fleet/x/../../control/list-nodes", "/v1/fleet/..;/control/list-nodes", "/V1/control/list-nodes",
)  # fmt: skip


def test_who_reaches_the_superlink_itself_needs_no_key_to_give_orders(federation, server):
    """What the proxy is for. Should Flower close this some day, the documents are to be mended."""
    assert federation.post(federation.port, "/v1/control/list-nodes")[0] == 200


@pytest.mark.parametrize("path", CLOSED)
def test_the_proxy_passes_nothing_but_what_is_the_nodes(federation, proxy, path):
    assert federation.post(proxy, path)[0] in (301, 403, 404)


def test_the_proxy_passes_a_nodes_calls_and_the_superlink_asks_for_its_key(federation, proxy):
    status, said = federation.post(proxy, "/v1/fleet/activate-node")
    assert (status, json.loads(said)) == (401, {"detail": "Invalid SuperNode authentication"})


def test_the_proxy_passes_no_other_method(federation, proxy):
    assert federation.post(proxy, "/v1/fleet/activate-node", method="GET")[0] == 403


def test_the_proxy_takes_a_chunk_of_an_array_and_refuses_what_is_larger_than_any_message(federation, proxy):
    assert federation.post(proxy, "/v1/fleet/push-object", bytes(6 << 20))[0] in (400, 401)
    assert federation.post(proxy, "/v1/fleet/push-object", bytes((16 << 20) + 1))[0] == 413


PYPROJECT = """
[project]
name = "echo"
version = "1.0.0"
description = "A server app that asks each node once."
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "fedsap"
[tool.flwr.app.components]
serverapp = "echo.server:app"
clientapp = "echo.client:app"
[tool.flwr.app.config]
out = ""
"""
CLIENT = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def query(message, context):
    told = ConfigRecord(dict(context.node_config))
    return Message(RecordDict({"told": told, "back": message.content["array"]}), reply_to=message)
"""
SERVER = """
import json, time
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    sent = np.random.default_rng(0).random(1_500_000)
    message = Message(RecordDict({"array": ArrayRecord({"x": Array(sent)})}), nodes[0], "query", ttl=50)
    (reply,) = grid.send_and_receive([message], timeout=50)
    same = bool((reply.content["back"]["x"].numpy() == sent).all())
    Path(context.run_config["out"]).write_text(json.dumps({"told": dict(reply.content["told"]), "same": same}))
"""


def test_a_message_of_12_mb_goes_through_the_proxy_to_a_node_and_back(federation, proxy, tmp_path):
    (tmp_path / "echo").mkdir()
    for name, text in {"pyproject.toml": PYPROJECT, "echo/client.py": CLIENT, "echo/server.py": SERVER}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "echo" / "__init__.py").touch()
    out, own = federation.folder / "out.json", federation.folder / "own.toml"
    own.write_text("[train]\nbatch = 8\n")
    with federation.node("proxied", proxy, "hospital-a", "--config", own, "--data", tmp_path) as node:
        node.wait_for("SuperNode ID")
        federation.flwr("run", str(tmp_path), "--stream", "-c", f"out='{out}'")
    store = str(federation.folder / "share" / "fedsap" / "nodes" / "hospital-a")
    told = {"name": "hospital-a", "store": store, "config": str(own), "data": str(tmp_path)}
    assert json.loads(out.read_text()) == {"told": told, "same": True}
