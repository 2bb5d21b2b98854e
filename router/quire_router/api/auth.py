"""Authentication: API keys and tokens (JWTs) in ``authorization`` values, and the tenant (``Identity``) that follows
from them.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, scrypt, sha256
from pathlib import Path
from secrets import token_bytes
from time import time
from typing import Protocol
from urllib.parse import urlsplit

from quire_proto.errors import QuireError

from quire_router.admission.tenants import Tenant, Tenants
from quire_router.admission.tenants_file import ApiKey, TenantsFile
from quire_router.core.errors import key_expired, key_invalid, key_missing, model_forbidden, several_keys
from quire_router.core.tenant_ids import FORMER_BYTES, ID_BYTES, OIDC
from quire_router.journal.fleet_secret import FleetSecret


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
_SALT_BYTES = 16
_Derived = tuple[str, bytes]
"""A tenant's id and cache salt."""


class _Caller:
    """Who has a tenant's keys. Its id and salt take a twentieth of a second to derive (``_derive``), on the thread that
    asks first; two that ask at once derive the same. ``known`` has them by the secrets of the tenants' file before.
    """

    __slots__ = ("_identity", "_policy", "_tenants", "derived", "secret")

    def __init__(self, secret: str, policy: Tenant | None, tenants: Tenants, known: Mapping[str, _Derived]) -> None:
        """``secret`` is what the salt is derived from; ``policy`` that of the tenant that the file names, or None."""
        self.secret = secret
        self.derived = known.get(secret)
        self._policy = policy
        self._tenants = tenants
        self._identity: Identity | None = None

    def identity(self) -> Identity:
        """Returns the identity."""
        if self._identity is None:
            self.derived = tenant, salt = self.derived or _derive(self.secret.encode())
            policy = self._tenants[tenant] if self._policy is None else self._policy
            self._identity = Identity(tenant if self._policy is None else policy.id, salt, policy)
        return self._identity


@dataclass(frozen=True, slots=True)
class OidcSettings:
    """Whose tokens are accepted: those of ``issuer_url`` for ``client_id``, their audience. The claim ``tenant_claim``
    says who a caller is. Keys are read from ``jwks_url``, or from where the issuer's configuration says; its
    certificate has to be of the authorities in ``ca_file``, where that is given.
    """

    issuer_url: str
    client_id: str
    tenant_claim: str = "sub"
    jwks_url: str | None = None
    ca_file: Path | None = None


def check_issuer_address(address: str) -> str:
    """Returns an issuer's address. Raises ``ValueError`` where keys would come unencrypted over a network."""
    parts = urlsplit(address)
    local = parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost")
    if not parts.hostname or (parts.scheme != "https" and not local):
        raise ValueError(f"{address[:256]!r} must be an address that begins with https://")
    return address


class TokenVerifier(Protocol):
    """Checks tokens of an issuer; see ``oidc.OidcVerifier``."""

    def verify(self, token: str) -> str:
        """Returns the claim that names the tenant. Raises ``QuireError``."""
        ...


