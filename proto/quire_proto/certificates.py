"""TLS on a gRPC server's port. The files are looked at again for every connection, so that certificates can be replaced
while streams go on: those that are open keep what they were opened with.
"""

import logging
from dataclasses import dataclass

import grpc

from quire_proto.tls import Identity, ServerTls, TlsError, read_ca, read_cert_key

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Checked:
    identity: Identity
    client_ca: bytes | None


class ReloadingServerCredentials:
    """What a server shows of itself, and whom it believes. Raises ``TlsError`` where the files cannot be used.

    Where they cannot be used later, the server stays with the last ones that could, and says so once.
    """

    def __init__(self, files: ServerTls) -> None:
        self._files = files
        self._seen, self._used = files.contents, _read(files)
        self._problem = ""

    def credentials(self) -> grpc.ServerCredentials:
        """For a port, also one of ``grpc.aio``."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._used),
            self._refresh,  # type: ignore[arg-type]  # the library documents None, and its stubs do not know it
            self._files.client_ca is not None,
        )

    def _refresh(self) -> grpc.ServerCertificateConfiguration | None:
        """What is new, for a connection that is about to begin; None for nothing. Called on threads of the library,
        which would end the connection if this raised.
        """
        try:
            seen = self._files.contents
            if seen == self._seen:  # also where they were refused: whoever knocks may not cost the checks each time
                return None
            self._seen = seen
            self._used = _read(self._files)
        except TlsError as error:
            self._tell(str(error))
            return None
        self._problem = ""
        log.info("new certificates are used from %s", self._files.identity.certificate)
        return _configuration(self._used)

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.warning("%s: the certificates from before stay in use", problem)


def _read(files: ServerTls) -> _Checked:
    client_ca = None if files.client_ca is None else read_ca(files.client_ca)
    return _Checked(read_cert_key(files.identity), client_ca)


def _configuration(checked: _Checked) -> grpc.ServerCertificateConfiguration:
    identity = checked.identity
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.chain)], checked.client_ca)
