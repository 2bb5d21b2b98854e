"""The router's settings, from flags and from the environment; and what of it the other commands share."""

import errno
import os
import re
from functools import partial
from pathlib import Path

import pytest
import quire_proto
from quire_engine.bench.config import BenchConfig
from quire_engine.config import EngineConfig
from quire_engine.simulation.config import SimulationConfig
from quire_proto import cli as command
from quire_proto.cli import describe_unknown_env
from quire_router.config import Settings, log_startup_warnings
from quire_router.simulation.config import FleetSettings

KEY = "a-long-enough-key"
COMMANDS = {
    "quire-router": Settings,
    "quire-router simulate": FleetSettings,
    "quire-engine": EngineConfig,
    "quire-engine simulate": SimulationConfig,
    "quire-engine bench": BenchConfig,
}
read_settings = partial(command.read_settings, Settings)


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


def test_an_unknown_variable_ends_the_start_and_the_closest_setting_is_suggested(monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_ROUTER_API_KEYS", KEY)
    with pytest.raises(SystemExit) as end:
        command.reject_unknown_env(Settings)

    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: unknown variable QUIRE_ROUTER_API_KEYS (did you mean QUIRE_ROUTER_API_KEY?)\n"
    )


def test_a_variable_that_is_read_elsewhere_is_not_unknown(monkeypatch):
    monkeypatch.setenv("QUIRE_ENGINE_KERNEL", "off")

    command.reject_unknown_env(EngineConfig, ["kernel"])
    with pytest.raises(SystemExit):
        command.reject_unknown_env(EngineConfig)


# What a pod is given for Services of its namespace, each named like the component or a part of it.
SERVICES = {
    f"{service}_{name}": value
    for service in ("QUIRE_ROUTER", "QUIRE_ROUTER_METRICS", "QUIRE_ROUTER_HTTP", "QUIRE_ENGINE", "QUIRE_ENGINE_METRICS")
    for name, value in {
        "SERVICE_HOST": "10.96.0.1",
        "SERVICE_PORT": "9000",
        "SERVICE_PORT_GRPC": "9000",
        "PORT": "tcp://10.96.0.1:9000",
        "PORT_9000_TCP": "tcp://10.96.0.1:9000",
        "PORT_9000_TCP_PROTO": "tcp",
        "PORT_9000_TCP_PORT": "9000",
        "PORT_9000_TCP_ADDR": "10.96.0.1",
    }.items()
}


def test_variables_of_kubernetes_services_are_no_settings(monkeypatch):
    for name, value in SERVICES.items():
        monkeypatch.setenv(name, value)

    assert read_settings(["--model", "/m"]) == read_settings(["--model", "/m", "--http-port", "8000"])
    assert EngineConfig(model=Path("/m")).port == 9000
    assert EngineConfig(model=Path("/m")).metrics_port == 9002
    for prefix, settings in (("QUIRE_ROUTER_", Settings), ("QUIRE_ENGINE_", EngineConfig)):
        assert describe_unknown_env(prefix, settings.model_fields, SERVICES) == []


def test_a_variable_of_a_port_is_still_a_setting_beside_them(monkeypatch):
    monkeypatch.setenv("QUIRE_ENGINE_PORT", "9100")
    monkeypatch.setenv("QUIRE_ROUTER_METRICS_PORT", "9101")

    assert EngineConfig(model=Path("/m")).port == 9100
    assert read_settings(["--model", "/m"]).metrics_port == 9101


@pytest.mark.parametrize("program", COMMANDS)
def test_help_shows_values_and_not_python_types(program, capsys):
    with pytest.raises(SystemExit) as end:
        command.read_settings(COMMANDS[program], ["--help"])
    output = capsys.readouterr().out

    assert end.value.code == 0
    assert f"usage: {program} " in output
    assert not re.search(r"Secret|list\[|null|\bint\b|\bfloat\b|\bstr\b|\bPath\b", output.split("options:")[1])
    assert not re.search(r"default: ([^)]*['\[\]]|True|False)", output)


