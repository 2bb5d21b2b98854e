"""The channel to an engine, plain or over TLS, and what its errors mean in words of the settings."""

import asyncio
import re
from functools import lru_cache

import grpc
from quire_proto.tls import ClientTls, Contents, TlsError, read_ca, read_cert_key

MAX_MESSAGE_BYTES = 64 * 2**20
_OPTIONS = (
    # An engine with nothing to do says nothing. What a frozen one or a host that vanished does not do either is answer
    # pings: it is noticed within 11 seconds. Engines end connections that ping them more often than every 5 seconds.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # a minute otherwise, whatever the former is
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Engines are in the router's own network. A proxy that the environment names is for what is beyond it.
    ("grpc.enable_http_proxy", 0),
    # Each try to connect is ours to time, so it must not inherit the library's own waiting from the one before.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
_NOT_CONNECTED = "failed to connect"
_CLOSED = re.compile(r"socket closed|connection reset|broken pipe", re.IGNORECASE)
_REFUSED_CERTIFICATE = re.compile(r"CERTIFICATE_VERIFY_FAILED(?:: ([A-Za-z -]+))?")


async def open_channel(address: str, tls: ClientTls | None) -> grpc.aio.Channel:
    """A channel that is not connected yet, in plain text only where there is no ``tls``. Its files are read now, so
    that each connection is made with what they hold then. Raises ``TlsError``.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    credentials = await asyncio.to_thread(_credentials_now, tls)
    name = () if tls.name is None else (("grpc.ssl_target_name_override", tls.name),)
    return grpc.aio.secure_channel(address, credentials, options=(*_OPTIONS, *name))


def explain(details: str, tls: ClientTls | None) -> str | None:
    """What an error of connecting says of TLS on the two sides, as one clause; None where it is about something else.

    Who refuses a client says nothing: it closes the connection.
    """
    if refused := _REFUSED_CERTIFICATE.search(details):
        return f"its certificate does not pass --engine-tls-ca ({refused[1] or 'it cannot be verified'})"
    if "Hostname Verification Check failed" in details:
        name = "its address" if tls is None or tls.name is None else tls.name
        return f"its certificate is not for {name} (--engine-tls-name says for what it has to be)"
    if "WRONG_VERSION_NUMBER" in details:
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
