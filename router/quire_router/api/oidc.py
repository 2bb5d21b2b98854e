"""Tokens of an OpenID Connect issuer (RFC 7519): ``OidcVerifier`` checks them with the issuer's keys (RFC 7517), which
it reads in the background, so that no request waits for the issuer. Settings have the names of Kubernetes' API server.
"""

import asyncio
import json
import logging
import ssl
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from time import monotonic, time
from typing import Any, Final

import aiohttp
import jwt

from quire_router.api.auth import OidcSettings, check_issuer_address
from quire_router.core import metrics
from quire_router.core.errors import issuer_unknown, token_invalid
from quire_router.core.retry import wait_at_most

log = logging.getLogger(__name__)

REFRESH_PERIOD = 600.0  # seconds between two readings of the issuer's keys
RETRY_PERIOD = 10.0  # seconds at least between two, whoever asks for them
LEEWAY = 60.0  # seconds that clocks may differ
_TIMEOUT = aiohttp.ClientTimeout(total=10)
_MAX_BYTES = 2**20
_MAX_TOKEN_BYTES = 16 * 2**10
_MAX_CLAIM_CHARACTERS = 256
_CACHED_TOKENS = 4096
_MAX_TIME = 2**53
_WRONG_SIGNATURE = "its signature is not one of the issuer"
# Asymmetric ones alone: with HS256 whoever has the issuer's public keys could sign, and with "none" everybody.
_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
ALGORITHMS: Final = (*_RSA, "ES256", "ES384", "ES512", "EdDSA")
_Key = dict[str, jwt.PyJWK]
"""One key of the issuer, by the algorithms that it may sign with: the one that it names, or all of its type."""


