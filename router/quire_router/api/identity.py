"""Who asks: API keys, and what follows from them. Knows neither HTTP nor gRPC beyond the ``authorization`` value."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b, scrypt
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
_TENANT_BYTES, _SALT_BYTES = 6, 16


class Keys:
    """The keys that open the API; none means that it is open to all. Takes a twentieth of a second for each key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._callers = [(_digest(key.encode()), _caller(key.encode())) for key in keys]

    def caller(self, *authorizations: str) -> Caller:
        """Who sent these ``authorization`` values, of which there must be one. Raises ``QuireError`` UNAUTHENTICATED.

        Hashes are compared, each in constant time and all of them, so that timing says nothing about any key.
        """
        if not self._callers:
            return ANYONE
        authorization = authorizations[0] if len(authorizations) == 1 else ""
        scheme, _, key = authorization.partition(" ")
        offered = _digest(key.strip().encode())
        matches = [caller for digest, caller in self._callers if compare_digest(digest, offered)]
        if scheme.lower() != "bearer" or not matches:
            raise _refusal(authorizations)
        return matches[0]


def _refusal(authorizations: Sequence[str]) -> QuireError:
    if not any(authorizations):
        return QuireError(ErrorCode.UNAUTHENTICATED, "An API key is needed: send the header Authorization: Bearer KEY.")
    if len(authorizations) > 1:
        return QuireError(ErrorCode.UNAUTHENTICATED, "There is more than one Authorization header.")
    return QuireError(ErrorCode.UNAUTHENTICATED, "This API key is not valid.")


def _caller(key: bytes) -> Caller:
    """Both names of a caller are written to databases, so that guessing keys against them must be slow. Every router
    makes the same ones, hence the fixed salt.
    """
    derived = scrypt(key, salt=b"quire caller", n=2**14, r=8, p=1, dklen=_TENANT_BYTES + _SALT_BYTES)
    return Caller(tenant=derived[:_TENANT_BYTES].hex(), cache_salt=derived[_TENANT_BYTES:])


def _digest(key: bytes) -> bytes:
    """Never leaves this process."""
    return blake2b(key, digest_size=32, person=b"quire key").digest()
