"""Tokens of an issuer: a real HTTP server with an issuer's configuration and keys, and tokens signed with them."""

import asyncio
import hmac
import json
from contextlib import asynccontextmanager, suppress
from hashlib import blake2b
from time import time

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.cli import read_settings
from quire_proto.errors import ErrorCode, QuireError
from quire_router.admission.tenants_file import read_tenants
from quire_router.api import oidc
from quire_router.api.auth import Authenticator, OidcSettings, check_issuer_address
from quire_router.api.oidc import OidcVerifier
from quire_router.config import Settings
from quire_router.core import metrics
from quire_router.core.tenant_ids import former_id
from quire_router.journal.fleet_secret import FleetSecret
from quire_router.journal.objects import MemoryObjectStore

from tests.support.scripted_api import ask, chat, open_stage

AUDIENCE, KEY = "quire", "a-long-enough-key"
RSA, OTHER_RSA = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))
EC, ED = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
SIGNERS = {"rsa": (RSA, "RS256"), "ec": (EC, "ES256"), "ed": (ED, "EdDSA")}


def public(key_id):
    key, algorithm = SIGNERS[key_id]
    to_jwk = jwt.get_algorithm_by_name(algorithm).to_jwk
    return {**to_jwk(key.public_key(), as_dict=True), "kid": key_id, "use": "sig", "alg": algorithm}


class Issuer:
    """What the server says: ``keys`` and, with ``changes``, another configuration; or a ``text`` in its place."""

    def __init__(self):
        self.keys = [public("rsa")]
        self.changes = {}
        self.text = ""
        self.asked = 0
        self.url = ""

    async def configuration(self, _request):
        if self.text:
            return web.Response(text=self.text)
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys", **self.changes})

    async def key_set(self, _request):
        self.asked += 1
        return web.json_response({"keys": self.keys})


@asynccontextmanager
async def serving():
    issuer = Issuer()
    app = web.Application()
    app.router.add_get("/.well-known/openid-configuration", issuer.configuration)
    app.router.add_get("/keys", issuer.key_set)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield issuer
    finally:
        await runner.cleanup()


async def read(issuer, **fields):
    verifier = OidcVerifier(OidcSettings(issuer.url, AUDIENCE, **fields))
    await verifier.read_keys()
    return verifier


def token(issuer, signer="rsa", key=None, algorithm=None, **claims):
    own, own_algorithm = SIGNERS[signer]
    content = {"iss": issuer.url, "aud": AUDIENCE, "sub": "alice", "exp": time() + 300, **claims}
    content = {name: value for name, value in content.items() if value is not None}
    return jwt.encode(content, key or own, algorithm or own_algorithm, headers={"kid": signer})


@pytest.mark.parametrize("signer", SIGNERS)
async def test_a_token_of_the_issuer_says_who_its_caller_is(signer):
    async with serving() as issuer:
        issuer.keys = [public(name) for name in SIGNERS]
        verifier = await read(issuer)

        assert verifier.verify(token(issuer, signer)) == "alice"
        assert (await read(issuer, tenant_claim="team")).verify(token(issuer, signer, team="x y/z")) == "x y/z"
        assert (await read(issuer, jwks_url=f"{issuer.url}/keys")).verify(token(issuer, signer)) == "alice"


@pytest.mark.parametrize("algorithm", ["RS256", "RS512", "PS256", "PS384"])
async def test_a_key_that_names_no_algorithm_signs_with_any_of_its_type(algorithm):
    async with serving() as issuer:
        issuer.keys = [{name: value for name, value in public("rsa").items() if name != "alg"}]
        verifier = await read(issuer)
        assert verifier.verify(token(issuer, algorithm=algorithm)) == "alice"
        pem = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        for forged in ({"key": EC, "algorithm": "ES256"}, {"key": pem.hex(), "algorithm": "HS256"}):
            with pytest.raises(QuireError, match="signature"):
                verifier.verify(token(issuer, **forged))


