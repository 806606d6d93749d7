"""A certificate authority, the server's certificate, and a key pair per node.

TLS shows a node that it talks to the server; the node shows who it is by signing each request with its key. So only the
server has a certificate. `cryptography` comes with Flower.
"""

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fedsap.deploy import need_flower
from fedsap.errors import UserError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY_DAYS, SERVER_DAYS = 3650, 825
LOCAL = ("localhost", "127.0.0.1", "::1")
"""Always in the server's certificate: Flower's own processes and the proxy reach the SuperLink by these."""
_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def node_name(name: str) -> str:
    """`name`, if it can be a node's: it becomes part of file names and commands.

    >>> node_name("hospital-a")
    'hospital-a'
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"node name: got '{name}', takes up to 63 letters, digits, '_' or '-', a letter or digit first")
    return name


def subject_names(hosts: Sequence[str]) -> list["x509.GeneralName"]:
    """`hosts` and the names of this machine as a certificate has them: addresses apart from names, none twice.

    >>> [str(name.value) for name in subject_names(["fl.example.org", "192.0.2.7", "127.0.0.1"])]
    ['fl.example.org', '192.0.2.7', '127.0.0.1', 'localhost', '::1']
    """
    from cryptography import x509

    found: list[x509.GeneralName] = []
    for host in (*hosts, *LOCAL):
        try:
            name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            labels = host.split(".")
            # What ends in digits alone is an address with a slip of the pen, no name.
            if len(host) > 253 or labels[-1].isdecimal() or not all(_LABEL.fullmatch(label) for label in labels):
                raise UserError(
                    f"--host: got '{host}', takes a name such as fl.example.org or an address, without a port"
                ) from None
            name = x509.DNSName(host.lower())
        if name not in found:
            found.append(name)
    return found


def authority() -> tuple["ec.EllipticCurvePrivateKey", "x509.Certificate"]:
    """A new certificate authority that may sign servers' certificates and no further authority.

    >>> key, certificate = authority()
    >>> certificate.subject.rfc4514_string(), key.public_key() == certificate.public_key()
    ('CN=fedsap certificate authority', True)
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    name = _called("fedsap certificate authority")
    builder = (
        _certificate(name, key.public_key(), datetime.now(UTC) + timedelta(days=AUTHORITY_DAYS))
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    return key, _signed(builder, key)


def server_certificate(
    hosts: Sequence[str], signer: "ec.EllipticCurvePrivateKey", issuer: "x509.Certificate"
) -> tuple["ec.EllipticCurvePrivateKey", "x509.Certificate"]:
    """A key and a certificate for a server that is reached as any of `hosts`, and as localhost.

    >>> signer, issuer = authority()
    >>> server_certificate(["fl.example.org"], signer, issuer)[1].verify_directly_issued_by(issuer)
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP384R1())
    until = min(datetime.now(UTC) + timedelta(days=SERVER_DAYS), issuer.not_valid_after_utc)
    builder = (
        _certificate(_called("fedsap server"), key.public_key(), until)
        .issuer_name(issuer.subject)
        .add_extension(x509.SubjectAlternativeName(subject_names(hosts)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
            critical=False,
        )
    )
    return key, _signed(builder, signer)


def _called(name: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(
    subject: "x509.Name", public: "ec.EllipticCurvePublicKey", until: datetime
) -> "x509.CertificateBuilder":
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        # A node whose clock is behind shall take the certificate; its signatures may be 5 minutes off.
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(signs_certificates: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: "x509.CertificateBuilder", key: "ec.EllipticCurvePrivateKey") -> "x509.Certificate":
    from cryptography.hazmat.primitives.hashes import SHA384

    return builder.sign(key, SHA384())


def write(folder: Path, hosts: Sequence[str] = (), nodes: Sequence[str] = ()) -> list[Path]:
    """Makes what is asked for in `folder`, and says which files are new. No file that exists is touched.

    For `hosts`: `server.crt`, `server.key`, and `ca.crt`, `ca.key` unless they are there. For each of `nodes`:
    `nodes/NAME` and `nodes/NAME.pub`, as ssh-keygen writes them. Private keys are the owner's alone (0600).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in write(Path(folder), ["fl.example.org"], ["hospital-a"])]
    ['ca.key', 'ca.crt', 'server.key', 'server.crt', 'hospital-a', 'hospital-a.pub']
    """
    need_flower("certificates")
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    if not hosts and not nodes:
        raise UserError("certificates: takes --host for the server's certificate, --node for a node's key, or both")
    if len({node_name(name) for name in nodes}) < len(nodes):
        raise UserError("--node: got a name twice")
    subject_names(hosts)
    new: dict[Path, bytes] = {}

    def private(key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> bytes:
        return key.private_bytes(Encoding.PEM, form, NoEncryption())

    if hosts:
        names = [folder / "ca.key", folder / "ca.crt"]
        if any(path.exists() for path in names):
            signer, issuer = _read_authority(*names)
        else:
            signer, issuer = authority()
            new |= {names[0]: private(signer, PrivateFormat.PKCS8), names[1]: issuer.public_bytes(Encoding.PEM)}
        key, certificate = server_certificate(hosts, signer, issuer)
        new[folder / "server.key"] = private(key, PrivateFormat.PKCS8)
        new[folder / "server.crt"] = certificate.public_bytes(Encoding.PEM)
    for name in nodes:
        key = ec.generate_private_key(ec.SECP384R1())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        new[folder / "nodes" / name] = private(key, PrivateFormat.OpenSSH)
        new[folder / "nodes" / f"{name}.pub"] = public + f" {name}\n".encode()
    if taken := [path for path in new if path.exists()]:
        raise UserError(f"{taken[0]}: exists, and is never overwritten; move it away to make another")
    try:
        for path, content in new.items():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = 0o644 if path.suffix in (".crt", ".pub") else 0o600
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror})") from error
    return list(new)


def _read_authority(key_file: Path, certificate_file: Path) -> tuple["ec.EllipticCurvePrivateKey", "x509.Certificate"]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(key_file.read_bytes(), None)
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be read ({error.strerror}); a certificate is signed with ca.key and ca.crt"
        ) from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{key_file} and {certificate_file}: not a key and a certificate in PEM ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise UserError(f"{key_file}: is not the key of {certificate_file}")
    if certificate.not_valid_after_utc < datetime.now(UTC):
        raise UserError(f"{certificate_file}: ran out on {certificate.not_valid_after_utc:%Y-%m-%d}")
    return key, certificate
