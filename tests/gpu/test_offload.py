"""Layers in pinned host memory (``--cpu-offload-gb``) on a GPU: the same tokens as without, in the memory that is left,
without waits of the host, and each wait of the streams that is left out shows at once.
"""

import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.checkpoint.weights import Checkpoint
from quire_engine.kernels.packed_linear import in_arena
from quire_engine.layers.streamed import AT_ONCE
from quire_proto.sampling import SamplingParams

from tests.model.driver import Driver
from tests.model.engine import load, run
from tests.model.models import OUTPUT_TOKENS, SmallModels, greedy_oracle, small_model
from tests.model.streamed import WITH_ADAPTERS, sequences_with_adapters
from tests.support.offload import HostWeightsWithout, Wait, offloaded_layers
from tests.support.sampling_inputs import make_output
from tests.support.steps import KnownChunk, make_step

pytestmark = pytest.mark.gpu
NEEDS_FLASHINFER = False
LAYERS, GIB, MIB = 8, 1 << 30, 1 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
REFERENCE: dict[str, Any] = {"device": "cuda", "attention": "reference"}


def layer_bytes(folder: Path, itemsize: int) -> int:
    """What the weights of a layer take, without its norms."""
    checkpoint = Checkpoint(folder)
    shapes = [checkpoint.shape(name) for name in checkpoint._tensors if name.startswith("model.layers.1.")]
    return sum(torch.Size(shape).numel() * itemsize for shape in shapes if len(shape) > 1)


def offload(folder: Path, number: int, dtype: str = "float32") -> dict[str, float]:
    """The setting that moves so many layers to the host."""
    return {"cpu_offload_gb": (number + 0.5) * layer_bytes(folder, getattr(torch, dtype).itemsize) / GIB}


# The order of copies


class NumberedLayer:
    """A layer whose weights are all ``number``; what it reads of them is put into ``read``. The first one computes for
    longer than a copy takes, and the others for less.
    """

    is_capturable = True

    def __init__(self, number: int, read: list[torch.Tensor], device: torch.device) -> None:
        self._read = read
        self._weights = in_arena(torch.full((64 * MIB,), number, dtype=torch.uint8, device=device))
        self._rounds = 0 if number else 40
        self._factor = torch.randn(4096, 4096, device=device)

    def __call__(self, *_: Any) -> torch.Tensor:
        for _ in range(self._rounds):
            self._factor = torch.nn.functional.normalize(self._factor @ self._factor)
        self._read.append(self._weights[:: 1 << 20].clone())
        return self._factor


@pytest.fixture
def read(gpu: torch.device) -> Iterator[Any]:
    """What each of five layers reads in three steps that are launched at once."""

    def run_steps(left_out: Wait | None) -> list[list[int]]:
        made: list[torch.Tensor] = []
        weights = HostWeightsWithout(left_out, 5, 64 * MIB, gpu)
        layers = [weights.add(lambda number=number: NumberedLayer(number, made, gpu)) for number in range(5)]
        torch.cuda.synchronize()
        for _ in range(3):
            for layer in layers:
                layer()
        torch.cuda.synchronize()
        return [each.unique().tolist() for each in made]

    yield run_steps
    torch.cuda.empty_cache()


def test_each_layer_computes_with_its_own_weights(read: Any) -> None:
    for _ in range(3):
        assert read(None) == [[number] for _ in range(3) for number in range(5)]


@pytest.mark.parametrize("left_out", Wait)
def test_the_control_shows_that_each_wait_is_needed(read: Any, left_out: Wait) -> None:
    assert any(read(left_out) != [[number] for _ in range(3) for number in range(5)] for _ in range(3))


# Whole models


