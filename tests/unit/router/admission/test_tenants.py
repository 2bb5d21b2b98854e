"""The tenants' file, and what keys become of it."""

import asyncio
import json
import os
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.cli import read_settings
from quire_proto.errors import ErrorCode, QuireError
from quire_router.admission.limits import RateLimiter
from quire_router.admission.settings_file import FileWatch, SettingsFileError
from quire_router.admission.tenants import MAX_OTHERS, Tenant, Tenants, TenantUsage
from quire_router.admission.tenants_file import ApiKey, read_tenants
from quire_router.api.auth import Authenticator, Identity
from quire_router.components import Components
from quire_router.config import Settings, log_startup_warnings
from quire_router.core import metrics

from tests.support.http_engines import DEMO, demo_tokenizer

KEY, OTHER, THIRD = "a-long-enough-key", "another-long-key", "third-key-of-many"
ISSUER = ("--oidc-issuer-url", "https://issuer.example", "--oidc-client-id", "quire")
HASH = sha256(KEY.encode()).hexdigest()
TOML = f"""
[default]
requests_per_minute = 60

[[tenants]]
name = "research"
keys = ["{KEY}"]
models = ["big"]
weight = 2
priority = -5
allow_priority = true
requests_per_minute = 600
tokens_per_minute = 100_000
max_concurrent = 8
max_queued = 16

[[tenants]]
name = "shop"
key_files = ["shop.key"]
retention = 0
"""


