"""TLS credentials of a gRPC server. The files are read again for every connection, so that certificates can be replaced
without a restart. Open connections keep the certificates that they were opened with.
"""

import logging
from dataclasses import dataclass

import grpc

from quire_proto.tls import Identity, ServerTls, TlsError, read_ca, read_cert_key

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Contents:
    identity: Identity
    client_ca: bytes | None


class ReloadingServerCredentials:
    """The server's certificate and key, and the authority of its clients. Raises ``TlsError`` if the files cannot be
    used.

    If replaced files cannot be used, the server keeps the last ones that could, and logs the problem once.
    """

    def __init__(self, files: ServerTls) -> None:
        self._files = files
        self._read_contents, self._active = files.contents, _read(files)
        self._problem = ""

    def credentials(self) -> grpc.ServerCredentials:
        """The credentials for a port, also one of ``grpc.aio``."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._active),
            self._refresh,  # type: ignore[arg-type]  # the library documents None, and its stubs do not know it
            self._files.client_ca is not None,
        )

    def _refresh(self) -> grpc.ServerCertificateConfiguration | None:
        """The configuration of a new connection; None if it has not changed. Called on gRPC's threads, which would end
        the connection if this raised.
        """
        try:
            contents = self._files.contents
            if contents == self._read_contents:  # also if rejected: checking them for every connection is too expensive
                return None
            self._read_contents = contents
            self._active = _read(self._files)
        except TlsError as error:
            self._log_problem(str(error))
            return None
        self._problem = ""
        log.info("new certificates are used from %s", self._files.identity.certificate)
        return _configuration(self._active)

    def _log_problem(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.warning("%s: the certificates from before stay in use", problem)


def _read(files: ServerTls) -> _Contents:
    client_ca = None if files.client_ca is None else read_ca(files.client_ca)
    return _Contents(read_cert_key(files.identity), client_ca)


def _configuration(contents: _Contents) -> grpc.ServerCertificateConfiguration:
    identity = contents.identity
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.chain)], contents.client_ca)