@pytest.mark.parametrize("number", [3, 4, 7])
@pytest.mark.parametrize("overlaps", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "mixtral"])
def test_greedy_output_is_transformers_own(
    small_models: SmallModels, tmp_path: Path, name: str, overlaps: bool, number: int
) -> None:
    folder, prompts = small_model(name, tmp_path, num_hidden_layers=LAYERS), small_models.prompts[:8]
    executor = load(folder, 200, 0, async_scheduling=overlaps, **REFERENCE, **offload(folder, number))
    with closing(executor):
        assert len(offloaded_layers(executor)) == number
        made = run(executor, prompts, [GREEDY] * len(prompts), chunk=64, max_num_seqs=5)
        stats = executor.weight_stats
        assert stats is not None
        assert stats.read_bytes > 5 * stats.host_bytes
    assert made.outputs == greedy_oracle(folder, prompts, OUTPUT_TOKENS)


@pytest.mark.parametrize("name", ["llama3", "mixtral"])
def test_deterministic_output_is_the_same_bits(small_models: SmallModels, tmp_path: Path, name: str) -> None:
    pytest.importorskip("flashinfer", reason="needs flashinfer, which is not installed")
    folder = small_model(name, tmp_path, num_hidden_layers=LAYERS, hidden_size=256, intermediate_size=512, head_dim=64)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=2)
    made = []
    for more in ({}, offload(folder, 5, "bfloat16")):
        with closing(load(folder, 200, 0, "bfloat16", device="cuda", deterministic=True, **more)) as executor:
            prompts = small_models.prompts[:8]
            made.append(run(executor, prompts, [params] * len(prompts), chunk=64, max_num_seqs=5).choices)
    assert made[0] == made[1]


def test_adapters_stay_on_the_gpu(small_models: SmallModels, tmp_path: Path) -> None:
    folder = small_model("llama3", tmp_path, num_hidden_layers=LAYERS)
    sequences, wanted = sequences_with_adapters(folder, tmp_path, small_models.prompts[:9], OUTPUT_TOKENS)
    with closing(load(folder, 200, 20, **WITH_ADAPTERS, **REFERENCE, **offload(folder, 5))) as executor:
        assert len(offloaded_layers(executor)) == 5
        assert Driver(executor, seed=1, max_chunk=13).run(sequences) == wanted


def test_what_is_moved_is_not_on_the_gpu_and_the_slots_are(tmp_path: Path) -> None:
    folder = small_model("llama3", tmp_path, num_hidden_layers=LAYERS, hidden_size=512, intermediate_size=2048)
    size, used = layer_bytes(folder, 4), []
    for more in ({}, offload(folder, 6)):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        with closing(load(folder, 20, 0, enforce_eager=True, **REFERENCE, **more)) as executor:
            used.append(torch.cuda.memory_allocated() - before)
            assert len(offloaded_layers(executor)) == (6 if more else 0)
            stats = executor.weight_stats
        del executor
    assert stats is not None
    assert (stats.host_bytes, stats.memory_bytes) == (6 * size, (LAYERS - 6 + AT_ONCE) * size)
    # The allocator gives up to 1 MiB more than each slot asks for.
    assert abs(used[0] - used[1] - (6 - AT_ONCE) * size) <= AT_ONCE * MIB


def test_weights_are_pinned(tmp_path: Path) -> None:
    folder = small_model("llama3", tmp_path, num_hidden_layers=LAYERS)
    with closing(load(folder, 20, 0, **REFERENCE, **offload(folder, 4))) as executor:
        assert offloaded_layers(executor)[0].weights._layers.is_pinned()


def test_nothing_waits_between_the_launch_of_a_step_and_its_result(tmp_path: Path) -> None:
    folder = small_model("llama3", tmp_path, num_hidden_layers=LAYERS)
    with closing(load(folder, 20, 0, **REFERENCE, **offload(folder, 5))) as executor:
        tokens = [5, 6, 7, 8]
        for step in range(4):
            request = make_output(step, tokens, temperature=0.0).request
            output = make_step(step, [KnownChunk(step, tokens, 0, [1 + step], (request,))])
            # The first of these steps compiles.
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            try:
                launched = executor.execute_model_async(output)
                launched.sample_tokens()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert launched.get_output().token_ids
