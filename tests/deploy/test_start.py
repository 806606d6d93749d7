"""What Flower's processes would be started with, and what is refused before."""

import os
import shlex
import socket
import sys
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

from fedsap.cli import app
from fedsap.deploy.certificates import write
from fedsap.deploy.start import OFF, _quoted, environment, node_arguments, server_arguments
from fedsap.errors import UserError

SYSTEMD = Path(__file__).parents[2] / "deploy" / "systemd"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    write(folder, ["fl.example.org"], ["hospital-a"])
    return folder


@pytest.fixture(autouse=True)
def user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    return tmp_path / "share" / "fedsap"


@pytest.fixture
def port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def server(made, port, **change):
    given_ = {"ca": made / "ca.crt", "certificate": made / "server.crt", "key": made / "server.key"}
    rest = {"host": "127.0.0.1", "port": port, "database": None, "insecure": False}
    return server_arguments(**{**given_, **rest, **change})


def node(made, port, **change):
    rest = {"superlink": "fl.example.org:443", "ca": made / "ca.crt", "key": made / "nodes" / "hospital-a"}
    rest |= {"data": None, "store": None, "config": None, "port": port, "insecure": False}
    return node_arguments(**{"name": "hospital-a", **rest, **change})


def test_a_server_has_tls_node_keys_and_a_file_that_remembers_them(made, port, user):
    read = _parse_args_run_superlink().parse_args(server(made, port))
    assert (read.host, read.port, read.insecure, read.enable_supernode_auth) == ("127.0.0.1", port, False, True)
    files = [read.ssl_ca_certfile, read.ssl_certfile, read.ssl_keyfile]
    assert files == [str(made / name) for name in ("ca.crt", "server.crt", "server.key")]
    assert read.database == str(user / "superlink.db")
    assert user.is_dir()


def test_a_server_for_trials_has_neither_and_stays_on_this_machine(made, port):
    bare = {"ca": None, "certificate": None, "key": None, "insecure": True}
    read = _parse_args_run_superlink().parse_args(server(made, port, **bare))
    assert (read.host, read.insecure, read.enable_supernode_auth) == ("127.0.0.1", True, False)
    with pytest.raises(UserError, match=r"--host: got '0\.0\.0\.0'"):
        server(made, port, **bare, host="0.0.0.0")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "fl.example.org", ""])
def test_a_server_does_not_listen_where_others_could_give_it_orders(made, port, host):
    with pytest.raises(UserError, match=r"takes an address of this machine alone.*let nodes in through the proxy"):
        server(made, port, host=host)


def test_a_certificate_that_flowers_own_processes_would_refuse_is_refused_before(made, port, tmp_path):
    write(tmp_path, ["localhost"])
    with pytest.raises(UserError, match=r"--cert: .*server\.crt is not valid for 127\.0\.0\.1 by .*issuer"):
        server(made, port, ca=tmp_path / "ca.crt")
    with pytest.raises(UserError, match=r"--cert: .* is not valid for 127\.0\.0\.2 by .*mismatch"):
        server(made, port, host="127.0.0.2")
    with pytest.raises(UserError, match=r"--key: .*ca\.key is not the key of --cert"):
        server(made, port, key=made / "ca.key")
    with pytest.raises(UserError, match=r"--ca: .*ca\.key is no certificate"):
        server(made, port, ca=made / "ca.key")
    with pytest.raises(UserError, match=r"--key: .*server\.crt not in PEM, or has a password"):
        server(made, port, key=made / "server.crt")


def test_a_node_calls_with_its_key_and_tells_its_app_who_it_is(made, port, tmp_path, user):
    (tmp_path / "node.toml").write_text("[train]\nbatch = 8\n")
    read = _parse_args_run_supernode().parse_args(node(made, port, config=tmp_path / "node.toml", data=tmp_path))
    assert (read.superlink, read.insecure, read.host, read.port) == ("fl.example.org:443", False, "127.0.0.1", port)
    assert read.root_certificates == str(made / "ca.crt")
    assert read.auth_supernode_private_key == str(made / "nodes" / "hospital-a")
    told = {"name": "hospital-a", "store": str(user / "nodes" / "hospital-a")}
    told |= {"config": str(tmp_path / "node.toml"), "data": str(tmp_path)}
    assert parse_config_args([read.node_config]) == told
    assert Path(told["store"]).stat().st_mode & 0o777 == 0o700


def test_a_node_without_ca_trusts_public_authorities(made, port):
    assert "--root-certificates" not in node(made, port, ca=None)


def test_a_node_for_trials_has_no_key_and_calls_this_machine(made, port):
    bare = {"ca": None, "key": None, "insecure": True}
    read = _parse_args_run_supernode().parse_args(node(made, port, **bare, superlink="127.0.0.1:8000"))
    assert (read.insecure, read.auth_supernode_private_key) == (True, None)
    with pytest.raises(
        UserError, match=r"--insecure: got it with fl\.example\.org:443, takes a server on this machine"
    ):
        node(made, port, **bare)


@given(st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1))
def test_a_path_reaches_the_app_as_it_is_or_is_refused(text):
    try:
        quoted = _quoted("store", text)
    except UserError:
        assert {"'", '"'} <= set(text)
    else:
        assert parse_config_args([f"name='a' store={quoted} data='b'"]) == {"name": "a", "store": text, "data": "b"}