class Authenticator:
    """The configured keys, and those who have tokens of an issuer that ``tokens`` verifies. ``prepare`` derives every
    identity ahead; a caller that comes before waits a twentieth of a second, once. ``replace`` takes over a tenants'
    file that was read again.

    Whether callers need a key follows from the settings, not from the keys that there are: without keys, tokens and a
    file the API is open to all, and with a file that says so. ``replace`` can close an open API, and never opens one.

    Each of ``keys`` is a tenant of its own, unless the ``file`` assigns it to one. A tenant of the file is identified
    by its name, so that its keys can change. Its salt is that of its first key: it cannot be derived from a name that
    others know, and a key that moves into the file keeps what is cached. Salts of those who have tokens alone are keyed
    with the ``fleet_secret``. With ``fleet_for_all`` every key shows the fleet.
    """

    def __init__(
        self,
        keys: Iterable[str],
        file: TenantsFile | None = None,
        tokens: TokenVerifier | None = None,
        fleet_secret: FleetSecret | None = None,
        *,
        fleet_for_all: bool = False,
    ) -> None:
        self._fleet_for_all = fleet_for_all
        self._own = [ApiKey.of(key) for key in keys]
        self._tokens = tokens
        self._secret = token_bytes(32)
        self._fleet_secret = fleet_secret
        self._required = bool(self._own) or tokens is not None
        self._keys: dict[bytes, tuple[_Caller, float | None]] = {}
        self._named: dict[str, _Caller] = {}
        self.replace(file or TenantsFile(open=True))

    def replace(self, file: TenantsFile) -> None:
        """Accepts the keys of ``file`` from now on, and no others but those that were given at the start."""
        self._required = self._required or not file.open
        known = {caller.secret: caller.derived for caller in self._callers if caller.derived is not None}
        self._tenants = file.tenants
        self._claims = file.claims
        self._anyone = Identity(policy=file.tenants[""])
        self._keys, self._named = {}, {}
        for name, own in file.keys.items():
            if own:  # all keys of one tenant share it
                caller = self._named[name] = _Caller(own[0].secret, file.tenants[name], file.tenants, known)
                self._keys.update((self._lookup(key.digest), (caller, key.expires)) for key in own)
        for key in self._own:
            caller = _Caller(key.secret, None, file.tenants, known)
            self._keys.setdefault(self._lookup(key.digest), (caller, None))

    @property
    def required(self) -> bool:
        """Whether each caller must have a key or a token."""
        return self._required

    def shows_fleet(self, caller: Identity) -> bool:
        """Whether the caller may know the engines, and how busy others make them."""
        return not self._required or self._fleet_for_all or caller.policy.allow_fleet

    async def prepare(self) -> None:
        """Derives the identity of every key, on another thread, one after the other."""
        for caller in self._callers:
            await asyncio.to_thread(caller.identity)

    @property
    def _callers(self) -> set[_Caller]:
        return {*self._named.values(), *(caller for caller, _ in self._keys.values())}

    def authenticate(self, *authorizations: str) -> Identity:
        """Returns who sent these ``authorization`` values, of which there must be one. Raises ``QuireError``
        UNAUTHENTICATED, and UNAVAILABLE for a token while the issuer's keys are not known.

        Looks up a hash of the key that only this process can compute: timing reveals something about that hash at most,
        and does not depend on the number of keys.
        """
        if not self.required:
            return self._anyone
        authorization = authorizations[0] if len(authorizations) == 1 else ""
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer":
            raise _credentials_error(authorizations)
        found = self._keys.get(self._lookup(sha256(key.encode()).digest()))
        if found is None:
            return self._identity_of_token(key, authorizations)
        caller, expires = found
        if expires is not None and time() >= expires:
            raise key_expired()
        return caller.identity()

    def _identity_of_token(self, token: str, authorizations: Sequence[str]) -> Identity:
        if self._tokens is None or token.count(".") != 2:
            raise _credentials_error(authorizations)
        claim = self._tokens.verify(token)
        name = self._claims.get(claim)
        if name in self._named:
            return self._named[name].identity()
        if name is not None:
            return Identity(name, self._salt(f"tenant:{name}"), self._tenants[name])
        tenant = _id_of_claim(claim)
        return Identity(tenant, self._salt(claim), self._tenants[tenant])

    def _salt(self, name: str) -> bytes:
        """Returns the cache salt of who has no key, which others cannot compute from the name."""
        key = b"" if self._fleet_secret is None else self._fleet_secret.value
        return blake2b(name.encode(), key=key, digest_size=_SALT_BYTES, person=b"quire salt").digest()

    def _lookup(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._secret, digest_size=32).digest()


def _credentials_error(authorizations: Sequence[str]) -> QuireError:
    if not any(value.lower().startswith("bearer ") for value in authorizations):
        return key_missing()
    if len(authorizations) > 1:
        return several_keys()
    return key_invalid()


def _derive(key: bytes) -> _Derived:
    """Both are written to databases, so guessing keys against them must be slow:
    sixteen characters may be a phrase. Every router derives the same ones, hence scrypt's fixed salt.
    """
    derived = scrypt(key, salt=b"quire caller", n=2**14, r=8, p=1, dklen=ID_BYTES + _SALT_BYTES)
    former, rest = derived[:FORMER_BYTES], derived[FORMER_BYTES:]
    return former.hex() + rest[_SALT_BYTES:].hex(), rest[:_SALT_BYTES]


def _id_of_claim(claim: str) -> str:
    label = claim.encode()
    former = blake2b(label, digest_size=FORMER_BYTES, person=b"quire tenant")
    rest = blake2b(label, digest_size=ID_BYTES - FORMER_BYTES, person=b"quire tenant id")
    return OIDC + former.hexdigest() + rest.hexdigest()
