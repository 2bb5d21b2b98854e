"""A device, a dtype or what a device computes with that cannot be had is said in one sentence, and each thread computes
on the engine's device.
"""

from pathlib import Path

import pytest
import torch
from quire_engine.checkpoint.weights import resolve_dtype
from quire_engine.config import EngineArgs
from quire_engine.device.accelerator import resolve_device
from quire_engine.errors import ModelError
from quire_engine.executor.start_checks import check_start
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.models.loader import read_model_config
from transformers import GPT2Config

CUDA = torch.device("cuda", 0)
DEMO = Path(__file__).parents[4] / "demo" / "model"


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ModelError, match=r"cuda, and no GPU can be used here: quire doctor says why\.$"):
        resolve_device("cuda")


def test_auto_is_the_current_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 3)
    assert resolve_device("cpu") == torch.device("cpu")


def test_an_unusable_gpu_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise RuntimeError(
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might ..."
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    for name in ("auto", "cuda"):
        with pytest.raises(ModelError, match=r"^The GPU cannot be used: CUDA error: [^\n]* unavailable; --device cpu"):
            resolve_device(name)
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_bfloat16_is_refused_on_gpus_without_it(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_dtype("float16", torch.bfloat16, CUDA) == resolve_dtype("auto", torch.float16, CUDA) == torch.float16
    for name, stored in (("bfloat16", torch.float32), ("auto", torch.bfloat16)):
        if capability >= (8, 0):
            assert resolve_dtype(name, stored, CUDA) == torch.bfloat16
        else:
            with pytest.raises(
                ModelError, match=r"^This GPU cannot compute in bfloat16; use --dtype float16 or float32\.$"
            ):
                resolve_dtype(name, stored, CUDA)


# Before weights are read


def test_an_attention_that_cannot_be_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "quire_engine.models.decoder.DecoderModel.__init__", lambda *_: pytest.fail("weights were read")
    )
    with pytest.raises(ModelError, match="flashinfer does not run on the CPU"):
        TorchExecutor.load(EngineArgs(model=DEMO, device="cpu", attention="flashinfer"))


def test_a_model_that_runs_through_transformers_is_reported_as_not_deterministic(tmp_path: Path) -> None:
    """There are no weights in the folder: nobody has looked for them."""
    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    engine = EngineArgs(model=tmp_path, deterministic=True)
    with pytest.raises(
        ModelError, match=r"^--deterministic is for models .*, and GPT2LMHeadModel runs through transformers\.$"
    ):
        check_start(engine, read_model_config(tmp_path), torch.device("cpu"))
