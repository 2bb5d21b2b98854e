"""Which models are served is told by ``config.json`` alone, in a process without torch."""

import subprocess
import sys
from pathlib import Path

from quire_engine.checkpoint.stored_schemes import STORED_CHECKS
from quire_engine.checkpoint.support import SUPPORTED_LAYER_TYPES
from quire_engine.quantization.schemes import STORED_SCHEMES


def test_every_scheme_that_is_checked_is_read() -> None:
    assert list(STORED_CHECKS) == list(STORED_SCHEMES)


def test_the_check_imports_neither_torch_nor_transformers() -> None:
    program = "import sys, quire_engine.checkpoint.support; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_engine_answers_for_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertForMaskedLM"], "model_type": "bert"}')
    command = [sys.executable, "-m", "quire_engine.models.check_config", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{tmp_path}/config.json names BertForMaskedLM, which makes no text")
    assert "full_attention" in SUPPORTED_LAYER_TYPES
