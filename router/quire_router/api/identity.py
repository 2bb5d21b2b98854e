"""Who asks: API keys, and what follows from them. Knows neither HTTP nor gRPC beyond the ``authorization`` value."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, scrypt
from hmac import compare_digest

from quire_proto.errors import ErrorCode, QuireError

from quire_router.admission.reason import Reason
from quire_router.admission.tenant import Tenant
from quire_router.admission.tenants_file import TenantsFile


@dataclass(frozen=True, slots=True)
class Caller:
    """``tenant`` names who asks without showing the key; ``cache_salt`` (16 bytes) keeps prefix caches apart. Both
    are empty when no keys are configured. ``policy`` is what this tenant may use.
    """

    tenant: str = ""
    cache_salt: bytes = b""
    policy: Tenant = field(default_factory=Tenant, compare=False)

    def check_model(self, model: str) -> None:
        """Raises ``QuireError`` FORBIDDEN for a model that this caller's key does not open."""
        if not self.policy.may_use(model):
            message = f"This API key may not use the model {model[:128]!r}."
            raise QuireError(ErrorCode.FORBIDDEN, message, param="model", reason=Reason.MODEL)


ANYONE = Caller()
_TENANT_BYTES, _SALT_BYTES = 6, 16


class Keys:
    """The keys that open the API; none means that it is open to all. Takes a twentieth of a second for each key, and
    for each tenant of the file.

    Each of ``keys`` is a tenant of its own, unless the ``file`` names whose it is. A tenant of the file is known by its
    name, so that its keys can change. Its salt is that of its first key: no name that others know leads to it, and a
    key that moves into the file keeps what is cached.
    """

    def __init__(self, keys: Iterable[str], file: TenantsFile | None = None) -> None:
        file = file or TenantsFile()
        self._anyone = Caller(policy=file.tenants.of(""))
        self._callers = [entry for name, own in file.keys.items() for entry in _tenant(file.tenants.of(name), own)]
        for key in keys:
            tenant, salt = _derived(key.encode())
            self._callers.append((_digest(key.encode()), Caller(tenant, salt, file.tenants.of(tenant))))

    @property
    def required(self) -> bool:
        """Whether there is any key, so that each caller must have one."""
        return bool(self._callers)

    def caller(self, *authorizations: str) -> Caller:
        """Who sent these ``authorization`` values, of which there must be one. Raises ``QuireError`` UNAUTHENTICATED.

        Hashes are compared, each in constant time and all of them, so that timing says nothing about any key.
        """
        if not self._callers:
            return self._anyone
        authorization = authorizations[0] if len(authorizations) == 1 else ""
        scheme, _, key = authorization.partition(" ")
        offered = _digest(key.strip().encode())
        matches = [caller for digest, caller in self._callers if compare_digest(digest, offered)]
        if scheme.lower() != "bearer" or not matches:
            raise _refusal(authorizations)
        return matches[0]


def _refusal(authorizations: Sequence[str]) -> QuireError:
    if not any(value.lower().startswith("bearer ") for value in authorizations):
        return QuireError(ErrorCode.UNAUTHENTICATED, "An API key is needed: send the header Authorization: Bearer KEY.")
    if len(authorizations) > 1:
        return QuireError(ErrorCode.UNAUTHENTICATED, "There is more than one Authorization header.")
    return QuireError(ErrorCode.UNAUTHENTICATED, "This API key is not valid.")


def _tenant(tenant: Tenant, keys: Sequence[str]) -> list[tuple[bytes, Caller]]:
    """All keys of one tenant open the same."""
    caller = Caller(tenant.id, _derived(keys[0].encode())[1], tenant)
    return [(_digest(key.encode()), caller) for key in keys]


def _derived(key: bytes) -> tuple[str, bytes]:
    """A tenant's id and salt. Both are written to databases, so that guessing keys against them must be slow. Every
    router makes the same ones, hence the fixed salt.
    """
    derived = scrypt(key, salt=b"quire caller", n=2**14, r=8, p=1, dklen=_TENANT_BYTES + _SALT_BYTES)
    return derived[:_TENANT_BYTES].hex(), derived[_TENANT_BYTES:]


def _digest(key: bytes) -> bytes:
    """Never leaves this process."""
    return blake2b(key, digest_size=32, person=b"quire key").digest()
