"""Starting Flower's SuperLink and SuperNode: what is checked first, with which arguments, in which environment.

The process becomes Flower's own, so that signals, exit status and a supervisor see that one and nothing between.
"""

import ipaddress
import os
import re
import shutil
import socket
import ssl
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedsap.deploy import need_flower
from fedsap.deploy.certificates import node_name
from fedsap.errors import UserError

OFF = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    # Else Flower makes a new environment from the network for every run, torch with CUDA included.
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""What Flower does unasked, and does not here unless the environment says otherwise."""


def data_folder() -> Path:
    """The user's own folder for things that cannot be made again: $XDG_DATA_HOME/fedsap or ~/.local/share/fedsap."""
    base = Path(os.environ.get("XDG_DATA_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "share") / "fedsap"


def environment(given: Mapping[str, str], programs: Path) -> dict[str, str]:
    """`given`, with what Flower does unasked turned off, and its programs found first: it starts its others by name.

    >>> environment({"PATH": "/bin", "FLWR_DISABLE_UPDATE_CHECK": "0"}, Path("/venv/bin"))["PATH"]
    '/venv/bin:/bin'
    """
    return {**OFF, **given, "PATH": os.pathsep.join([str(programs), given.get("PATH", os.defpath)])}


def is_local(host: str) -> bool:
    """Whether `host` is reached from this machine alone.

    >>> [is_local(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "192.0.2.7", "fl.example.org")]
    [True, True, True, False, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_arguments(
    host: str,
    port: int,
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
    database: Path | None,
    insecure: bool,
) -> list[str]:
    """The arguments of `flower-superlink`, once it is sure that it can start and is closed to others.

    The SuperLink's one port also takes orders to run code, and asks nobody who he is. So it listens on this machine
    alone; nodes come in through a proxy that passes only what is theirs.
    """
    if not is_local(host):
        raise UserError(
            f"--host: got '{host}', takes an address of this machine alone, such as 127.0.0.1: who reaches this port "
            "can run code here and on every node; let nodes in through the proxy of docs/deployment.md"
        )
    given = {"--ca": ca, "--cert": certificate, "--key": key}
    arguments = ["--host", host, "--port", str(port)]
    if insecure:
        if named := [option for option, path in given.items() if path]:
            raise UserError(f"{named[0]}: got one with --insecure, takes one or the other")
        arguments.append("--insecure")
    else:
        files = [_file(option, path, "fedsap certificates makes it") for option, path in given.items()]
        shake_hands(host, *files)
        for option, path in zip(("--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile"), files, strict=True):
            arguments += [option, str(path)]
        arguments.append("--enable-supernode-auth")
        database = database or data_folder() / "superlink.db"  # it knows the registered nodes
    if database:
        _folder("--database", database.expanduser().absolute().parent)
        arguments += ["--database", str(database.expanduser().absolute())]
    _free("--port", host, port)
    return arguments


def node_arguments(
    name: str,
    superlink: str,
    ca: Path | None,
    key: Path | None,
    data: Path | None,
    store: Path | None,
    config: Path | None,
    port: int,
    insecure: bool,
    part: str | None = None,
) -> list[str]:
    """The arguments of `flower-supernode`. What our ClientApp reads is in --node-config: name, store, data, config, and
    which part of a known data set is the node's."""
    host = _host("--superlink", superlink)
    arguments = ["--superlink", superlink, "--host", "127.0.0.1", "--port", str(port)]
    if insecure:
        if ca or key:
            raise UserError(f"{'--ca' if ca else '--key'}: got one with --insecure, takes one or the other")
        if not is_local(host):
            raise UserError(f"--insecure: got it with {superlink}, takes a server on this machine")
        arguments.append("--insecure")
    else:
        if ca:
            arguments += ["--root-certificates", str(_authority(_file("--ca", ca, "the server has made it")))]
        key = _node_key(_file("--key", key, f"fedsap certificates DIR --node {name} makes it"))
        arguments += ["--auth-supernode-private-key", str(key)]
    keys = {"name": node_name(name)}
    if config:
        keys["config"] = str(_toml(_file("--config", config, "")))
    if data:
        keys["data"] = str(data.expanduser().absolute())
        if not Path(keys["data"]).is_dir():
            raise UserError(f"--data: {data} is no folder")
    store = store or data_folder() / "nodes" / name
    keys["store"] = str(_folder("--store", store.expanduser().absolute()))
    _free("--client-port", "127.0.0.1", port)
    words = [f"{name}={_quoted(name, text)}" for name, text in keys.items()]
    if part is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", part)
        if match is None or int(match[1]) >= int(match[2]):
            raise UserError(f"--part: got '{part}', takes a part and how many there are, such as 0/4 to 3/4")
        words += [f"partition-id={match[1]}", f"num-partitions={match[2]}"]
    return [*arguments, "--node-config", " ".join(words)]


def become(program: str, arguments: Sequence[str]) -> None:
    """Replaces this process by Flower's `program`; does not return."""
    need_flower(program)
    here = Path(sys.executable).parent
    found = shutil.which(program, path=os.pathsep.join([str(here), os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise UserError(f"{program}: not found in {here} or PATH, though flwr is installed; install it again")
    os.execve(found, [found, *arguments], environment(os.environ, Path(found).parent))


def shake_hands(host: str, ca: Path, certificate: Path, key: Path) -> None:
    """A TLS handshake in memory: whether who trusts `ca` and calls `host` takes `certificate`.

    Flower's own process for server apps is such a caller. If it is turned away, nothing says so and runs never start.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        reason = (
            "is not the key of --cert" if error.reason == "KEY_VALUES_MISMATCH" else "not in PEM, or has a password"
        )
        raise UserError(f"--key: {key} {reason}") from error
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(_authority(ca))
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    calling = client.wrap_bio(to_client, to_server, server_hostname=host)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    done = False
    while not done:
        for side in (calling, answering):
            try:
                side.do_handshake()
                done = side is answering
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                why = getattr(error, "verify_message", None) or error.reason
                raise UserError(f"--cert: {certificate} is not valid for {host} by {ca}: {why}") from error


def _file(option: str, path: Path | None, help_: str) -> Path:
    if path is None:
        raise UserError(f"{option}: not given, and takes a file ({help_}); --insecure is for trials on one machine")
    path = path.expanduser().absolute()
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read ({error.strerror})") from error


def _folder(option: str, path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be made ({error.strerror})") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"{option}: {path} cannot be written to")
    return path


def _authority(path: Path) -> Path:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise UserError(f"--ca: {path} is no certificate in PEM") from error
    return path


def _node_key(path: Path) -> Path:
    need_flower("node")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (TypeError, ValueError, UnsupportedAlgorithm):  # TypeError: it has a password
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"--key: {path} takes a private key as ssh-keygen -t ecdsa -b 384 makes it, without a password")
    return path


def _toml(path: Path) -> Path:
    try:
        tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config: {path} is not TOML ({error})") from error
    return path


def _host(option: str, address: str) -> str:
    """The host of `host:port`."""
    match = re.fullmatch(r"([^:/\[\]\s]+|\[[0-9A-Fa-f:]+\]):([0-9]{1,5})", address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise UserError(f"{option}: got '{address}', takes HOST:PORT such as fl.example.org:443")
    return match[1].strip("[]")


def _free(option: str, host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Flower's server does: after a restart
        try:
            place.bind((host, port))
        except OSError as error:
            raise UserError(f"{option}: {port} on {host} cannot be used ({error.strerror})") from error


def _quoted(name: str, text: str) -> str:
    """`text` as a string of TOML that Flower's reader of --node-config takes: without its own quotation mark inside."""
    if not text.isprintable() or ("'" in text and '"' in text):
        raise UserError(f"--{name}: got {text!r}, takes a path without line breaks or both kinds of quotation marks")
    return f"'{text}'" if "'" not in text else '"' + text.replace("\\", "\\\\") + '"'
