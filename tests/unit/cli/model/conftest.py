"""A Hub on this machine, and a command that finds models there as a user's process does: with a home of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from tests.support.certificates import one_authority
from tests.support.hub_server import HubServer, hub_server
from tests.unit.cli.model import finders
from tests.unit.cli.model.finders import Finders

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
}
FOREIGN = ("HF_", "HUGGINGFACE_", "AWS_")  # variables of the machine's own user


WEIGHT_FILE = save({"w": np.zeros(100_000, np.float16)})


def model_files(weights: bytes = WEIGHT_FILE, **config: object) -> dict[str, bytes]:
    """The files of a repository, with some that nobody needs."""
    return {
        "config.json": json.dumps({**CONFIG, **config}).encode(),
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": weights,
        "pytorch_model.bin": b"p" * 1000,
        "consolidated.safetensors": b"c" * 1000,
        "original/model.safetensors": b"o" * 1000,
    }


@dataclass
class User:
    hub: HubServer
    home: Path
    finders: Finders
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        own = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        hub = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        trusted = {"SSL_CERT_FILE": str(one_authority(self.home.parent))}
        return own | hub | trusted | self.variables

    @contextmanager
    def start(self, name: str, **need: object) -> Iterator[subprocess.Popen[str]]:
        """A process that finds a model; it is killed if it has not ended at the end of the block."""
        command = [sys.executable, finders.__file__, name, json.dumps(need)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, env=self.environment, stdout=pipe, stderr=pipe, text=True, cwd=self.home.parent
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def find(self, name: str, **need: object) -> tuple[Path, str, str]:
        """The folder, name and revision that are found."""
        status, out, error = self.finders.run(name, need, self.environment, self.home.parent)
        assert status == 0, error
        path, served, revision = json.loads(out)
        return Path(path), served, revision

    def refused(self, name: str, **need: object) -> str:
        """The one sentence of a refusal."""
        status, _, error = self.finders.run(name, need, self.environment, self.home.parent)
        lines = [line for line in error.splitlines() if line.startswith("refused: ")]
        assert status == 1, error
        assert len(lines) == 1, error
        return lines[0].removeprefix("refused: ")


@pytest.fixture(scope="module")
def running_finders() -> Iterator[Finders]:
    with finders.finders() as running:
        yield running


@pytest.fixture
def user(tmp_path: Path, running_finders: Finders) -> Iterator[User]:
    with hub_server() as hub:
        yield User(hub, tmp_path / "home", running_finders)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a file system here")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)
