"""Checkpoints of random weights, as benchmarks take them, are read in each form with weights of the same spread."""

import json
from pathlib import Path

import pytest
import torch
from quire_engine.checkpoint.config import quantization_of, read_config_json
from quire_engine.checkpoint.weights import Checkpoint, LoadOptions
from quire_engine.config import ExecutorConfig
from quire_engine.distributed.communicator import SINGLE_RANK
from quire_engine.quantization.base import LayerSpec
from quire_engine.quantization.schemes import make_quantization
from quire_engine.quantization.stored import StoredWeight
from quire_proto.sampling import SamplingParams

from tests.bench.gpu_rows import TINY
from tests.bench.random_checkpoint import BYTES_A_WEIGHT, FORMS, SPREAD, write
from tests.model.engine import load, run

LAYER, SHAPE = "model.layers.1.mlp.up_proj", (512, 256)


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_of_random_weights_is_read(tmp_path: Path, form: str) -> None:
    write(tmp_path, json.loads(TINY), form)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    executor = load(tmp_path, 64, 0)
    made = run(executor, [[5, 6, 7], [9] * 20], [params] * 2)
    executor.close()
    assert [len(output) for output in made.outputs] == [8, 8]


@pytest.mark.parametrize("form", FORMS)
def test_weights_have_the_spread_of_a_new_model_and_the_bytes_of_their_form(tmp_path: Path, form: str) -> None:
    write(tmp_path, json.loads(TINY), form)
    stored = quantization_of(tmp_path, read_config_json(tmp_path))
    method = make_quantization(LoadOptions(ExecutorConfig()), torch.float32, stored).linear
    checkpoint = Checkpoint(tmp_path)
    weight = method.read(checkpoint, LayerSpec([LAYER], [SHAPE[0]], SHAPE[1], 0, SINGLE_RANK))
    plain = weight.dequantize(torch.float32) if isinstance(weight, StoredWeight) else weight.float()
    assert plain.shape == SHAPE
    assert plain.std().item() == pytest.approx(SPREAD, rel=0.05)
    assert plain.mean().item() == pytest.approx(0, abs=SPREAD / 8)  # four bits are -8 to 7
    size = sum(
        checkpoint.load_part(name).nbytes
        for name in (f"{LAYER}.{part}" for part in ("weight", "weight_scale_inv", "qweight", "qzeros", "scales"))
        if name in checkpoint
    )
    assert size == pytest.approx(BYTES_A_WEIGHT[form] * SHAPE[0] * SHAPE[1], rel=1e-3)
