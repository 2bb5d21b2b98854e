"""The PEM files of TLS: their settings, and reading and checking them. Each service makes its own credentials
of them.
"""

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----")
_KEY = re.compile(rb"-----BEGIN ([A-Z]+ )*PRIVATE KEY-----")
_ENCRYPTED = re.compile(rb"-----BEGIN ENCRYPTED PRIVATE KEY-----|^Proc-Type: 4,ENCRYPTED", re.MULTILINE)

Contents = tuple[bytes, ...]


class TlsError(ValueError):
    """A file that cannot be used. The text is one sentence without its full stop, and says which file."""


@dataclass(frozen=True, slots=True)
class CertKeyFiles:
    """A service's certificate, followed by the intermediate ones, and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Identity:
    """The contents of ``CertKeyFiles``, which belong together."""

    chain: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS of a server. With ``client_ca``, clients must have a certificate of that authority (mTLS)."""

    identity: CertKeyFiles
    client_ca: Path | None = None

    @property
    def contents(self) -> Contents:
        """The current contents of the files, unchecked: equal if nothing has changed. Raises ``TlsError``."""
        return _contents(self.identity, self.client_ca)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS of a client: the authority of engines, the client's own certificate for mTLS, and the name that engines'
    certificates are checked for; None for the host of their address. If it is ``optional``, an engine that speaks no
    TLS gets plain text.
    """

    ca: Path
    identity: CertKeyFiles | None = None
    name: str | None = None
    optional: bool = False

    @property
    def contents(self) -> Contents:
        """As ``ServerTls.contents``."""
        return _contents(self.identity, self.ca)


def cert_key_files(certificate: Path | None, key: Path | None, flags: str) -> CertKeyFiles | None:
    """The settings ``{flags}-cert`` and ``{flags}-key``; None if neither is given. Raises ``ValueError`` if
    only one is.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, missing = ("key", "cert") if certificate is None else ("cert", "key")
        raise ValueError(f"{flags}-{given} needs {flags}-{missing}.")
    return CertKeyFiles(certificate, key)


def server_tls(certificate: Path | None, key: Path | None, client_ca: Path | None, flags: str) -> ServerTls | None:
    """The settings ``{flags}-cert``, ``{flags}-key`` and ``{flags}-client-ca``; None for plain text. Raises
    ``ValueError`` if one that another needs is missing.
    """
    identity = cert_key_files(certificate, key, flags)
    if identity is not None:
        return ServerTls(identity, client_ca)
    if client_ca is not None:
        raise ValueError(f"{flags}-client-ca needs {flags}-cert.")
    return None


def check_cert_key(files: CertKeyFiles | None, flags: str) -> None:
    """Raises ``ValueError`` if certificate and key cannot be used, or do not belong together."""
    try:
        if files is not None:
            read_cert_key(files)
    except TlsError as error:
        raise ValueError(f"{flags}-key: {error}.") from error


def read_ca(file: Path) -> bytes:
    """Reads and checks the certificates of authorities. Raises ``TlsError``."""
    contents = read_certificates(file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=contents.decode("ascii", "ignore"))
    except ssl.SSLError as error:
        raise TlsError(f"{file} is damaged") from error
    return contents


def read_certificates(file: Path) -> bytes:
    """Reads a PEM file. Raises ``TlsError`` if it has no certificate."""
    contents = _read_file(file)
    if not _CERTIFICATE.search(contents):
        raise TlsError(f"{file} has no certificate in PEM format")
    return contents


def read_key(file: Path) -> bytes:
    """Reads a PEM file. Raises ``TlsError`` if it has no private key, or an encrypted one."""
    contents = _read_file(file)
    if _ENCRYPTED.search(contents):
        raise TlsError(f"{file} is encrypted, and its password cannot be asked for")
    if not _KEY.search(contents):
        raise TlsError(f"{file} has no private key in PEM format")
    return contents


def read_cert_key(files: CertKeyFiles) -> Identity:
    """Reads and checks a certificate and its key. Raises ``TlsError``, also while the files are being replaced."""
    identity = Identity(read_certificates(files.certificate), read_key(files.key))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.certificate, files.key, password=str)
    except OSError as error:  # ssl.SSLError is one
        raise TlsError(_explain_mismatch(files, error)) from error
    if identity != Identity(_read_file(files.certificate), _read_file(files.key)):
        raise TlsError(f"{files.certificate} and {files.key} are just being replaced")
    return identity


def _explain_mismatch(files: CertKeyFiles, error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"{files.key} is not the key of {files.certificate}"
    return f"{files.certificate} or {files.key} is damaged"


def _contents(identity: CertKeyFiles | None, ca: Path | None) -> Contents:
    own = (None, None) if identity is None else (identity.certificate, identity.key)
    return tuple(b"" if file is None else _read_file(file) for file in (*own, ca))


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TlsError(f"{file} cannot be read: {error.strerror or error}") from error


def _readable(read: Callable[[Path], bytes]) -> AfterValidator:
    """A validator of settings that rejects files which ``read`` cannot read."""

    def check(file: Path) -> Path:
        read(file)
        return file

    return AfterValidator(check)


CaFile = Annotated[Path, _readable(read_ca)]
CertificateFile = Annotated[Path, _readable(read_certificates)]
KeyFile = Annotated[Path, _readable(read_key)]
