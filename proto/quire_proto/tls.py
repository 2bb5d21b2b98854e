"""The PEM files of TLS: named by settings, read and checked before they are used, and read again whenever they may have
changed. What is made of them is each service's.
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
    """What a service shows of itself: its certificate, followed by those between it and its authority, and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Identity:
    """The contents of such files, which belong together."""

    chain: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's side. With ``client_ca`` only clients that show a certificate of it are talked to."""

    identity: CertKeyFiles
    client_ca: Path | None = None

    @property
    def contents(self) -> Contents:
        """What is in the files now, unchecked: equal where nothing has changed. Raises ``TlsError``."""
        return _contents(self.identity, self.client_ca)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """A router's side: who may vouch for engines, what it shows of itself, and the name that engines' certificates are
    checked for; None: the host of their address.
    """

    ca: Path
    identity: CertKeyFiles | None = None
    name: str | None = None

    @property
    def contents(self) -> Contents:
        """As those of ``ServerTls``."""
        return _contents(self.identity, self.ca)


def cert_key_files(certificate: Path | None, key: Path | None, flags: str) -> CertKeyFiles | None:
    """The two settings together, which are called ``flags`` and ``-cert`` or ``-key``; None where neither is given.
    Raises ``ValueError``.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, missing = ("key", "cert") if certificate is None else ("cert", "key")
        raise ValueError(f"{flags}-{given} needs {flags}-{missing}.")
    return CertKeyFiles(certificate, key)


def server_tls(certificate: Path | None, key: Path | None, client_ca: Path | None, flags: str) -> ServerTls | None:
    """The three settings together, which are called ``flags`` and ``-cert``, ``-key`` or ``-client-ca``; None for plain
    text. Raises ``ValueError``.
    """
    identity = cert_key_files(certificate, key, flags)
    if identity is not None:
        return ServerTls(identity, client_ca)
    if client_ca is not None:
        raise ValueError(f"{flags}-client-ca needs {flags}-cert.")
    return None


def check_cert_key(files: CertKeyFiles | None, flags: str) -> None:
    """Raises ``ValueError`` where the files do not go together."""
    try:
        if files is not None:
            read_cert_key(files)
    except TlsError as error:
        raise ValueError(f"{flags}-key: {error}.") from error


def read_ca(file: Path) -> bytes:
    """The certificates of those who may vouch for others. Raises ``TlsError``."""
    contents = read_certificates(file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=contents.decode("ascii", "ignore"))
    except ssl.SSLError as error:
        raise TlsError(f"{file} is damaged") from error
    return contents


def read_certificates(file: Path) -> bytes:
    """A file in which there is a certificate. Raises ``TlsError``."""
    contents = _file(file)
    if not _CERTIFICATE.search(contents):
        raise TlsError(f"{file} has no certificate in PEM format")
    return contents


def read_key(file: Path) -> bytes:
    """A file in which there is a private key that needs no password. Raises ``TlsError``."""
    contents = _file(file)
    if _ENCRYPTED.search(contents):
        raise TlsError(f"{file} is encrypted, and nobody is there to be asked for the password")
    if not _KEY.search(contents):
        raise TlsError(f"{file} has no private key in PEM format")
    return contents


def read_cert_key(files: CertKeyFiles) -> Identity:
    """A certificate and its key, of one moment also where the files are being replaced. Raises ``TlsError``."""
    identity = Identity(read_certificates(files.certificate), read_key(files.key))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.certificate, files.key, password=str)
    except OSError as error:  # of which an error of TLS is one
        raise TlsError(_misfit(files, error)) from error
    if identity != Identity(_file(files.certificate), _file(files.key)):
        raise TlsError(f"{files.certificate} and {files.key} are just being replaced")
    return identity


def _misfit(files: CertKeyFiles, error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"{files.key} is not the key of {files.certificate}"
    return f"{files.certificate} or {files.key} is damaged"


def _contents(identity: CertKeyFiles | None, authorities: Path | None) -> Contents:
    own = (None, None) if identity is None else (identity.certificate, identity.key)
    return tuple(b"" if file is None else _file(file) for file in (*own, authorities))


def _file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TlsError(f"{file} cannot be read: {error.strerror or error}") from error


def _usable(read: Callable[[Path], bytes]) -> AfterValidator:
    """Keeps a setting that ``read`` can read, and refuses others."""

    def check(file: Path) -> Path:
        read(file)
        return file

    return AfterValidator(check)


CaFile = Annotated[Path, _usable(read_ca)]
CertificateFile = Annotated[Path, _usable(read_certificates)]
KeyFile = Annotated[Path, _usable(read_key)]
