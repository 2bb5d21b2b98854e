"""Wrong settings are said in plain words, and the usage of a command is one line."""

import sys
from collections.abc import Sequence
from typing import ClassVar, Literal

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict
from quire_proto.cli import PROGRAM_VARIABLE, CliSettings, flags_parser, read_settings


class Example(CliSettings):
    """An example."""

    model_config = SettingsConfigDict(cli_prog_name="example")
    flag_aliases: ClassVar[dict[str, Sequence[str]]] = {"--base-url": ("--url",)}

    dtype: Literal["auto", "float16"] = "auto"
    part: float = Field(default=0.5, gt=0, le=1)
    count: int = Field(default=1, ge=1)
    plain: bool = False
    base_url: str = ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--count", "abc"], "--count: must be a whole number, not abc"),
        (["--count", "1.5"], "--count: must be a whole number, not 1.5"),
        (["--count", "0"], "--count: must be at least 1, not 0"),
        (["--part", "90"], "--part: must be at most 1, not 90"),
        (["--part", "0"], "--part: must be above 0, not 0"),
        (["--part", "x"], "--part: must be a number, not x"),
        (["--dtype", "half"], "--dtype: must be auto or float16, not half (did you mean float16?)"),
        (["--dtype", "bf16"], "--dtype: must be auto or float16, not bf16"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_must_be(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_settings(Example, arguments)
    assert capsys.readouterr().err == f"error: {text}\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--count"], "--count: needs a value"), (["--plain=maybe"], "--plain/--no-plain: takes no value")],
)
def test_a_missing_value_is_named(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_settings(Example, arguments)
    assert capsys.readouterr().err == f"error: {text}\ntip: example --help lists all options\n"


def test_a_flag_may_have_another_name() -> None:
    assert read_settings(Example, ["--url", "u"]).base_url == read_settings(Example, ["--base-url=u"]).base_url == "u"


def test_the_usage_is_one_line_with_the_name_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flags_parser(Example).format_help().startswith("usage: example [FLAGS]\n\nAn example.\n")
    monkeypatch.setenv(PROGRAM_VARIABLE, "quire example")
    assert flags_parser(Example).format_help().startswith("usage: quire example [FLAGS]\n")


def test_headings_of_a_help_are_bold_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags_parser(Example).print_help()
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    flags_parser(Example).print_help()
    shown = capsys.readouterr().out
    assert shown.startswith("\x1b[1musage:\x1b[0m example [FLAGS]\n\nAn example.\n\n\x1b[1moptions:\x1b[0m\n  -h")