@pytest.mark.parametrize("program", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--frobnicate=3"], "unknown option --frobnicate"),
        (["--log-lvel", "--modell", "--tracee"], r"unknown option --log-lvel( \(did you mean --log-level\?\))?"),
        (["frobnicate", "--x"], r"unexpected argument frobnicate( \(did you mean --model\?\))?"),
    ],
)
def test_an_unknown_flag_is_a_one_line_error(program, arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        command.read_settings(COMMANDS[program], arguments)
    line = capsys.readouterr().err

    assert end.value.code == 2
    assert re.fullmatch(rf"error: {message}\ntip: {program} --help lists all options\n", line)


def test_a_misspelt_flag_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit):
        read_settings(["--modle", "/m"])

    assert "unknown option --modle (did you mean --model?)" in capsys.readouterr().err


def test_a_short_flag_with_swapped_letters_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit):
        command.read_settings(EngineConfig, ["--prot", "9100"])

    assert "unknown option --prot (did you mean --port?)" in capsys.readouterr().err


def test_a_model_without_its_flag_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit):
        command.read_settings(EngineConfig, ["demo/model"])

    assert "unexpected argument demo/model (did you mean --model?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EADDRINUSE, "Address already in use; another program has this port: stop it, or choose another port"),
        (errno.EADDRNOTAVAIL, "Cannot assign requested address; --host is not an address of this machine"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_port_that_cannot_be_listened_on_is_named_with_its_flag(number, advice):
    error = OSError(number, os.strerror(number))
    told = command.describe_listen_error("--http-port", "::1", 8000, error)

    assert told == f"--http-port: [::1]:8000 cannot be listened on: {advice}"


@pytest.mark.parametrize(
    ("program", "flag", "instead"),
    [
        ("quire-router", "--port", "--http-port and --grpc-port are the ports that clients use"),
        ("quire-engine", "--api-key", "keys are the router's, which has this flag"),
        ("quire-engine", "--trust-remote-code=true", "no code of a model's folder is run"),
        ("quire-engine", "-tp", "use --tensor-parallel-size"),
        ("quire-engine", "-dpn=1", "use --data-parallel-rank"),
        (
            "quire-engine",
            "-dpr",
            "each engine of a group is a command of its own, with its --data-parallel-rank, behind a router",
        ),
    ],
)
def test_a_flag_of_another_server_names_the_flag_to_use_instead(program, flag, instead, capsys):
    with pytest.raises(SystemExit) as end:
        command.read_settings(COMMANDS[program], [flag, "3"])

    name = flag.partition("=")[0]
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: unknown option {name}\ntip: {instead}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lora-modules", "a=/x", "b=/y=z", "c=w", "--max-loras", "3"],
        ["--lora-modules=a=/x", "b=/y=z", "--lora-modules", "c=w", "--max-loras=3"],
        ["--max-loras", "3", "--lora-modules", "a=/x,b=/y=z", "c=w"],
    ],
)
def test_several_adapters_may_follow_one_flag_as_with_vllm(arguments):
    config = command.read_settings(EngineConfig, ["--model=m", "--enable-lora", *arguments])

    assert config.lora_folders == {"a": Path("/x"), "b": Path("/y=z"), "c": Path("w")}
    assert config.max_loras == 3


def test_what_is_no_adapter_is_not_taken_for_one(capsys):
    with pytest.raises(SystemExit):
        command.read_settings(EngineConfig, ["--model=m", "--enable-lora", "--lora-modules", "a=/x", "/models/b=c"])

    assert "unexpected argument /models/b" in capsys.readouterr().err


@pytest.mark.parametrize("settings", COMMANDS.values())
def test_the_flags_suggested_instead_of_another_servers_exist(settings):
    own = {"--" + name.replace("_", "-") for name in settings.model_fields}

    assert not own & set(settings.foreign_flags)
    for instead in settings.foreign_flags.values():
        assert set(re.findall(r"--[a-z-]+", instead)) <= own


