"""A router and an engine that do not have the same model: no request is answered with nonsense."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.service.conftest import DEMO, Stack
from tests.support.forked_engines import ForkedRouter
from tests.support.processes import eventually, fetch


def swapped(folder: Path) -> Path:
    """The demo model's folder with the ids of two tokens exchanged, as when somebody gave a router an older file."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(content))
    return folder


def resized(folder: Path) -> Path:
    """The demo model's folder with the configuration of a deeper model that has the same tokenizer."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    return folder


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("quire-demo", swapped, "with another tokenizer than the one in "),
        ("quire-demo", resized, "with a model of another architecture or size than the one in "),
        ("else", None, "serves 'quire-demo'"),
    ],
)
def test_an_engine_of_another_model_gets_no_requests_and_is_named(
    stack: Stack, tmp_path: Path, name: str, change: Callable[[Path], Path] | None, words: str
) -> None:
    engine, folder = stack.engines[0], DEMO if change is None else change(tmp_path / "model")
    router = ForkedRouter(folder, [engine.address], tmp_path, name=name)
    try:
        eventually(lambda: words in router.text or router.popen.poll() is not None)
        assert engine.address in next(line for line in router.text.splitlines() if words in line)
        assert fetch(router.http_port, "/health")[0] == 503
        assert router.metric("quire_engines_ready") == 0
        told = fetch(router.metrics_port, "/metrics")[1]
        for untouched in (
            f'quire_parked_requests{{model="{name}"}}',
            'quire_attempts_lost_total{reason="engine_lost"}',
        ):
            assert f"{untouched} 0.0" in told  # there from the start, so that a rate sees the first
    finally:
        assert router.stop() == 0, router.text