def write(folder, content, name="tenants.toml"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def entry(**fields):
    return {"name": "a", "keys": [KEY], **fields}


def test_a_file_names_tenants_their_keys_and_what_they_may_use(tmp_path):
    (tmp_path / "shop.key").write_text(f"{OTHER}\n")
    file = read_tenants(write(tmp_path, TOML))
    research, shop = file.tenants["research"], file.tenants["shop"]

    assert file.keys == {"research": (ApiKey.of(KEY),), "shop": (ApiKey.of(OTHER),)}
    assert (research.weight, research.priority, research.allow_priority) == (2, -5, True)
    assert (research.requests_per_minute, research.tokens_per_minute) == (600, 100_000)
    assert (research.max_concurrent, research.max_queued) == (8, 16)
    researcher = Identity(policy=research)
    assert (researcher.may_use("big"), researcher.may_use("small")) == (True, False)
    assert (research.retention, shop.retention) == (None, 0)
    assert Identity(policy=shop).may_use("small")
    assert not TenantUsage(shop).is_limited
    assert file.tenants["anyone"].requests_per_minute == 60
    assert file.tenants["anyone"].id == "anyone"
    assert KEY not in repr(file)


def test_json_and_toml_files_are_equivalent(tmp_path):
    (tmp_path / "shop.key").write_text(OTHER)
    content = {
        "default": {"requests_per_minute": 60},
        "tenants": [
            {
                "name": "research", "keys": [KEY], "models": ["big"], "weight": 2, "priority": -5,
                "allow_priority": True, "requests_per_minute": 600, "tokens_per_minute": 100_000, "max_concurrent": 8,
                "max_queued": 16,
            },
            {"name": "shop", "key_files": ["shop.key"], "retention": 0},
        ],
    }  # fmt: skip
    one, other = read_tenants(write(tmp_path, TOML)), read_tenants(write(tmp_path, content, "tenants.json"))

    for name in ("research", "shop", "x"):
        assert one.tenants[name] == other.tenants[name]
    assert one.keys == other.keys


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ({}, "tenants: it is missing"),
        ({"tenants": []}, "tenants: it is empty, which lets no client in"),
        ({"open": False, "default": {"weight": 2}, "tenants": []}, "tenants: it is empty"),
        ({"open": True, "tenants": [entry()]}, "open: everybody would be let in without the keys"),
        ({"open": "yes", "tenants": []}, "open: "),
        ({"tenants": [entry(models=[])]}, "tenants[0].models: it is empty, which could mean none or all"),
        ({"tenants": [], "defaults": {}}, "defaults: there is no such setting"),
        (
            {"tenants": [entry(), entry(name="b", keys=[OTHER], wieght=2)]},
            "tenants[1].wieght: there is no such setting",
        ),
        ({"tenants": [entry(weight=0)]}, "tenants[0].weight: "),
        ({"tenants": [entry(weight=float("inf"))]}, "tenants[0].weight: "),
        ({"tenants": [entry(weight="2")]}, "tenants[0].weight: "),
        ({"tenants": [entry(requests_per_minute=0)]}, "tenants[0].requests_per_minute: "),
        ({"tenants": [entry(tokens_per_minute=1.5)]}, "tenants[0].tokens_per_minute: "),
        ({"tenants": [entry(max_concurrent=True)]}, "tenants[0].max_concurrent: "),
        ({"tenants": [entry(max_queued=-1)]}, "tenants[0].max_queued: "),
        ({"tenants": [entry(retention=-1)]}, "tenants[0].retention: "),
        ({"tenants": [entry(retention=float("inf"))]}, "tenants[0].retention: "),
        ({"tenants": [entry(priority=2**30)]}, "tenants[0].priority: "),
        ({"tenants": [entry(models="big")]}, "tenants[0].models: "),
        ({"tenants": [entry(models=["big", 3])]}, "tenants[0].models[1]: "),
        ({"tenants": [entry(name="")]}, "tenants[0].name: "),
        ({"tenants": [entry(name="a b")]}, "tenants[0].name: "),
        ({"tenants": [entry(name="a{b}")]}, "tenants[0].name: "),
        ({"tenants": [entry(name="x" * 64)]}, "tenants[0].name: "),
        ({"tenants": [entry(name="0123456789ab")]}, "tenants[0].name: "),
        ({"tenants": [entry(keys=[])]}, "tenants[0]: needs a key"),
        ({"tenants": [entry(keys=["short"])]}, "tenants[0].keys[0]: a key must have at least 16"),
        ({"tenants": [entry(keys=[KEY + " x"])]}, "tenants[0].keys[0]: "),
        ({"tenants": [entry(key_files=["nowhere"])]}, "tenants[0].key_files[0]: it cannot be read: No such file"),
        ({"tenants": [entry(key_files=["short.key"])]}, "tenants[0].key_files[0]: a key must have"),
        ({"tenants": [entry(), entry()]}, "tenants[1].name: a is there twice"),
        ({"tenants": [entry(), entry(name="b")]}, "a key of b is there twice, also as one of a"),
        ({"tenants": [entry(keys=[{"sha256": "ab"}])]}, "tenants[0].keys[0].sha256: "),
        ({"tenants": [entry(keys=[{"key": KEY, "file": "x"}])]}, "tenants[0].keys[0]: needs one of key, sha256 and"),
        ({"tenants": [entry(keys=[{"expires": "2027-01-01T00:00:00Z"}])]}, "tenants[0].keys[0]: needs one of"),
        ({"tenants": [entry(keys=[{"key": KEY, "expires": "soon"}])]}, "tenants[0].keys[0].expires: "),
        ({"tenants": [entry(keys=[{"key": KEY, "expires": "2027-01-01T00:00:00"}])]}, "tenants[0].keys[0].expires: "),
        ({"tenants": [entry(keys=[{"file": "nowhere"}])]}, "tenants[0].keys[0].file: it cannot be read: No such"),
        ({"tenants": [entry(), entry(name="b", keys=[{"sha256": HASH}])]}, "a key of b is there twice"),
        ({"tenants": [entry(claims=[""])]}, "tenants[0].claims[0]: "),
        ({"tenants": [entry(claims=["x"]), entry(name="b", keys=[], claims=["x"])]}, "tenants[1].claims: x is also"),
        ({"tenants": {"a": entry()}}, "tenants: "),
        ([], ""),
    ],
    ids=str,
)
def test_an_error_is_one_sentence_with_the_path_and_never_a_key(content, where, tmp_path):
    (tmp_path / "short.key").write_text("short-key-xyz")
    path = write(tmp_path, content, "tenants.json")
    with pytest.raises(SettingsFileError) as refusal:
        read_tenants(path)
    message = str(refusal.value)

    assert message.startswith(f"{path}: {where}")
    assert message.count("\n") == 0
    assert message.endswith(".")
    assert not any(key in message for key in (KEY, OTHER, "short-key-xyz"))
    assert "pydantic" not in message


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.toml", "[[tenants]"), ("a.json", "{,}"), ("a.json", "[" * 100_000), ("a.toml", 'keys = "' + KEY)],
)
def test_a_file_that_is_neither_json_nor_toml_is_an_error(name, content, tmp_path):
    with pytest.raises(SettingsFileError, match="cannot be read") as refusal:
        read_tenants(write(tmp_path, content, name))
    assert KEY not in str(refusal.value)


def test_a_file_that_is_missing_or_too_large_or_not_text_is_an_error(tmp_path):
    with pytest.raises(SettingsFileError, match="No such file"):
        read_tenants(tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsFileError, match="UTF-8"):
        read_tenants(tmp_path / "binary.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * (4 * 2**20 + 1))
    with pytest.raises(SettingsFileError, match="bytes"):
        read_tenants(tmp_path / "large.toml")


# Keys


def keys_of(folder, tenants, *flags, **others):
    return Authenticator(flags, read_tenants(write(folder, {"tenants": tenants, **others}, "tenants.json")))


def test_all_keys_of_a_tenant_open_the_same_and_it_keeps_its_name_when_they_change(tmp_path):
    keys = keys_of(tmp_path, [entry(keys=[KEY, OTHER])])
    one, other = (keys.authenticate(f"Bearer {key}") for key in (KEY, OTHER))
    later = keys_of(tmp_path, [entry(keys=[OTHER])]).authenticate(f"Bearer {OTHER}")

    assert one == other
    assert (one.tenant, one.policy.id) == ("a", "a")
    assert later.tenant == "a"
    assert len(one.cache_salt) == 16


def test_a_key_keeps_its_salt_when_it_moves_into_the_file(tmp_path):
    before, after = (
        Authenticator([KEY]).authenticate(f"Bearer {KEY}"),
        keys_of(tmp_path, [entry()]).authenticate(f"Bearer {KEY}"),
    )
    assert before.cache_salt == after.cache_salt


def test_salts_do_not_follow_from_names(tmp_path):
    one = keys_of(tmp_path, [entry(keys=[KEY])]).authenticate(f"Bearer {KEY}")
    other = keys_of(tmp_path, [entry(keys=[OTHER])]).authenticate(f"Bearer {OTHER}")
    assert one.tenant == other.tenant
    assert one.cache_salt != other.cache_salt


def test_a_key_that_is_also_a_flag_is_the_tenants(tmp_path):
    keys = keys_of(tmp_path, [entry()], KEY, OTHER, default={"requests_per_minute": 7})
    assert keys.authenticate(f"Bearer {KEY}").tenant == "a"
    plain = keys.authenticate(f"Bearer {OTHER}")
    assert plain == Authenticator([OTHER]).authenticate(f"Bearer {OTHER}")
    assert plain.policy.requests_per_minute == 7


def test_with_a_file_only_the_keys_in_it_are_accepted(tmp_path):
    with pytest.raises(QuireError) as refusal:
        keys_of(tmp_path, [entry()]).authenticate(f"Bearer {OTHER}")
    assert refusal.value.code == ErrorCode.UNAUTHENTICATED


def test_a_tenants_models_are_checked():
    Identity().check_model("anything")
    with pytest.raises(QuireError) as refusal:
        Identity(policy=Tenant("a", models=frozenset({"big"}))).check_model("small")
    assert (refusal.value.code, refusal.value.param) == (ErrorCode.FORBIDDEN, "model")


def test_the_settings_of_admission_are_flags(tmp_path):
    path = str(tmp_path / "tenants.toml")
    numbers = {"--hold-timeout": 3, "--max-queue-seconds": 4, "--max-queued-requests": 5, "--max-queued-bytes": 6}
    flags = [f"{flag}={number}" for flag, number in numbers.items()]
    settings = read_settings(Settings, ["--model", "/m", "--tenants", path, *flags])
    assert str(settings.tenants) == path
    assert (settings.hold_timeout, settings.max_queue_seconds) == (3, 4)
    assert (settings.max_queued_requests, settings.max_queued_bytes) == (5, 6)


def test_models_that_are_not_served_are_returned_with_the_tenants_that_may_use_them(tmp_path):
    file = read_tenants(
        write(
            tmp_path,
            f'[default]\nmodels = ["a", "old"]\n[[tenants]]\nname = "shop"\nkeys = ["{KEY}"]\nmodels = ["b", "z"]',
        )
    )

    assert file.unknown_models({"a", "b"}) == [("", "old"), ("shop", "z")]
    assert file.unknown_models({"a", "b", "old", "z"}) == []


def test_a_router_warns_of_models_that_it_does_not_serve(tmp_path, caplog):
    path = write(tmp_path, TOML.replace("shop.key", write(tmp_path, THIRD, "shop.key").name))
    flags = ["--model", "small=/nowhere", "--engine", "here:1", "--tenants", str(path)]
    log_startup_warnings(read_settings(Settings, flags))

    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line == f"{path}: research may use 'big', which is not served here"


@pytest.mark.parametrize(
    ("content", "flags", "problem"),
    [
        ({"tenants": [{"name": "a", "claims": ["x"]}]}, (), "tenants[0].claims: no tokens are accepted: give --oidc"),
        ({"tenants": [entry(), {"name": "b", "claims": ["x"]}]}, ("--api-key", OTHER), "tenants[1].claims: no tokens"),
        ({"tenants": []}, (), "tenants: it is empty"),
        ({"tenants": []}, ("--api-key", OTHER), None),
        ({"tenants": []}, ISSUER, None),
        ({"tenants": [{"name": "a", "claims": ["x"]}]}, ISSUER, None),
        ({"open": True}, (), None),
        ({"open": True, "tenants": [], "default": {"requests_per_minute": 1}}, (), None),
        ({"open": True}, ("--api-key", OTHER), "open: everybody would be let in"),
        ({"open": True}, ISSUER, "open: everybody would be let in"),
    ],
    ids=str,
)
def test_a_file_lets_somebody_in_and_everybody_only_if_it_says_so(content, flags, problem, tmp_path):
    path = write(tmp_path, content, "tenants.json")
    settings = read_settings(Settings, ["--model", "/m", "--tenants", str(path), *flags])
    if problem is None:
        keys = Authenticator((key.get_secret_value() for key in settings.api_key), settings.read_tenants())
        assert keys.required != content.get("open", False)
        return
    for reading in (settings.read_tenants, lambda: log_startup_warnings(settings)):
        with pytest.raises(SettingsFileError) as refusal:
            reading()
        assert str(refusal.value).startswith(f"{path}: {problem}")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--api-key", " , "], "--api-key: it names no key"),
        (["--scaling-client-name", ""], "--scaling-client-name is empty, so that any client may ask"),
        (["--require-key"], "--require-key needs --api-key, --tenants or --oidc-issuer-url"),
        (["--require-key", "--api-key", ""], "--require-key needs --api-key, --tenants or --oidc-issuer-url"),
    ],
)
def test_a_list_of_who_may_enter_is_not_empty(flags, said, capsys):
    with pytest.raises(SystemExit):
        read_settings(Settings, ["--model", "/m", *flags])
    assert said in capsys.readouterr().err