@pytest.mark.parametrize("program", ["quire-router", "quire-engine"])
def test_help_names_the_simulator(program, capsys):
    with pytest.raises(SystemExit):
        command.read_settings(COMMANDS[program], ["--help"])

    assert f"{program} simulate --help" in capsys.readouterr().out


@pytest.mark.parametrize("program", COMMANDS)
def test_a_program_prints_its_version(program, capsys):
    with pytest.raises(SystemExit) as end:
        command.read_settings(COMMANDS[program], ["--version"])

    assert end.value.code == 0
    assert capsys.readouterr().out == f"{program} {quire_proto.__version__}\n"


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
def test_a_wrong_setting_ends_the_start_with_a_line_that_names_it(arguments, flag, capsys):
    with pytest.raises(SystemExit) as end:
        read_settings(arguments)
    errors = capsys.readouterr().err

    assert end.value.code == 2
    assert re.fullmatch(f"error: {flag}: [^\\n]+\\n", errors)
    assert "pydantic" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine-kv-events-port", "5557"], "needs servers of vLLM"),
        (["--engine-kv-events-port", "5557", "--engine", "sglang+http://h:1"], "needs servers of vLLM"),
        (["--engine-kv-events-replay-port", "5558", "--engine", "vllm+http://h:1"], "needs --engine-kv-events-port"),
        (["--engine-kv-events-port", "0", "--engine", "vllm+http://h:1"], "must be at least 1, not 0"),
    ],
)
def test_kv_events_are_read_from_servers_of_vllm_alone(arguments, message, capsys):
    with pytest.raises(SystemExit):
        read_settings(["--model", "/m", *arguments])
    assert message in capsys.readouterr().err


def test_kv_events_need_packages_that_not_every_router_has(capsys, monkeypatch):
    flags = ["--model", "/m", "--engine", "vllm+dns://s:8000", "--engine-kv-events-port", "5557"]
    assert read_settings([*flags, "--engine-kv-events-replay-port", "5558"]).engine_kv_events_replay_port == 5558
    monkeypatch.setattr("quire_router.config.find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        read_settings(flags)
    assert "pip install 'pyzmq" in capsys.readouterr().err


def test_each_wrong_setting_has_a_line(capsys):
    with pytest.raises(SystemExit):
        command.read_settings(SimulationConfig, ["--trace", "x", "--max-num-seqs", "0", "--rate", "0"])
    errors = capsys.readouterr().err.splitlines()

    assert [line.split(": ")[:2] for line in errors] == [["error", "--max-num-seqs"], ["error", "--rate"]]


def test_a_key_of_sixteen_characters_is_accepted_and_a_shorter_one_refused(capsys):
    assert read_settings(["--model", "/m", "--api-key", "sixteen-letters!"]).api_key
    with pytest.raises(SystemExit):
        read_settings(["--model", "/m", "--api-key", "fifteen-letters"])
    assert "at least 16" in capsys.readouterr().err


def test_a_model_cannot_be_given_twice(capsys):
    with pytest.raises(SystemExit):
        read_settings(["--model", "a=/x", "--model", "a=/y"])
    assert "twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], []),
        (["--host", "::1"], []),
        (["--host", "localhost"], []),
        (["--host", "0.0.0.0"], ["no API key is configured"]),
        (["--host", "quire.example", "--api-key", "k" * 16], []),
        (["--max-connections", "100"], ["the limit of 80 file descriptors leaves"]),
    ],
)
def test_a_start_warns_of_what_concerns_who_started_it(flags, told, monkeypatch, caplog):
    monkeypatch.setattr("quire_router.config._descriptors", lambda: 80)
    log_startup_warnings(read_settings(["--model", "m=/nowhere", "--engine", "here:1", *flags]))

    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(told)
    assert all(warning.startswith(text) for warning, text in zip(warnings, told, strict=True))
