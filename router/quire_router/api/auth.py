"""Authentication: API keys in ``authorization`` values, and the tenant (``Identity``) that follows from them."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, scrypt
from secrets import token_bytes

from quire_proto.errors import QuireError

from quire_router.admission.tenants import Tenant, Tenants
from quire_router.admission.tenants_file import TenantsFile
from quire_router.core.errors import key_invalid, key_missing, model_forbidden, several_keys


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller. ``tenant`` identifies it without showing the key; ``cache_salt`` (16 bytes) keeps prefix caches
    apart. Both are empty when no keys are configured. ``policy`` is what this tenant may use.
    """

    tenant: str = ""
    cache_salt: bytes = b""
    policy: Tenant = field(default_factory=Tenant, compare=False)

    def may_use(self, model: str) -> bool:
        """Returns whether the caller may use this model."""
        return not self.policy.models or model in self.policy.models

    def check_model(self, model: str) -> None:
        """Raises ``QuireError`` FORBIDDEN for a model that the caller may not use."""
        if not self.may_use(model):
            raise model_forbidden(model)


ANONYMOUS = Identity()
_TENANT_BYTES, _SALT_BYTES = 6, 16


class _KeyEntry:
    """One key. The caller's id and salt take a twentieth of a second to derive (``_derive``), on the thread that asks
    first; two that ask at once derive the same.
    """

    __slots__ = ("_caller", "_first", "_policy", "_tenants")

    def __init__(self, first: str, policy: Tenant | None, tenants: Tenants) -> None:
        """``first`` is the key that the salt is derived from; ``policy`` that of the tenant that the file names, or
        None.
        """
        self._first = first
        self._policy = policy
        self._tenants = tenants
        self._caller: Identity | None = None

    def caller(self) -> Identity:
        """Returns the identity of the key."""
        if self._caller is None:
            tenant, salt = _derive(self._first.encode())
            policy = self._tenants[tenant] if self._policy is None else self._policy
            self._caller = Identity(tenant if self._policy is None else policy.id, salt, policy)
        return self._caller


class StaticKeys:
    """The configured keys; without any the API is open to all. ``prepare`` derives every identity ahead; a caller that
    comes before waits a twentieth of a second, once.

    Each of ``keys`` is a tenant of its own, unless the ``file`` assigns it to one. A tenant of the file is identified
    by its name, so that its keys can change. Its salt is that of its first key: it cannot be derived from a name that
    others know, and a key that moves into the file keeps what is cached.
    """

    def __init__(self, keys: Iterable[str], file: TenantsFile | None = None) -> None:
        file = file or TenantsFile()
        self._anyone = Identity(policy=file.tenants[""])
        self._secret = token_bytes(32)
        self._entries: dict[bytes, _KeyEntry] = {}
        for name, own in file.keys.items():
            entry = _KeyEntry(own[0], file.tenants[name], file.tenants)  # all keys of one tenant share it
            self._entries.update((self._digest(key), entry) for key in own)
        for key in keys:
            self._entries.setdefault(self._digest(key), _KeyEntry(key, None, file.tenants))

    @property
    def required(self) -> bool:
        """Whether each caller must have a key, because any is configured."""
        return bool(self._entries)

    async def prepare(self) -> None:
        """Derives the identity of every key, on another thread, one after the other."""
        for entry in set(self._entries.values()):
            await asyncio.to_thread(entry.caller)

    def authenticate(self, *authorizations: str) -> Identity:
        """Returns who sent these ``authorization`` values, of which there must be one. Raises ``QuireError``
        UNAUTHENTICATED.

        Looks up a hash of the key that only this process can compute: timing reveals something about that hash at most,
        and does not depend on the number of keys.
        """
        if not self._entries:
            return self._anyone
        authorization = authorizations[0] if len(authorizations) == 1 else ""
        scheme, _, key = authorization.partition(" ")
        entry = self._entries.get(self._digest(key.strip()))
        if scheme.lower() != "bearer" or entry is None:
            raise _credentials_error(authorizations)
        return entry.caller()

    def _digest(self, key: str) -> bytes:
        return blake2b(key.encode(), key=self._secret, digest_size=32).digest()


def _credentials_error(authorizations: Sequence[str]) -> QuireError:
    if not any(value.lower().startswith("bearer ") for value in authorizations):
        return key_missing()
    if len(authorizations) > 1:
        return several_keys()
    return key_invalid()


def _derive(key: bytes) -> tuple[str, bytes]:
    """Returns a tenant's id and cache salt. Both are written to databases, so guessing keys against them must be slow:
    sixteen characters may be a phrase. Every router derives the same ones, hence scrypt's fixed salt.
    """
    derived = scrypt(key, salt=b"quire caller", n=2**14, r=8, p=1, dklen=_TENANT_BYTES + _SALT_BYTES)
    return derived[:_TENANT_BYTES].hex(), derived[_TENANT_BYTES:]
