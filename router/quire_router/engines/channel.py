"""The channel to one of Quire's engines, plain or over TLS, and why there is none, in words of the settings
(``ConnectFailure``), logged once for each time without one (``ConnectFailureLog``).
"""

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from typing import Any, Self, cast

import grpc
from quire_proto.engine_token import EngineTokens
from quire_proto.tls import ClientTls, Contents, TlsError, read_ca, read_cert_key

from quire_router.core.retry import first_error

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
_OPTIONS = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A ping with the data that comes, to size the window by its round trip, is a third of what a message costs here. A
    # window of this size instead holds what an engine can have under way.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 * 2**20),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Engines are in the router's own network. A proxy that the environment names is for connections beyond it.
    ("grpc.enable_http_proxy", 0),
    # ``ConnectFailureLog`` times each try to connect, so a try must not inherit the library's backoff from another one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
# For the answer to a ping: a machine that is short of processors may be late by several pings.
PING_PATIENCE = 2
_NOT_CONNECTED = "failed to connect"
_CLOSED = re.compile(r"socket closed|connection reset|broken pipe", re.IGNORECASE)
_REFUSED_CERTIFICATE = re.compile(r"CERTIFICATE_VERIFY_FAILED(?:: ([A-Za-z -]+))?")


async def open_channel(address: str, tls: ClientTls | None, ping_interval: float) -> grpc.aio.Channel:
    """A channel that is not connected yet, in plain text only where there is no ``tls``. Its files are read now, so
    that each connection is made with what they hold then. Raises ``TlsError``.

    An idle engine sends nothing, so pings find a frozen engine or a lost host: one is sent after ``ping_interval``
    seconds without traffic, and answered within ``PING_PATIENCE`` times as long.
    """
    options = (*_OPTIONS, *_pings(ping_interval))
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = await asyncio.to_thread(_credentials_now, tls)
    name = () if tls.name is None else (("grpc.ssl_target_name_override", tls.name),)
    return grpc.aio.secure_channel(address, credentials, options=(*options, *name))


def _pings(interval: float) -> tuple[tuple[str, int], ...]:
    every, answer = round(interval * 1000), round(PING_PATIENCE * interval * 1000)
    return (
        ("grpc.keepalive_time_ms", every),
        ("grpc.keepalive_timeout_ms", answer),
        ("grpc.http2.ping_timeout_ms", answer),  # a minute otherwise, whatever the former is
    )


def authorized(channel: grpc.aio.Channel, tokens: EngineTokens | None) -> grpc.aio.Channel:
    """The channel for a stub whose calls have the token, if there is one."""
    return channel if tokens is None else cast(grpc.aio.Channel, _AuthorizedChannel(channel, tokens))