def test_a_router_that_requires_keys_takes_no_open_file(tmp_path):
    path = write(tmp_path, {"open": True}, "tenants.json")
    settings = read_settings(Settings, ["--model", "/m", "--tenants", str(path), "--require-key"])
    with pytest.raises(SettingsFileError, match="open: everybody would be let in, in spite of --require-key"):
        settings.read_tenants()


@pytest.mark.parametrize("content", [{"tenants": []}, {"open": True}, {"tenants": [{"name": "b", "claims": ["x"]}]}])
async def test_a_replaced_file_never_opens_a_router(content, tmp_path):
    path = write(tmp_path, {"tenants": [entry()]}, "tenants.json")
    settings = read_settings(Settings, ["--model", f"m={DEMO}", "--tenants", str(path)])
    parts = Components(settings, {"m": demo_tokenizer()})
    write(tmp_path, content, "tenants.json")
    assert await parts._tenants_file.look() is None
    assert metrics.TENANTS_FILE_CURRENT._value.get() == 0
    with pytest.raises(QuireError, match="key"):
        parts.service.keys.authenticate()


def test_a_replaced_file_closes_an_open_router(tmp_path):
    keys = Authenticator((), read_tenants(write(tmp_path, {"open": True}, "tenants.json")))
    assert keys.authenticate() == Identity()
    keys.replace(read_tenants(write(tmp_path, {"tenants": [entry()]}, "tenants.json")))
    with pytest.raises(QuireError):
        keys.authenticate()
    keys.replace(read_tenants(write(tmp_path, {"open": True}, "tenants.json")))
    assert keys.required


