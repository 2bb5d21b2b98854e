"""Who asks: API keys, and what follows from them. Knows neither HTTP nor gRPC beyond the ``authorization`` value."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest

from quire_proto.errors import ErrorCode, QuireError


@dataclass(frozen=True, slots=True)
class Caller:
    """``tenant`` names who asks without showing the key; ``cache_salt`` (16 bytes) keeps prefix caches apart. Both
    are empty when no keys are configured.
    """

    tenant: str = ""
    cache_salt: bytes = b""


ANYONE = Caller()


class Keys:
    """The keys that open the API; none means that it is open to all."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._callers = [(_digest(key.encode(), b"quire key"), _caller(key.encode())) for key in keys]

    def caller(self, authorization: str | None) -> Caller:
        """Who sent this ``authorization`` value. Raises ``QuireError`` UNAUTHENTICATED.

        Hashes are compared, each in constant time and all of them, so that timing says nothing about any key.
        """
        if not self._callers:
            return ANYONE
        scheme, _, key = (authorization or "").partition(" ")
        offered = _digest(key.strip().encode(), b"quire key")
        matches = [caller for digest, caller in self._callers if compare_digest(digest, offered)]
        if scheme.lower() != "bearer" or not matches:
            raise _refusal(authorization)
        return matches[0]


def _refusal(authorization: str | None) -> QuireError:
    if not authorization:
        return QuireError(ErrorCode.UNAUTHENTICATED, "An API key is needed: send the header Authorization: Bearer KEY.")
    return QuireError(ErrorCode.UNAUTHENTICATED, "This API key is not valid.")


def _caller(key: bytes) -> Caller:
    return Caller(tenant=_digest(key, b"quire tenant")[:6].hex(), cache_salt=_digest(key, b"quire salt"))


def _digest(key: bytes, purpose: bytes) -> bytes:
    return blake2b(key, digest_size=16, person=purpose).digest()
