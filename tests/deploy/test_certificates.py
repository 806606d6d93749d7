"""Certificates and keys, as OpenSSL sees them. That Flower takes them is in test_processes.py."""

import os
import socket
import ssl
import stat
import threading

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner

from fedsap.cli import app
from fedsap.deploy.certificates import write
from fedsap.errors import UserError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates") / "new"
    write(folder, ["fl.example.org", "192.0.2.7"], ["hospital-a", "hospital_B2"])
    return folder


def call(folder, host, authority=None):
    """A TLS connection to `folder`'s server as `host`, with all that OpenSSL can check: None, or why not."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    client = ssl.create_default_context(cafile=authority or folder / "ca.crt")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def answer():
        try:
            server.wrap_socket(theirs, server_side=True).close()
        except ssl.SSLError:
            theirs.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=host):
            return None
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    finally:
        ours.close()
        thread.join(10)


@pytest.mark.parametrize("host", ["fl.example.org", "192.0.2.7", "localhost", "127.0.0.1", "::1"])
def test_the_server_is_taken_by_each_of_its_names(made, host):
    assert call(made, host) is None


@pytest.mark.parametrize("host", ["fl.example.com", "192.0.2.8", "sub.fl.example.org"])
def test_the_server_is_not_taken_by_another_name(made, host):
    assert "mismatch" in call(made, host)


def test_the_server_is_not_taken_by_who_trusts_another_authority(made, tmp_path):
    write(tmp_path, ["fl.example.org"])
    assert "issuer" in call(made, "fl.example.org", tmp_path / "ca.crt")


def test_the_servers_certificate_signs_no_further_one(made):
    authority, server = (x509.load_pem_x509_certificate((made / f"{n}.crt").read_bytes()) for n in ("ca", "server"))
    about = {c: c.extensions.get_extension_for_class(x509.BasicConstraints).value for c in (authority, server)}
    assert (about[authority].ca, about[authority].path_length, about[server].ca) == (True, 0, False)
    usage = server.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.digital_signature
    assert not usage.key_cert_sign


def test_no_certificate_outlives_its_authority(made):
    authority, server = (x509.load_pem_x509_certificate((made / f"{n}.crt").read_bytes()) for n in ("ca", "server"))
    assert 824 <= (server.not_valid_after_utc - server.not_valid_before_utc).days <= 826
    assert authority.not_valid_after_utc > server.not_valid_after_utc


def test_a_nodes_key_is_p384_in_openssh_form_with_its_name_beside(made):
    key = load_ssh_private_key((made / "nodes" / "hospital-a").read_bytes(), None)
    line = (made / "nodes" / "hospital-a.pub").read_text()
    assert isinstance(key.curve, ec.SECP384R1)
    assert load_ssh_public_key(line.encode()) == key.public_key()
    assert line.endswith(" hospital-a\n")


def test_private_keys_are_the_owners_alone(made):
    private = [made / "ca.key", made / "server.key", made / "nodes" / "hospital-a", made / "nodes" / "hospital_B2"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (made, made / "nodes")} == {0o700}


def test_private_keys_are_the_owners_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        write(tmp_path / "new", ["fl.example.org"], ["a"])
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / "new" / name).stat().st_mode) for name in ("ca.key", "server.key", "nodes/a")} == {
        0o600
    }


def test_nothing_is_overwritten_and_then_nothing_written(made):
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"server\.key: exists, and is never overwritten"):
        write(made, ["fl.example.org"], ["hospital-c"])
    with pytest.raises(UserError, match=r"hospital-a: exists"):
        write(made, nodes=["hospital-c", "hospital-a"])
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


def test_a_new_server_certificate_comes_from_the_same_authority(made, tmp_path):
    for name in ("ca.crt", "ca.key"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    new = write(tmp_path, ["new.example.org"])
    assert [path.name for path in new] == ["server.key", "server.crt"]
    assert call(tmp_path, "new.example.org", made / "ca.crt") is None


def test_a_nodes_key_needs_no_authority(tmp_path):
    assert [path.name for path in write(tmp_path, nodes=["a"])] == ["a", "a.pub"]


def test_half_an_authority_is_an_error(made, tmp_path):
    (tmp_path / "ca.crt").write_bytes((made / "ca.crt").read_bytes())
    with pytest.raises(UserError, match=r"ca\.key: cannot be read"):
        write(tmp_path, ["fl.example.org"])
    (tmp_path / "ca.key").write_bytes((made / "server.key").read_bytes())
    with pytest.raises(UserError, match=r"ca\.key: is not the key of "):
        write(tmp_path, ["fl.example.org"])
    (tmp_path / "ca.key").write_text("no key")
    with pytest.raises(UserError, match="not a key and a certificate in PEM"):
        write(tmp_path, ["fl.example.org"])


@pytest.mark.parametrize(
    "host", ["", "fl.example.org:443", "https://fl.example.org", "192.0.2.700", "a_b", "*.org", "ö.de"]
)
def test_a_host_that_is_none_is_an_error(tmp_path, host):
    with pytest.raises(UserError, match=r"--host: got .*without a port"):
        write(tmp_path, [host])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "../x", "a b", ".a", "-a", "a" * 64, "ö", "a.pub"])
def test_a_node_name_that_is_none_is_an_error(tmp_path, name):
    with pytest.raises(UserError, match="node name: got"):
        write(tmp_path, nodes=[name])
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_is_new_and_how_to_register(tmp_path):
    done = CliRunner().invoke(app, ["certificates", str(tmp_path), "--host", "localhost", "--node", "a"])
    assert done.exit_code == 0
    names = ["ca.key", "ca.crt", "server.key", "server.crt", "nodes/a", "nodes/a.pub"]
    register = f"flwr supernode register {tmp_path}/nodes/a.pub fedsap --name a"
    assert done.stdout.splitlines() == [*(str(tmp_path / name) for name in names), register]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["DIR"], "takes --host for the server's certificate, --node for a node's key, or both"),
        (["DIR", "--node", "a", "--node", "a"], "--node: got a name twice"),
        (["FILE/x", "--node", "a"], "cannot be written (Not a directory)"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(tmp_path, words, line):
    (tmp_path / "file").touch()
    places = {"DIR": str(tmp_path), "FILE/x": str(tmp_path / "file" / "x")}
    done = CliRunner().invoke(app, ["certificates", *(places.get(word, word) for word in words)])
    assert done.exit_code == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
