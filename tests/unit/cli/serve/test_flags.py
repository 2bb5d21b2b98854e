"""``quire serve`` takes the flags of both services by their own names, and gives each its part."""

import re
import shlex

import pytest
from quire_cli.serve.flags import SERVICES, SHARED, USEFUL, ServeFlags, flag_of, read_flags
from quire_engine.config import EngineConfig
from quire_proto.cli import read_settings
from quire_router.config import Settings


def test_each_service_gets_its_flags_as_they_were_written() -> None:
    flags = read_flags(
        ["demo/model", "--max-num-seqs", "3", "--debug-route", "--no-enable-prefix-caching", "--api-key", "k" * 16]
    )
    assert flags.model == "demo/model"
    assert flags.engine == ["--max-num-seqs=3", "--no-enable-prefix-caching"]
    assert sorted(flags.router) == [f"--api-key={'k' * 16}", "--debug-route"]


def test_a_flag_of_both_goes_to_both_unless_it_is_for_one() -> None:
    flags = read_flags(["m", "--router-log-level", "debug", "--log-level", "error", "--engine-shutdown-timeout", "9"])
    assert read_settings(EngineConfig, ["--model=m", *flags.engine]).log_level == "error"
    assert read_settings(EngineConfig, ["--model=m", *flags.engine]).shutdown_timeout == 9
    settings = read_settings(Settings, ["--model=m", *flags.router])
    assert (settings.log_level, settings.shutdown_timeout) == ("debug", 25)


def test_names_may_have_slashes_and_be_several() -> None:
    flags = read_flags(["m", "--served-model-name", "Qwen/Qwen3-0.6B,small", "--served-model-name", "other"])
    assert flags.names == ["Qwen/Qwen3-0.6B", "small", "other"]


@pytest.mark.parametrize(
    "arguments", [["m", "--lora-modules", "a=/x", "b=/y"], ["--lora-modules", "a=/x", "b=/y", "m"]]
)
def test_several_adapters_may_follow_one_flag(arguments: list[str]) -> None:
    flags = read_flags(arguments)
    assert (flags.model, flags.engine) == ("m", ["--lora-modules=a=/x,b=/y"])


def test_the_port_of_rest_has_two_names() -> None:
    assert read_flags(["m", "--http-port", "81"]).port == read_flags(["m", "--port=81"]).port == 81


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["m", "--max-num-seq=3"], "unknown option --max-num-seq (did you mean --max-num-seqs?)"),
        (["m", "--engine", "a:1"], "unknown option --engine\ntip: --engines N starts them"),
        (["m", "--trust-remote-code"], "unknown option --trust-remote-code\ntip: no code of a model's folder is run"),
        (["m", "--model", "x"], "unknown option --model\ntip: quire serve MODEL names it"),
        (
            ["m", "--max-tokens", "9"],
            "unknown option --max-tokens\ntip: each request says that for itself, as a parameter",
        ),
        (["m", "--seed", "0"], "unknown option --seed\ntip: each request says that for itself, as a parameter"),
        (["m", "--speculative-config", "{}"], "\ntip: --speculative-method and --num-speculative-tokens set it"),
        (["m", "--speculative_config.model=x"], "\ntip: --speculative-method and --num-speculative-tokens set it"),
        (
            ["m", "--enable-something"],
            "unknown option --enable-something\ntip: quire serve --help-all lists all options",
        ),
        (["m", "--min-tokens", "9"], "unknown option --min-tokens\n"),
        (["m", "--max_model_len", "9"], "unknown option --max_model_len (did you mean --max-model-len?)"),
        (["m", "--engines", "0"], "--engines: must be a number from 1 to 64, not 0"),
        (["m", "--engines", "3", "--data-parallel-size", "2"], "--engines is 3, and --data-parallel-size 2: either"),
        (
            ["m", "--data-parallel-rank", "1"],
            "unknown option --data-parallel-rank\ntip: quire serve sets it itself, for each",
        ),
        (
            ["m", "--data-parallel-address=h"],
            "unknown option --data-parallel-address\ntip: quire serve sets it itself, for",
        ),
        (["m", "-dpp", "1"], "unknown option -dpp\ntip: quire serve sets it itself, for each engine of a group\n"),
        (["m", "-tp", "2"], "unknown option -tp\ntip: use --tensor-parallel-size\n"),
        (["-dp", "2", "m"], "unknown option -dp\ntip: use --data-parallel-size\n"),
        (["m", "--port", "70000"], "--port/--http-port: must be a port from 1 to 65535, not 70000"),
        ([], "the following arguments are required: MODEL"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_flags(arguments)
    error = capsys.readouterr().err
    assert told in error
    assert [line.partition(": ")[0] for line in error.splitlines()] == ["error", "tip"]


GROUP = ("data_parallel_rank", "data_parallel_address", "data_parallel_rpc_port")


def test_the_help_lists_every_flag_that_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        read_flags(["--help-all"])
    told = capsys.readouterr().out
    given_by_the_command = {"model", "engine", *GROUP}
    for kind in SERVICES.values():
        for name in kind.model_fields.keys() - given_by_the_command:
            assert flag_of(name) in told, name


def test_the_short_help_has_the_useful_flags_and_examples_that_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        read_flags(["--help"])
    told = capsys.readouterr().out
    assert not USEFUL - (EngineConfig.model_fields.keys() | Settings.model_fields.keys())
    assert all(flag_of(name) in told for name in USEFUL)
    assert len(told.splitlines()) < 110
    examples = [shlex.split(line) for line in told.splitlines() if line.startswith("  quire serve ")]
    assert examples
    for _, _, *arguments in examples:
        assert read_flags(arguments)


@pytest.mark.parametrize("service", SERVICES)
def test_every_flag_that_is_passed_on_is_one_of_the_service(service: str) -> None:
    """Each with some value: the services' own parsers know the flags that they are given."""
    kind = SERVICES[service]  # type: ignore[index]
    known = {"--model=m"} | {flag_of(name) for name in kind.model_fields}
    values: list[str] = []
    for name, field in kind.model_fields.items():
        if name in ("model", "engine", "host", "served_model_name", *GROUP):
            continue
        is_switch = field.annotation is bool or "bool" in str(field.annotation)
        values += [flag_of(name)] if is_switch else [flag_of(name), "1"]
    flags: ServeFlags = read_flags(["m", *values])
    passed = [argument.partition("=")[0] for argument in getattr(flags, service)]
    assert set(passed) <= known
    assert len(passed) >= len(kind.model_fields) - len(SHARED) - 5 - len(GROUP)


def test_the_defaults_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_flags(["--help-all"])
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--log-level [^(]*[^-]*\(default: warning\)", told)
    assert re.search(r"--shutdown-timeout SECONDS [^(]*\(default: 2\)", told)
    assert "--journal-file" in told
    assert "(default: one in ~/.local/state/quire for each model and port)" in told
