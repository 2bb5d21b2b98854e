"""The router's settings, from flags and from the environment."""

import pytest
from quire_router.config import Settings, read_settings

KEY = "a-long-enough-key"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for field in Settings.model_fields:
        monkeypatch.delenv(f"QUIRE_ROUTER_{field.upper()}", raising=False)


def test_flags_repeat_and_models_have_names():
    settings = read_settings(
        ["--model", "demo=/models/a", "--model", "/models/b", "--engine", "one:9000", "--engine", "[::1]:9001"]
    )

    assert {name: str(folder) for name, folder in settings.models.items()} == {"demo": "/models/a", "b": "/models/b"}
    assert settings.engine == ["one:9000", "[::1]:9001"]


def test_defaults_suit_a_laptop():
    settings = read_settings(["--model", "/m"])

    assert (settings.host, settings.http_port, settings.grpc_port, settings.metrics_port) == (
        "127.0.0.1",
        8000,
        8001,
        8002,
    )
    assert settings.redis_url is None
    assert settings.api_key == []


def test_every_flag_is_also_a_variable(monkeypatch):
    variables = {
        "MODEL": "a=/x, b=/y",
        "ENGINE": "one:1,two:2",
        "HTTP_PORT": "18000",
        "API_KEY": f"{KEY},{KEY}2",
        "REDIS_URL": "redis://:secret@redis:6379/0",
        "SHUTDOWN_TIMEOUT": "2.5",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"QUIRE_ROUTER_{name}", value)
    settings = read_settings([])

    assert list(settings.models) == ["a", "b"]
    assert settings.engine == ["one:1", "two:2"]
    assert (settings.http_port, settings.shutdown_timeout) == (18000, 2.5)
    assert [key.get_secret_value() for key in settings.api_key] == [KEY, KEY + "2"]
    assert "secret" not in repr(settings)
    assert KEY not in repr(settings)


def test_a_flag_counts_more_than_its_variable(monkeypatch):
    monkeypatch.setenv("QUIRE_ROUTER_HTTP_PORT", "1")

    assert read_settings(["--model", "/m", "--http-port", "2"]).http_port == 2


@pytest.mark.parametrize(
    ("flags", "variable", "allowed"),
    [
        ([], None, False),
        (["--allow-priority"], None, True),
        (["--no-allow-priority"], "true", False),
        ([], "true", True),
        ([], "0", False),
    ],
)
def test_clients_set_priorities_only_where_the_router_says_so(flags, variable, allowed, monkeypatch):
    if variable is not None:
        monkeypatch.setenv("QUIRE_ROUTER_ALLOW_PRIORITY", variable)

    assert read_settings(["--model", "/m", *flags]).allow_priority is allowed


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ([], "--model"),
        (["--model", "a b=/x"], "--model"),
        (["--model", "=/x"], "--model"),
        (["--model", "../=/x"], "--model"),
        (["--model", "/m", "--engine", "nowhere"], "--engine"),
        (["--model", "/m", "--engine", "host:0"], "--engine"),
        (["--model", "/m", "--engine", "http://host:1"], "--engine"),
        (["--model", "/m", "--http-port", "65536"], "--http-port"),
        (["--model", "/m", "--grpc-port", "x"], "--grpc-port"),
        (["--model", "/m", "--api-key", "fifteen-letters"], "--api-key"),
        (["--model", "/m", "--api-key", "long enough but with spaces"], "--api-key"),
        (["--model", "/m", "--request-timeout", "0"], "--request-timeout"),
        (["--model", "/m", "--request-timeout", "inf"], "--request-timeout"),
        (["--model", "/m", "--max-concurrent-requests", "0"], "--max-concurrent-requests"),
        (["--model", "/m", "--max-connections", "0"], "--max-connections"),
        (["--model", "/m", "--log-level", "loud"], "--log-level"),
    ],
)
def test_a_wrong_setting_ends_the_start_with_a_line_that_names_it(arguments, flag):
    with pytest.raises(SystemExit) as end:
        read_settings(arguments)

    assert flag in str(end.value)
    assert "pydantic" not in str(end.value)


def test_a_key_of_sixteen_characters_will_do_and_a_shorter_one_is_told_so():
    assert read_settings(["--model", "/m", "--api-key", "sixteen-letters!"]).api_key
    with pytest.raises(SystemExit, match="at least 16"):
        read_settings(["--model", "/m", "--api-key", "fifteen-letters"])


def test_a_model_cannot_be_given_twice():
    with pytest.raises(SystemExit, match="twice"):
        read_settings(["--model", "a=/x", "--model", "a=/y"])