@pytest.mark.parametrize("path", ["a\nb", "a\x00", 'it\'s "it"'])
def test_a_path_that_flower_cannot_read_is_refused(path):
    with pytest.raises(UserError, match=r"--data: got .*takes a path without line breaks"):
        _quoted("data", path)


def test_flower_sends_nothing_and_installs_nothing_unless_told_to():
    assert OFF.items() <= environment({"HOME": "/x"}, Path("/venv/bin")).items()
    assert environment({"FLWR_TELEMETRY_ENABLED": "1"}, Path("/venv/bin"))["FLWR_TELEMETRY_ENABLED"] == "1"


def test_flowers_programs_are_found_without_an_activated_environment():
    assert environment({}, Path("/venv/bin"))["PATH"].split(os.pathsep)[0] == "/venv/bin"


def mistakes(made, tmp_path):
    tls = f"--ca {made}/ca.crt --cert {made}/server.crt --key {made}/server.key"
    key = f"--key {made}/nodes/hospital-a"
    call = "node hospital-a --superlink fl.example.org:443"
    (tmp_path / "file").write_text("a = = b")
    return {
        "server": "--ca: not given, and takes a file (fedsap certificates makes it)",
        f"server --ca {made}/ca.crt --cert {made}/server.crt": "--key: not given",
        f"server {tls} --insecure": "--ca: got one with --insecure",
        f"server {tls.replace('server.crt', 'none')}": "--cert: ",
        f"server {tls} --host fl.example.org": "--host: got 'fl.example.org'",
        f"server {tls} --database {tmp_path}/file/x/superlink.db": "--database: ",
        f"{call}": "--key: not given, and takes a file (fedsap certificates DIR --node hospital-a makes it)",
        f"{call} {key} --insecure": "--key: got one with --insecure",
        f"{call} --key {made}/server.key": "takes a private key as ssh-keygen -t ecdsa -b 384 makes it",
        f"{call} --key {made}/nodes/hospital-a.pub": "takes a private key as ssh-keygen",
        f"{call} --key {tmp_path}": "cannot be read (Is a directory)",
        f"{call} {key} --ca {made}/none": "cannot be read (No such file or directory)",
        f"{call} {key} --ca {made}/ca.key": "is no certificate in PEM",
        f"{call} {key} --config {tmp_path}/file": "file is not TOML",
        f"{call} {key} --data {tmp_path}/file": "is no folder",
        f"{call} {key} --store {tmp_path}/file/x": "--store: ",
        f"node ../a --superlink fl.example.org:443 {key}": "node name: got '../a'",
        f"node a {key} --superlink fl.example.org": "takes HOST:PORT such as fl.example.org:443",
        f"node a {key} --superlink https://fl.example.org:443": "takes HOST:PORT",
        f"node a {key} --superlink fl.example.org:0": "takes HOST:PORT",
        f"node a {key} --superlink fl.example.org:65536": "takes HOST:PORT",
    }


def test_a_mistake_is_one_line_and_status_2(made, tmp_path):
    for words, line in mistakes(made, tmp_path).items():
        done = CliRunner().invoke(app, shlex.split(words))
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1), words
        assert line in done.stderr, words


@pytest.mark.parametrize(
    "words", ["server --insecure --port", "node a --superlink 127.0.0.1:1 --insecure --client-port"]
)
def test_a_port_in_use_is_one_line_and_status_2(words):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, [*words.split(), number])
    assert done.exit_code == 2
    assert f"port: {number} on 127.0.0.1 cannot be used (Address already in use)" in done.stderr


@pytest.mark.parametrize(
    "words", ["server --insecure", "node a --superlink 127.0.0.1:1 --insecure", "certificates . --node a"]
)
def test_without_flower_every_command_says_how_to_get_it(monkeypatch, words):
    monkeypatch.setitem(sys.modules, "flwr", None)
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2
    name = words.split()[0]
    assert done.stderr == f"fedsap: {name}: needs packages that are not installed: pip install 'fedsap[flower]'\n"


def test_flower_without_its_programs_is_one_line(monkeypatch, tmp_path, port):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["server", "--insecure", "--port", str(port)])
    assert done.exit_code == 2
    assert "not found in" in done.stderr


@pytest.mark.parametrize("unit", sorted(SYSTEMD.glob("*.service")), ids=lambda path: path.name)
def test_the_shipped_units_call_commands_that_there_are(unit):
    (line,) = [row for row in unit.read_text().splitlines() if row.startswith("ExecStart=")]
    text = line.removeprefix("ExecStart=").replace("%i", "hospital-a").replace("%d", "/run/credentials/x")
    text = text.replace("${SUPERLINK}", "fl.example.org:443").replace("${CLIENT_PORT}", "9094")
    assert not {"%", "$"} & set(text)
    program, name, *words = shlex.split(text)
    assert Path(program).name == "fedsap"
    read = get_command(app).commands[name].make_context(name, words).params
    assert (read["insecure"], str(read["ca"])) == (False, "/etc/fedsap/ca.crt")


def test_a_part_of_a_known_data_set(tmp_path, port):
    config = node_arguments("a", "127.0.0.1:8000", None, None, None, tmp_path, None, port, True, "1/4")[-1]
    assert config.endswith(" partition-id=1 num-partitions=4")


@pytest.mark.parametrize("part", ["4/4", "1", "a/b", "-1/4", ""])
def test_a_part_that_cannot_be_is_said_to_be_none(tmp_path, port, part):
    with pytest.raises(UserError, match="--part: got"):
        node_arguments("a", "127.0.0.1:8000", None, None, None, tmp_path, None, port, True, part)