class _AuthorizedChannel:
    """What a stub needs of ``channel``, with the token of ``tokens`` in each call, as it is then. gRPC's own
    interceptors would put an object of theirs between each message and the stream.
    """

    def __init__(self, channel: grpc.aio.Channel, tokens: EngineTokens) -> None:
        self._channel = channel
        self._tokens = tokens

    def unary_unary(self, *method: Any, **serializers: Any) -> Callable[..., Any]:
        """As ``grpc.aio.Channel.unary_unary``."""
        return self._authorized(self._channel.unary_unary(*method, **serializers))

    def stream_stream(self, *method: Any, **serializers: Any) -> Callable[..., Any]:
        """As ``grpc.aio.Channel.stream_stream``."""
        return self._authorized(self._channel.stream_stream(*method, **serializers))

    def _authorized(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: call(*arguments, metadata=self._tokens.metadata, **options)


def speaks_no_tls(details: str) -> bool:
    """Whether a connection failed because an engine answered in plain text."""
    return "WRONG_VERSION_NUMBER" in details


def explain(details: str, tls: ClientTls | None) -> str | None:
    """The cause of a failed connection that has to do with TLS, as one clause; None for any other cause.

    An engine that rejects the router's certificate closes the connection without saying why.
    """
    if refused := _REFUSED_CERTIFICATE.search(details):
        return f"its certificate does not pass --engine-tls-ca ({refused[1] or 'it cannot be verified'})"
    if "Hostname Verification Check failed" in details:
        name = "its address" if tls is None or tls.name is None else tls.name
        return f"its certificate is not for {name} (--engine-tls-name says for what it has to be)"
    if speaks_no_tls(details):
        return "it does not speak TLS (--tls-cert of the engine), and plain text is not tried"
    if _NOT_CONNECTED in details and _CLOSED.search(details):
        return _closed(tls)
    return None


def _closed(tls: ClientTls | None) -> str:
    if tls is None:
        return "it closes the connection at once, as one does that speaks TLS (--engine-tls-ca)"
    shown = "no certificate is shown to it" if tls.identity is None else "it may not accept the certificate"
    return f"it closes the connection at once; {shown} (--engine-tls-cert)"


def _credentials_now(tls: ClientTls) -> grpc.ChannelCredentials:
    return _credentials(tls, tls.contents)


@lru_cache(maxsize=4)
def _credentials(tls: ClientTls, contents: Contents) -> grpc.ChannelCredentials:
    """Checked and made once for the same contents: a large fleet that is away is tried many times a second."""
    authorities = read_ca(tls.ca)
    identity = None if tls.identity is None else read_cert_key(tls.identity)
    if tls.contents != contents:
        raise TlsError(f"{tls.ca} or what belongs to it is just being replaced")
    if identity is None:
        return grpc.ssl_channel_credentials(authorities)
    return grpc.ssl_channel_credentials(authorities, identity.key, identity.chain)


@dataclass(frozen=True, slots=True)
class ConnectFailure:
    """Why there is no stream. ``refused``: the address refuses connections. ``lasting``: trying again does not help
    before a setting or a file is changed.
    """

    text: str
    refused: bool = False
    lasting: bool = False

    @classmethod
    def of(cls, errors: BaseExceptionGroup, tls: ClientTls | None = None) -> Self:
        """The first error of a group, in one line. ``tls`` is what the stream was to be opened with."""
        error = first_error(errors)
        if isinstance(error, grpc.aio.AioRpcError):
            details = error.details() or ""
            if "connection refused" in details.lower():
                return cls("connection refused", refused=True)
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return cls(f"it does not let this router in: {details}", lasting=True)
            if (about_tls := explain(details, tls)) is not None:
                return cls(about_tls, lasting=True)
            if _CLOSED.search(details):
                return cls("connection closed")
            return cls(f"{error.code().name}: {details}")
        return cls(str(error) or type(error).__name__, lasting=isinstance(error, TlsError))


class ConnectFailureLog:
    """One period without a stream to an engine: with which level failures are logged. For ``patience`` seconds they are
    information; afterwards the first is a warning. What is less than a warning is not logged if the engine is
    ``known_to_leave``.

    A lasting problem is a reason at once, but only when it comes twice in a row: files may just be being replaced, and
    an engine that ends closes what is being opened.
    """

    def __init__(self, address: str, patience: float = 0.0, *, known_to_leave: bool = False) -> None:
        self._address = address
        self._warn_after = monotonic() + patience
        self._logged_level = logging.INFO if known_to_leave else logging.NOTSET
        self._last: ConnectFailure | None = None

    def record(self, problem: ConnectFailure) -> None:
        """Logs a failed try: the first as information, and the first that is a reason to warn."""
        lasting = problem.lasting and problem == self._last
        level = logging.WARNING if lasting or monotonic() >= self._warn_after else logging.INFO
        self._last = problem
        if level > self._logged_level:
            missing = "cannot be reached" if level == logging.WARNING else "is not there yet"
            log.log(level, "engine %s %s: %s", self._address, missing, problem.text)
            self._logged_level = level
