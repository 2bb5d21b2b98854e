"""Everything here needs a GPU, and is skipped where there is none."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.conftest import small_models
from tests.model.models import CONFIGS, VOCAB_SIZE

__all__ = ["small_models"]

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest) -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none")
    if getattr(request.module, "NEEDS_FLASHINFER", True):
        pytest.importorskip("flashinfer", reason="needs flashinfer, which is not installed")
    return GPU


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random models whose heads are as wide as FlashInfer's kernels want them."""
    names = ("llama3", "qwen2", "qwen3", "mistral", "qwen3-moe")
    return {name: _write(name, tmp_path_factory.mktemp("models") / name) for name in names}


def _write(name: str, folder: Path) -> Path:
    config_class, special = CONFIGS[name]
    config = config_class(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.1,
            "eos_token_id": 2,
            **special,
            "head_dim": 64,
        }
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