WRONG = {
    "of another audience": ({"aud": "other"}, "another audience"),
    "without an audience": ({"aud": None}, "no claim aud"),
    "of another issuer": ({"iss": "https://other.example"}, "another issuer"),
    "expired": ({"exp": time() - 3600}, "has expired"),
    "that never ends": ({"exp": None}, "no claim exp"),
    "of the future": ({"nbf": time() + 3600}, "not valid yet"),
    "without a subject": ({"sub": None}, "claim sub"),
    "with a subject that is too long": ({"sub": "x" * 257}, "claim sub"),
    "with half a surrogate pair as its subject": ({"sub": "\ud800"}, "claim sub"),
    "signed by another key of the same name": ({"key": OTHER_RSA}, "signature"),
    "with another algorithm than its key's": ({"algorithm": "PS256"}, "signature"),
    "of an unknown key": ({"signer": "ec"}, "none of the issuer's keys"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_token_that_is_not_for_us_is_refused_with_the_reason(name):
    changes, reason = WRONG[name]
    async with serving() as issuer:
        verifier = await read(issuer)
        with pytest.raises(QuireError, match=reason) as refusal:
            verifier.verify(token(issuer, **changes))

    assert refusal.value.code is ErrorCode.UNAUTHENTICATED


async def test_a_token_may_end_later_than_any_time():
    async with serving() as issuer:
        assert (await read(issuer)).verify(token(issuer, exp=10**400)) == "alice"


def encoded(fields):
    return jwt.utils.base64url_encode(json.dumps(fields).encode()).decode()


async def test_nobody_signs_with_what_is_public():
    """An unsigned token, and one whose signature is made from the issuer's public key."""
    async with serving() as issuer:
        verifier = await read(issuer)
        claims = {"iss": issuer.url, "aud": AUDIENCE, "sub": "root", "exp": time() + 300}
        signed = ".".join(map(encoded, ({"alg": "HS256", "kid": "rsa"}, claims)))
        proof = hmac.digest(public("rsa")["n"].encode(), signed.encode(), "sha256")
        unsigned = jwt.encode(claims, None, "none", headers={"kid": "rsa"})
        for forged in (unsigned, f"{signed}.{jwt.utils.base64url_encode(proof).decode()}"):
            with pytest.raises(QuireError, match="signature") as refusal:
                verifier.verify(forged)
            assert refusal.value.code is ErrorCode.UNAUTHENTICATED


@given(st.text(max_size=200) | st.builds("{}.{}.{}".format, *[st.text("eyJ-_AQ09", max_size=40)] * 3))
def test_no_text_is_taken_for_a_token_or_ends_anything(text):
    verifier = OidcVerifier(OidcSettings("https://issuer.example", AUDIENCE))
    with pytest.raises(QuireError):
        verifier.verify(text)


async def test_a_token_is_checked_again_when_it_has_expired_and_when_keys_are_read(monkeypatch):
    monkeypatch.setattr(oidc, "LEEWAY", 0)
    async with serving() as issuer:
        verifier = await read(issuer)
        short, long = token(issuer, exp=time() + 1), token(issuer)
        assert [verifier.verify(each) for each in (short, long, short, long)] == ["alice"] * 4
        monkeypatch.setattr(oidc, "time", lambda: time() + 2)  # for what was verified before
        await asyncio.sleep(1.1)
        with pytest.raises(QuireError, match="expired"):
            verifier.verify(short)

        issuer.keys = [public("ec")]
        await verifier.read_keys()
        verifier._read_at = -1e9
        with pytest.raises(QuireError) as unknown:
            verifier.verify(long)
    assert unknown.value.code is ErrorCode.UNAVAILABLE


async def accepted(verifier, signed):
    """What is in a token, as soon as it is accepted."""
    for _ in range(500):
        with suppress(QuireError):
            return verifier.verify(signed)
        await asyncio.sleep(0.02)
    raise TimeoutError


async def test_a_new_key_is_found_by_the_first_token_that_is_signed_with_it(monkeypatch):
    monkeypatch.setattr(oidc, "RETRY_PERIOD", 0.1)
    async with serving() as issuer:
        verifier = OidcVerifier(OidcSettings(issuer.url, AUDIENCE))
        with pytest.raises(QuireError) as too_early:
            verifier.verify(token(issuer))
        running = asyncio.create_task(verifier.run())
        try:
            first = await accepted(verifier, token(issuer))
            issuer.keys, asked = [public("rsa"), public("ec")], issuer.asked
            found = await accepted(verifier, token(issuer, "ec"))
        finally:
            running.cancel()

    assert (too_early.value.code, too_early.value.retry_after) == (ErrorCode.UNAVAILABLE, 1.0)
    assert (first, found) == ("alice", "alice")
    assert 1 <= issuer.asked - asked <= 3, "unknown keys do not make it ask without end"


@pytest.mark.parametrize(
    "change",
    [{"issuer": "https://other.example"}, {"jwks_uri": "http://other.example/keys"}, {"jwks_uri": None}],
    ids=str,
)
async def test_an_issuer_that_says_something_else_is_not_believed_and_known_keys_stay(change, caplog):
    async with serving() as issuer:
        verifier = await read(issuer)
        issuer.changes = change
        for _ in range(2):
            await verifier.read_keys()

        assert verifier.verify(token(issuer)) == "alice"
    assert metrics.OIDC_KEYS_CURRENT._value.get() == 0
    assert sum("cannot be read" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    "key", [5, None, [], {"kty": "RSA", "n": 5}, {**public("ec"), "kid": []}, {**public("ec"), "alg": {}}], ids=range(6)
)
async def test_a_key_that_is_none_costs_no_other(key):
    async with serving() as issuer:
        issuer.keys = [key, public("rsa"), key]
        verifier = await read(issuer)
        assert verifier.verify(token(issuer)) == "alice"


async def test_an_issuer_that_nests_deeper_than_can_be_read_changes_nothing():
    async with serving() as issuer:
        verifier = await read(issuer)
        issuer.text = "[" * 100_000
        await verifier.read_keys()
        assert verifier.verify(token(issuer)) == "alice"


async def test_an_issuer_that_is_away_or_sends_too_much_changes_nothing(monkeypatch):
    async with serving() as issuer:
        verifier = await read(issuer)
        good = token(issuer)
        monkeypatch.setattr(oidc, "_MAX_BYTES", 100)
        await verifier.read_keys()
        assert verifier.verify(good) == "alice"
    await verifier.read_keys()
    assert verifier.verify(good) == "alice"


async def test_callers_with_tokens_are_tenants_of_the_file_or_of_their_own(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(
        "[default]\nrequests_per_minute = 7\n"
        f'[[tenants]]\nname = "a"\nkeys = ["{KEY}"]\nclaims = ["alice", "al"]\n'
        '[[tenants]]\nname = "b"\nclaims = ["bob"]\nmodels = ["m"]\n'
    )
    async with serving() as issuer:
        keys = Authenticator((), read_tenants(path), await read(issuer))
        alice, al, bob, carol, dave = (
            keys.authenticate(f"Bearer {token(issuer, sub=name)}") for name in ("alice", "al", "bob", "carol", "dave")
        )

    assert alice == al == keys.authenticate(f"Bearer {KEY}")
    assert (bob.tenant, bob.may_use("m"), bob.may_use("n")) == ("b", True, False)
    assert carol.policy.requests_per_minute == 7
    assert len({each.tenant for each in (alice, bob, carol, dave)}) == 4
    assert len({each.cache_salt for each in (alice, bob, carol, dave)}) == 4
    assert all(len(each.cache_salt) == 16 for each in (alice, bob, carol, dave))


async def test_ids_have_16_bytes_and_salts_follow_from_no_claim_without_the_fleets_secret(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text('[[tenants]]\nname = "b"\nclaims = ["bob"]\n')
    store = MemoryObjectStore()
    secrets = [FleetSecret(store), FleetSecret(store), FleetSecret(MemoryObjectStore())]
    for secret in secrets:
        assert await secret.agree()
    async with serving() as issuer:
        callers = [
            [
                Authenticator((), read_tenants(path), await read(issuer), secret).authenticate(f"Bearer {signed}")
                for secret in secrets
            ]
            for signed in (token(issuer, sub="bob"), token(issuer, sub="dave"))
        ]
    for one, same, other in callers:
        assert one == same
        assert (one.tenant, one.cache_salt != other.cache_salt) == (other.tenant, True)
    dave = callers[1][0].tenant
    assert len(bytes.fromhex(dave.removeprefix("oidc-"))) == 16
    assert former_id(dave) == f"oidc-{blake2b(b'dave', digest_size=6, person=b'quire tenant').hexdigest()}"


async def test_rest_and_grpc_take_a_token_where_they_take_a_key():
    async with serving() as issuer, open_stage(keys=[KEY], tokens=await read(issuer)) as stage:
        right = {"authorization": f"Bearer {token(issuer)}"}
        answers = [
            await ask(stage.port, "POST", "/v1/chat/completions", chat(), headers)
            for headers in (right, {"authorization": f"Bearer {KEY}"}, {"x-api-key": token(issuer)}, {})
        ]
        wrong = await ask(
            stage.port,
            "POST",
            "/v1/chat/completions",
            chat(),
            {"authorization": f"Bearer {token(issuer, aud='other')}"},
        )
    assert [answer.status for answer in answers] == [200, 200, 200, 401]
    assert wrong.error["message"] == "This token is not valid: it is for another audience."


async def test_without_keys_tokens_alone_open():
    async with serving() as issuer, open_stage(tokens=await read(issuer)) as stage:
        refused = await ask(stage.port, "POST", "/v1/chat/completions", chat())
        taken = await ask(
            stage.port, "POST", "/v1/chat/completions", chat(), {"authorization": f"Bearer {token(issuer)}"}
        )
    assert (refused.status, taken.status) == (401, 200)


@pytest.mark.parametrize("address", ["http://issuer.example", "http://127.0.0.1.evil.example", "issuer", "ftp://x", ""])
def test_an_address_that_is_not_encrypted_is_refused(address):
    with pytest.raises(ValueError, match="https"):
        check_issuer_address(address)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--oidc-issuer-url", "https://issuer.example"], "needs --oidc-client-id"),
        (["--oidc-client-id", "quire"], "need --oidc-issuer-url"),
        (["--oidc-issuer-url", "http://issuer.example", "--oidc-client-id", "quire"], "https"),
    ],
)
def test_settings_that_cannot_work_are_refused(flags, problem, tmp_path, capsys):
    with pytest.raises(SystemExit):
        read_settings(Settings, ["--model", str(tmp_path), *flags])
    assert problem in capsys.readouterr().err
