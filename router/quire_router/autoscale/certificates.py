"""The TLS of a server whose certificate and whose clients' authorities change while it runs: a new connection has what
counts when it is made.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable

from quire_proto.tls import CertKeyFiles, Identity, TlsError, read_cert_key

log = logging.getLogger(__name__)
_PERIOD = 5.0  # seconds from one look at the files to the next


class Certificates:
    """What a server shows of itself, from ``files``, and ``authorities``, which tells who may vouch for clients; they
    need not show anything, but what they show has to be vouched for. Raises ``TlsError`` when the files are no good.
    """

    def __init__(self, files: CertKeyFiles, authorities: Callable[[], bytes]) -> None:
        self._files = files
        self._authorities = authorities
        self._identity = read_cert_key(files)
        self._made: tuple[Identity, bytes] | None = None
        self._context = self._make(self._identity, b"")

    def current(self) -> tuple[ssl.SSLContext, bytes]:
        """The context for a new connection, and the authorities in it. Raises ``TlsError``."""
        authorities = self._authorities()
        if self._made != (self._identity, authorities):
            self._context = self._make(self._identity, authorities)
        return self._context, authorities

    async def follow(self) -> None:
        """Looks at the files again and again. Never returns."""
        while True:
            await asyncio.sleep(_PERIOD)
            await self.refresh()

    async def refresh(self) -> None:
        """Looks once; files that are no good leave what is known."""
        try:
            identity = await asyncio.to_thread(read_cert_key, self._files)
            if identity != self._identity:
                self._context = self._make(identity, self._authorities())
                log.info("the certificate %s is another one, and is shown from now on", self._files.certificate)
        except TlsError as error:
            log.warning("the certificate stays as it was: %s", error)
            return
        self._identity = identity

    def _make(self, identity: Identity, authorities: bytes) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.options |= ssl.OP_NO_TICKET  # a connection that goes on from another would not be checked again
        context.options |= ssl.OP_NO_RENEGOTIATION  # by which one client can have a key agreed upon without end
        context.num_tickets = 0
        try:
            context.load_cert_chain(self._files.certificate, self._files.key)
            if authorities:
                context.load_verify_locations(cadata=authorities.decode("ascii"))
                context.verify_mode = ssl.CERT_OPTIONAL
        except OSError as error:
            raise TlsError(f"{self._files.certificate} cannot be used just now") from error
        self._made = (identity, authorities)
        return context
