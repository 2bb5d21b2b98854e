"""What ``quire serve`` says when it is ready."""

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from quire_cli.serve.flags import read_flags
from quire_cli.serve.plan import Plan, make_plan
from quire_cli.serve.ports import PortError, Ports
from quire_cli.serve.ready_message import how_to_try, summary
from quire_cli.serve.serve_command import check_length, serve
from quire_engine.errors import ModelError

from tests.support.ports import free_port

ROOT = Path(__file__).parents[4]


def plan(*arguments: str) -> Plan:
    flags = read_flags(["model", "--no-journal", *arguments])
    return make_plan(flags, Path("model"), Ports(lambda *_: None))


@pytest.mark.parametrize(("keys", "shown"), [("a" * 16, "a" * 16), ("a" * 16 + "," + "b" * 16, "a" * 16)])
def test_the_command_to_try_sends_one_of_the_keys(monkeypatch: pytest.MonkeyPatch, keys: str, shown: str) -> None:
    monkeypatch.setenv("QUIRE_ROUTER_API_KEY", keys)
    told = how_to_try(plan())
    assert keys not in told
    header = re.search(r'"Authorization: Bearer (.*)"', told)
    assert header is not None
    said = subprocess.run(["sh", "-c", f'printf %s "{header[1]}"'], capture_output=True, text=True, check=True)
    assert said.stdout == shown


def test_a_key_of_a_flag_is_a_placeholder() -> None:
    told = how_to_try(plan("--api-key", "s" * 16))
    assert "s" * 16 not in told
    assert "  quire complete" in told
    assert " --api-key KEY 'Once upon a time'" in told
    assert '-H "Authorization: Bearer KEY"' in told


def test_the_summary_has_a_fact_on_each_line() -> None:
    port = str(free_port())
    facts = {"dtype": "bfloat16", "device": "NVIDIA H200", "max_model_len": 40960, "kv_tokens": 700_000}
    made = plan("--port", port, "--engines", "2", "--metrics-port", "18002", "--served-model-name", "org/name")
    assert summary(made, facts) == [
        "model    org/name (model)",
        "dtype    bfloat16 on NVIDIA H200",
        "context  40,960 tokens",
        "KV       700,000 tokens for each of 2 engines",
        f"API      http://127.0.0.1:{port}/v1",
        f"page     http://127.0.0.1:{port} in a browser",
        "metrics  http://127.0.0.1:18002/metrics",
    ]
    assert summary(plan("--no-page"), {})[0] == "model    model"
    assert not [line for line in summary(plan("--no-page"), {}) if line.startswith("page")]


def test_the_address_to_try_is_one_that_can_be_reached() -> None:
    port = free_port()
    assert f"http://127.0.0.1:{port}/v1/completions" in how_to_try(plan("--host", "0.0.0.0", "--port", str(port)))


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(PortError, match=r"192\.0\.2\.1 is not an address of this machine; --host 0\.0\.0\.0 stands"):
        plan("--host", "192.0.2.1")


def test_an_ipv6_address_may_have_the_brackets_of_a_url() -> None:
    port = free_port()
    made = plan("--host", "[::1]", "--port", str(port))
    assert made.settings.host == "::1"
    assert f"curl -N 'http://[::1]:{port}/v1/completions' " in how_to_try(made)  # shells expand brackets


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "localhost"])
def test_the_command_to_try_names_the_server_unless_it_is_where_that_looks(host: str) -> None:
    made = plan("--host", host, "--port", str(free_port()))
    made = replace(made, settings=made.settings.model_copy(update={"http_port": 8000}))
    told = how_to_try(made)
    url = f"http://[{host}]:8000" if ":" in host else f"http://{host}:8000"
    assert ("--url" not in told) == (host in ("127.0.0.1", "0.0.0.0"))
    assert (f"quire complete --url {shlex.quote(url)} " in told) == (host in ("::1", "localhost"))


@pytest.mark.parametrize(
    ("arguments", "architecture", "tried"),
    [
        ((), "Qwen3ForCausalLM", "quire complete"),
        (("--convert", "embed"), "Qwen3ForCausalLM", "/v1/embeddings"),
        ((), "Qwen3Model", "/v1/embeddings"),
        ((), "BertForSequenceClassification", "/score"),
    ],
)
def test_the_command_to_try_is_for_what_the_model_does(
    tmp_path: Path, arguments: tuple[str, ...], architecture: str, tried: str
) -> None:
    config = {"architectures": [architecture], "hidden_size": 64, "num_labels": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = how_to_try(replace(plan(*arguments), model=tmp_path))
    assert [each for each in ("quire complete", "/v1/embeddings", "/score") if each in told] == [tried]


def test_an_unknown_environment_variable_is_refused_before_the_download(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_ENGINE_MAX_NUM_SEQ", "8")
    with pytest.raises(SystemExit) as end:
        serve(["no-such-model", "--engines", "2"])
    assert end.value.code == 2
    assert capfd.readouterr() == (
        "",
        "error: unknown variable QUIRE_ENGINE_MAX_NUM_SEQ (did you mean QUIRE_ENGINE_MAX_NUM_SEQS?)\n",
    )


@pytest.mark.parametrize("model", [ROOT / "demo/model", ROOT / "tests/model/quantized/llama.gguf"])
def test_a_length_that_the_model_has_not_is_refused_before_anything_starts(model: Path) -> None:
    check_length(model, 64)
    with pytest.raises(ModelError, match=r"--max-model-len is 999999, and this model's sequences have 1 to \d+ tokens"):
        check_length(model, 999_999)
