"""Settings of the endpoint picker that cannot be are refused at the start, and servers that are never picked named."""

import logging
from pathlib import Path

import pytest
from quire_proto.cli import read_settings
from quire_proto.tls import ServerTls
from quire_router.config import Settings, log_startup_warnings
from quire_router.discovery.base import http_endpoint

from tests.support.certificates import Authority

VLLM = "--engine=vllm+http://10.0.0.7:8000"
INSECURE = "--picker-insecure"


def settings(*flags: str) -> Settings:
    return read_settings(Settings, ("--model", "m=folder", *flags))


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("vllm+http://10.0.0.7:8000", "10.0.0.7:8000"),
        ("sglang+http://[fd00::1]:30000", "[fd00::1]:30000"),
        ("openai+http://10.0.0.7", "10.0.0.7:80"),
        ("vllm+https://10.0.0.7:8000", None),
        ("vllm+http://server:8000", None),
        ("openai+http://10.0.0.7:8000/api", None),
        ("10.0.0.7:9000", None),
        ("", None),
    ],
)
def test_what_speaks_plain_http_at_an_ip_address_can_be_picked(address: str, endpoint: str | None) -> None:
    assert http_endpoint(address) == endpoint


@pytest.mark.parametrize(
    "source", ["vllm+http://10.0.0.7:8000", "sglang+dns://engines:8000", "127.0.0.1:9000,openai+http://10.0.0.7:8000"]
)
def test_one_server_that_can_be_picked_is_enough(source: str) -> None:
    assert settings("--picker-port", "9002", INSECURE, "--engine", source).picker_port == 9002


def test_gateways_need_a_certificate_unless_the_operator_says_that_they_do_not(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("picker")
    shown = (VLLM, "--picker-port=0", f"--picker-cert={own.certificate}", f"--picker-key={own.key}")
    assert settings(VLLM, "--picker-port=0", INSECURE).picker_tls is None
    assert settings(*shown, INSECURE).picker_tls == ServerTls(own)
    assert settings(*shown, f"--picker-client-ca={authority.ca}").picker_tls == ServerTls(own, authority.ca)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--picker-port=1",), "--picker-port needs servers that speak HTTP at an IP address"),
        (("--picker-port=1", "--engine=10.0.0.7:9000"), "requests for Quire's own engines go through this router"),
        (("--picker-port=1", "--engine=dns://engines:9000"), "--picker-port needs servers"),
        (("--picker-port=1", "--engine=vllm+https://10.0.0.7:8000"), "--picker-port needs servers"),
        ((VLLM, "--picker-port=70000"), "--picker-port: "),
        ((VLLM, "--picker-port=0", "--workers=2", "--redis-url=redis://r"), "--picker-port must not be 0"),
        ((VLLM, "--picker-port=1", "--picker-fallbacks=4"), "--picker-fallbacks: "),
        ((VLLM, "--picker-port=1"), "--picker-port needs --picker-client-ca"),
        ((VLLM, "--picker-port=1", "--no-picker-secure-serving"), "--picker-port needs --picker-client-ca"),
        ((VLLM, "--picker-port=1", "--picker-cert=CERT", "--picker-key=KEY"), "--picker-port needs --picker-client-ca"),
        (
            (VLLM, "--picker-port=1", "--picker-cert=CERT", "--picker-key=KEY", "--picker-client-ca=CERT", INSECURE),
            "--picker-insecure and --picker-client-ca exclude each other",
        ),
        ((VLLM, "--picker-forward=/tokenize"), "'/tokenize' is not a method and a path"),
        ((VLLM, "--picker-forward=POST /a/../b?c"), "is not a method and a path"),
        ((VLLM, "--picker-port=1", "--picker-cert=CERT"), "--picker-cert needs --picker-key"),
        ((VLLM, "--picker-cert=CERT", "--picker-key=OTHER"), "--picker-key: "),
        ((VLLM, "--picker-client-ca=CERT"), "--picker-client-ca needs --picker-cert"),
        (
            (VLLM, "--picker-cert=CERT", "--picker-key=KEY", "--no-picker-secure-serving"),
            "--picker-cert needs --picker-secure-serving",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(
    flags: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path)
    own, other = authority.issue("picker"), authority.issue("other")
    files = {"CERT": own.certificate, "KEY": own.key, "OTHER": other.key}
    for name, file in files.items():
        flags = tuple(flag.replace(f"={name}", f"={file}") for flag in flags)
    with pytest.raises(SystemExit):
        settings(*flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_servers_that_are_never_picked_are_named(caplog: pytest.LogCaptureFixture) -> None:
    others = ("--engine=10.0.0.8:9000", "--engine=vllm+http://server:8000")
    with caplog.at_level(logging.WARNING):
        log_startup_warnings(settings(VLLM, *others))
        assert "cannot send gateways to" not in caplog.text
        log_startup_warnings(settings(VLLM, *others, "--picker-port=1", INSECURE))
    named = [record.getMessage() for record in caplog.records if "cannot send gateways to" in record.getMessage()]
    assert [message.split()[4].rstrip(":") for message in named] == ["10.0.0.8:9000", "vllm+http://server:8000"]