class OidcVerifier:
    """Checks tokens. ``run`` reads the issuer's keys, again and again, and when a token names one that is not known.
    While the issuer cannot be reached the keys that were read stay in force.
    """

    def __init__(self, settings: OidcSettings) -> None:
        self._settings = settings
        self._keys: dict[str | None, _Key] = {}
        self._read_at = -RETRY_PERIOD
        self._wanted = asyncio.Event()
        self._verified: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._problem = ""
        metrics.OIDC_KEYS_CURRENT.set(0)

    def verify(self, token: str) -> str:
        """Returns the claim of a token that names the tenant. Raises ``QuireError`` UNAUTHENTICATED, and UNAVAILABLE
        while the key that it is signed with may just be being read.
        """
        if len(token) > _MAX_TOKEN_BYTES:
            raise token_invalid(f"it has more than {_MAX_TOKEN_BYTES} bytes")
        digest = blake2b(token.encode(), digest_size=16).digest()
        known = self._verified.get(digest)
        if known is not None and time() < known[1]:
            return known[0]
        claims = self._decode(token)
        claim = claims.get(self._settings.tenant_claim)
        if not isinstance(claim, str) or not 0 < len(claim) <= _MAX_CLAIM_CHARACTERS or not _is_unicode(claim):
            raise token_invalid(
                f"its claim {self._settings.tenant_claim} is not a text of 1 to {_MAX_CLAIM_CHARACTERS} characters"
            )
        self._verified[digest] = claim, min(int(claims["exp"]), _MAX_TIME) + LEEWAY
        if len(self._verified) > _CACHED_TOKENS:
            self._verified.popitem(last=False)
        return claim

    def _decode(self, token: str) -> dict[str, Any]:
        try:
            header = jwt.get_unverified_header(token)
        except jwt.InvalidTokenError:
            raise token_invalid("it cannot be read") from None
        key = self._find(header.get("kid")).get(str(header.get("alg")))
        settings = self._settings
        if key is None:
            raise token_invalid(_WRONG_SIGNATURE)
        try:
            return jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=settings.client_id,
                issuer=settings.issuer_url,
                leeway=LEEWAY,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            raise token_invalid("it has expired") from None
        except jwt.ImmatureSignatureError:
            raise token_invalid("it is not valid yet") from None
        except jwt.InvalidAudienceError:
            raise token_invalid("it is for another audience") from None
        except jwt.InvalidIssuerError:
            raise token_invalid("it is of another issuer") from None
        except jwt.MissingRequiredClaimError as error:
            raise token_invalid(f"it has no claim {error.claim}") from None
        except jwt.PyJWTError:
            raise token_invalid(_WRONG_SIGNATURE) from None

    def _find(self, key_id: object) -> _Key:
        """Returns the key of this id, or the issuer's only one for a token that names none."""
        if isinstance(key_id, str) and (key := self._keys.get(key_id)) is not None:
            return key
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        if monotonic() >= self._read_at + RETRY_PERIOD:
            self._wanted.set()
            raise issuer_unknown()
        if not self._keys:
            raise issuer_unknown()
        raise token_invalid("it is signed with none of the issuer's keys")

    async def run(self) -> None:
        """Keeps the issuer's keys current; never ends."""
        while True:
            await self.read_keys()
            await asyncio.sleep(RETRY_PERIOD)
            await wait_at_most(self._wanted, REFRESH_PERIOD if self._keys else 0)

    async def read_keys(self) -> None:
        """Reads the issuer's keys. What cannot be read is logged, once for each problem, and changes nothing."""
        self._wanted.clear()
        try:
            keys = await self._fetch_keys()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, jwt.PyJWTError) as error:
            metrics.OIDC_KEYS_CURRENT.set(0)
            problem = str(error) or type(error).__name__
            if problem != self._problem:
                log.error("the keys of %s cannot be read: %s", self._settings.issuer_url, problem)
            self._problem = problem
        else:
            metrics.OIDC_KEYS_CURRENT.set(1)
            if keys.keys() != self._keys.keys():
                log.info("%s has %d keys", self._settings.issuer_url, len(keys))
            self._keys, self._problem = keys, ""
            self._verified.clear()  # what a key has signed that was withdrawn is not valid any more
        self._read_at = monotonic()

    async def _fetch_keys(self) -> dict[str | None, _Key]:
        settings = self._settings
        context = await asyncio.to_thread(ssl.create_default_context, cafile=settings.ca_file)
        connector = aiohttp.TCPConnector(ssl=context)
        async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, trust_env=True) as session:
            address = settings.jwks_url
            if address is None:
                found = await _fetch_json(
                    session, settings.issuer_url.rstrip("/") + "/.well-known/openid-configuration"
                )
                if found.get("issuer") != settings.issuer_url:
                    raise ValueError(f"its configuration belongs to {str(found.get('issuer'))[:256]!r}")
                address = check_issuer_address(str(found.get("jwks_uri")))
            found = await _fetch_json(session, address)
        return _read_keys(found)


def _read_keys(found: dict[str, Any]) -> dict[str | None, _Key]:
    """Returns the keys of a set that sign and can be used. Raises ``jwt.PyJWTError`` if it has none that can be."""
    jwt.PyJWKSet.from_dict(found)
    keys: dict[str | None, _Key] = {}
    for data in found["keys"]:
        with suppress(jwt.PyJWTError, TypeError, ValueError, AttributeError):  # PyJWT expects texts
            key = jwt.PyJWK(data)
            any_of_rsa = _RSA if key.key_type == "RSA" and not data.get("alg") else ()  # else PyJWT takes RS256 alone
            known = {name: jwt.PyJWK(data, name) for name in any_of_rsa} or {key.algorithm_name: key}
            if key.public_key_use in (None, "sig"):
                keys[key.key_id] = {name: each for name, each in known.items() if name in ALGORITHMS}
    return keys


def _is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which JSON can contain."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


async def _fetch_json(session: aiohttp.ClientSession, address: str) -> dict[str, Any]:
    """Raises ``aiohttp.ClientError`` and ``ValueError``."""
    async with session.get(address, allow_redirects=False, raise_for_status=True) as response:
        body = await response.content.read(_MAX_BYTES + 1)
        while len(body) <= _MAX_BYTES and (more := await response.content.read(_MAX_BYTES)):
            body += more
    if len(body) > _MAX_BYTES:
        raise ValueError(f"{address} has more than {_MAX_BYTES} bytes")
    try:
        found = json.loads(body)
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{address} is not a JSON object")
    return found
