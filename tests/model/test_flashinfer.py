"""Whole models through the attention of GPUs, whose kernels are emulated on the CPU: token for token transformers'."""

import pytest
import torch
from quire_engine.attention.base import AttentionBackend, AttentionShape
from quire_engine.attention.flashinfer import FlashInferAttention

from tests.model.driver import Driver, Sequence
from tests.model.models import OUTPUT_TOKENS, SmallModels
from tests.support.executors import load_executor
from tests.support.flashinfer_emulation import installed

POOL = 4 << 20


def flashinfer(
    name: str,
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    deterministic: bool,
) -> AttentionBackend:
    return FlashInferAttention(shape, device, dtype, kv_dtype, deterministic=deterministic)


@pytest.mark.parametrize(
    ("name", "deterministic"), [("mistral", False), ("qwen2-yarn", True), ("qwen2-yarn", False), ("gemma3", False)]
)
def test_output_is_transformers_own_under_random_chunks_blocks_and_swaps(
    small_models: SmallModels, name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_engine.worker.model_runner.make_attention", flashinfer)
    monkeypatch.setattr("quire_engine.worker.input_batch.WINDOW_ALIGNMENT", 16)  # the contexts are short
    with installed():
        executor = load_executor(
            small_models.folder(name), kv_cache_memory=POOL, swap_bytes=POOL, deterministic=deterministic
        )
        sequences = [Sequence(index, prompt, OUTPUT_TOKENS) for index, prompt in enumerate(small_models.prompts[:4])]
        outputs = Driver(executor, seed=1, max_chunk=13).run(sequences)
    assert outputs == small_models.outputs(name, range(4))