# Keys that end, keys by their hash, and files that are replaced


def test_a_key_by_its_hash_opens_and_the_file_does_not_show_it(tmp_path):
    path = write(tmp_path, {"tenants": [entry(keys=[{"sha256": HASH.upper()}])]}, "tenants.json")
    caller = Authenticator((), read_tenants(path)).authenticate(f"Bearer {KEY}")

    assert caller.tenant == "a"
    assert KEY not in path.read_text()
    with pytest.raises(QuireError, match="not valid"):
        Authenticator((), read_tenants(path)).authenticate(f"Bearer {HASH}")


@pytest.mark.parametrize(("expires", "opens"), [("2020-01-01T00:00:00Z", False), ("2120-01-01T00:00:00+02:00", True)])
def test_a_key_opens_until_it_expires(expires, opens, tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(f'[[tenants]]\nname = "a"\nkeys = ["{OTHER}", {{ key = "{KEY}", expires = {expires} }}]\n')
    keys = Authenticator((), read_tenants(path))

    assert keys.authenticate(f"Bearer {OTHER}").tenant == "a"
    if opens:
        assert keys.authenticate(f"Bearer {KEY}").tenant == "a"
    else:
        with pytest.raises(QuireError, match="This API key has expired") as refusal:
            keys.authenticate(f"Bearer {KEY}")
        assert refusal.value.code is ErrorCode.UNAUTHENTICATED


async def test_a_file_that_was_replaced_is_read_again_once(tmp_path):
    path = write(tmp_path, {"tenants": [entry(key_files=["k"])]}, "tenants.json")
    (tmp_path / "k").write_text(OTHER)
    watch = FileWatch(path, read_tenants(path), read_tenants, metrics.TENANTS_FILE_CURRENT)
    assert await watch.look() is None

    (tmp_path / "next").write_text(THIRD)
    os.replace(tmp_path / "next", tmp_path / "k")
    of_key = await watch.look()
    again = await watch.look()
    write(tmp_path, {"tenants": [entry(keys=[THIRD], weight=3)]}, "tenants.json")
    of_file = [await watch.look() for _ in range(3)]

    assert of_key.keys["a"] == (ApiKey.of(KEY), ApiKey.of(THIRD))
    assert again is None
    assert of_file[0].tenants["a"].weight == 3
    assert of_file[-1] is None


async def test_what_is_replaced_after_it_was_read_and_before_it_is_watched_is_read_again(tmp_path):
    path = write(tmp_path, {"tenants": [entry(key_files=["k"])]}, "tenants.json")
    (tmp_path / "k").write_text(OTHER)
    read = read_tenants(path)
    (tmp_path / "next").write_text(THIRD)
    os.replace(tmp_path / "next", tmp_path / "k")
    of_key = await FileWatch(path, read, read_tenants, metrics.TENANTS_FILE_CURRENT).look()

    write(tmp_path, {"tenants": [entry(keys=[THIRD])]}, "next")
    os.replace(tmp_path / "next", path)
    of_file = await FileWatch(path, of_key, read_tenants, metrics.TENANTS_FILE_CURRENT).look()

    assert of_key.keys["a"] == (ApiKey.of(KEY), ApiKey.of(THIRD))
    assert of_file.keys["a"] == (ApiKey.of(THIRD),)


async def test_a_file_that_cannot_be_used_changes_nothing_and_is_logged_once(tmp_path, caplog):
    path = write(tmp_path, {"tenants": [entry()]}, "tenants.json")
    watch = FileWatch(path, read_tenants(path), read_tenants, metrics.TENANTS_FILE_CURRENT)
    path.write_text('{"tenants": [')
    broken = [await watch.look() for _ in range(3)]
    state = metrics.TENANTS_FILE_CURRENT._value.get()
    write(tmp_path, {"tenants": [entry(key_files=["later"])]}, "tenants.json")
    missing = await watch.look()
    (tmp_path / "later").write_text(OTHER)
    found = await watch.look()

    assert (broken, missing, state) == ([None] * 3, None, 0)
    assert [record.message.count("stays in force") for record in caplog.records if record.levelname == "ERROR"] == [
        1,
        1,
    ]
    assert found.keys["a"] == (ApiKey.of(KEY), ApiKey.of(OTHER))
    assert metrics.TENANTS_FILE_CURRENT._value.get() == 1


def test_a_replaced_file_takes_keys_away_and_gives_others(tmp_path):
    keys = keys_of(tmp_path, [entry()], THIRD)
    before = keys.authenticate(f"Bearer {KEY}")
    keys.replace(read_tenants(write(tmp_path, {"tenants": [entry(keys=[OTHER], models=["m"])]}, "tenants.json")))
    after = keys.authenticate(f"Bearer {OTHER}")

    assert (before.tenant, after.tenant, after.policy.models) == ("a", "a", frozenset({"m"}))
    assert keys.authenticate(f"Bearer {THIRD}").policy.id not in ("a", "")
    with pytest.raises(QuireError):
        keys.authenticate(f"Bearer {KEY}")


async def test_limits_of_a_replaced_file_hold_for_what_was_counted_before():
    tenants, now = Tenants([Tenant("a", requests_per_minute=2, max_concurrent=9)]), [0]
    limiter = RateLimiter(tenants, clock=lambda: now[0])
    first = await limiter.reserve("a", "1", 10)
    await limiter.reserve("a", "2", 10)
    with pytest.raises(QuireError, match="a minute"):
        await limiter.reserve("a", "3", 10)
    tenants.replace_all(Tenants([Tenant("a", requests_per_minute=600, max_concurrent=2)]))
    now[0] = 1_000_000
    with pytest.raises(QuireError, match=r"at once|in progress"):
        await limiter.reserve("a", "3", 10)
    first.settle()
    await limiter.reserve("a", "3", 10)
    tenants.replace_all(Tenants([Tenant("b")], default=Tenant(tokens_per_minute=5)))

    assert limiter.status("b") is None
    with pytest.raises(QuireError, match="tokens"):
        await limiter.reserve("a", "4", 10)


async def test_tenants_that_use_nothing_leave_memory() -> None:
    now, tenants = [0], Tenants(default=Tenant(requests_per_minute=10, tokens_per_minute=1000, max_concurrent=4))
    limits = RateLimiter(tenants, clock=lambda: now[0])
    running = await limits.reserve("busy", "r", 10)
    for number in range(4_000):
        now[0] += 500_000
        limits.count_poll(f"user {number}")
        (await limits.reserve(f"user {number}", "r", 10)).settle()
    assert len(limits._usages) < 400, "those of the last minute, and no more than that again"
    for number in range(MAX_OTHERS + 10):
        assert tenants[f"{number}"].requests_per_minute == 10
    assert len(tenants._others) == MAX_OTHERS
    assert len(tenants) == MAX_OTHERS + 1
    assert limits._usages["busy"].running == 1
    running.settle()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 900), st.integers(0, 90)), max_size=40))
def test_a_tenant_that_was_forgotten_is_admitted_as_one_that_was_not(steps: list[tuple[str, int, int]]) -> None:
    """The same requests, with and without others that make limiters forget."""

    async def admitted(others: int) -> list[bool]:
        now, tenants = [0], Tenants(default=Tenant(requests_per_minute=3, tokens_per_minute=1000))
        limits, answers = RateLimiter(tenants, clock=lambda: now[0]), []
        for number, (tenant, tokens, seconds) in enumerate(steps):
            now[0] += seconds * 1_000_000
            for other in range(others):
                limits.count_poll(f"other {number} {other}")
            try:
                (await limits.reserve(tenant, f"{number}", tokens)).commit_all()
                answers.append(True)
            except QuireError:
                answers.append(False)
        return answers

    assert asyncio.run(admitted(0)) == asyncio.run(admitted(4))
