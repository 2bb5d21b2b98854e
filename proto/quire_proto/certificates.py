"""Certificates that are replaced while a server runs. ``ReloadingCertificates`` reads the files again for every
connection; open connections keep the certificates that they were opened with.

A replaced pair that cannot be used, such as a key that is not of its certificate, changes nothing: the last pair that
could stays in use, and the log says so once. ``ReloadingServerCredentials`` is its form for gRPC; for HTTPS it is the
router's ``ReloadingSslContext``.
"""

import logging
from dataclasses import dataclass

import grpc

from quire_proto.tls import Identity, ServerTls, TlsError, read_ca, read_cert_key

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerCertificates:
    """The server's certificate and key, and the authority of its clients, None without mTLS."""

    identity: Identity
    client_ca: bytes | None


class ReloadingCertificates:
    """``current`` holds the last contents of ``files`` that could be used. Raises ``TlsError`` if they cannot be used
    at the start. Any thread may call ``refresh``.
    """

    def __init__(self, files: ServerTls) -> None:
        self._files = files
        self._read_contents, self.current = files.contents, _read(files)
        self._problem = ""

    def refresh(self) -> bool:
        """Reads the files; returns whether ``current`` was replaced. Never raises for files that cannot be used."""
        try:
            contents = self._files.contents
            if contents == self._read_contents:  # also if rejected: checking them for every connection is too expensive
                return False
            self._read_contents = contents
            self.current = _read(self._files)
        except TlsError as error:
            self._log_problem(str(error))
            return False
        self._problem = ""
        log.info("using new certificates from %s", self._files.identity.certificate)
        return True

    def _log_problem(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.warning("%s: the previous certificates stay in use", problem)


class ReloadingServerCredentials:
    """Credentials of a gRPC server that show each client the current certificates. Raises ``TlsError`` if the files
    cannot be used.
    """

    def __init__(self, files: ServerTls) -> None:
        self._certificates = ReloadingCertificates(files)
        self._requires_client_cert = files.client_ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """The credentials for a port, also one of ``grpc.aio``."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._certificates.current),
            self._refresh,  # type: ignore[arg-type]  # the library documents None, and its stubs do not know it
            self._requires_client_cert,
        )

    def _refresh(self) -> grpc.ServerCertificateConfiguration | None:
        """The configuration of a new connection; None if it has not changed. Called on gRPC's threads, which would end
        the connection if this raised.
        """
        return _configuration(self._certificates.current) if self._certificates.refresh() else None


def _read(files: ServerTls) -> ServerCertificates:
    client_ca = None if files.client_ca is None else read_ca(files.client_ca)
    return ServerCertificates(read_cert_key(files.identity), client_ca)


def _configuration(certificates: ServerCertificates) -> grpc.ServerCertificateConfiguration:
    identity = certificates.identity
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.chain)], certificates.client_ca)
