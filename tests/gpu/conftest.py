"""Everything here needs a GPU, and is skipped where there is none."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.model.conftest import small_models
from tests.model.models import CONFIGS, VOCAB_SIZE

__all__ = ["small_models"]

GPU = torch.device("cuda", 0)
# Tests that need kernels which `make gpu-kit` compiles with --kernels all only.
OTHER_KERNELS = ("fp8", "soft_cap", "sinks")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--short", action="store_true", help="one variant of each test, and none that needs kernels of --kernels all"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--short", default=False):
        return
    chosen: dict[tuple[Path, str], pytest.Item] = {}
    for item in sorted(items, key=_is_unusual):
        name = item.name.partition("[")[0]
        if not any(word in name for word in OTHER_KERNELS):
            chosen.setdefault((item.path, name), item)
    kept = set(chosen.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _is_unusual(item: pytest.Item) -> bool:
    """Whether a variant is in float16, or of a model other than Qwen3."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec is not None else {}
    return params.get("dtype") is torch.float16 or params.get("model_name", params.get("name", "qwen3")) != "qwen3"


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
    model_type, special = CONFIGS[name]
    config = AutoConfig.for_model(
        model_type,
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
        },
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
