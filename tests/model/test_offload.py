"""Layers in host memory (``--cpu-offload-gb``) of real models, on the CPU: the same tokens and log-probabilities as
without, in every form that weights are held in, with experts, adapters, ranks and steps in flight, and each wait is
needed. On a GPU see ``tests/gpu/test_offload.py``.
"""

from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.config import EngineArgs
from quire_engine.errors import ModelError
from quire_engine.executor.rank_worker import RankSettings
from quire_engine.executor.start_checks import check_start
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.kernels.packed_linear import in_arena, is_fast
from quire_engine.layers.streamed import StreamedLayer
from quire_engine.models.llama import LlamaForCausalLM
from quire_engine.models.loader import read_model_config
from quire_engine.quantization.unquantized import UnquantizedMethod
from quire_engine.worker.model_runner import LoadedModel, load_model_and_attention
from torch.nn import functional as F

from tests.model.driver import Driver
from tests.model.models import SmallModels, greedy_oracle, small_model
from tests.model.overlapping import Loop, assert_equal, came_of, some_sequences
from tests.model.ranks import OUTPUT_TOKENS, PROMPTS, generate
from tests.model.streamed import WITH_ADAPTERS, needs_kernels, sequences_with_adapters
from tests.support.executors import load_executor
from tests.support.fake_streams import FakeDevice
from tests.support.kernels import cpu_path
from tests.support.offload import OFFLOAD, EagerDevice, Wait, offloaded_layers, offloads_on_the_cpu
from tests.support.queued_operations import QueuedOperations
from tests.support.rank_threads import ranks_are_threads
from tests.support.steps import KnownChunk, prepare
from tests.support.variants import one_in

LAYERS, POOL = 8, 4 << 20
CPU = torch.device("cpu")


def load(folder: Path, **settings: Any) -> TorchExecutor:
    pools = {"kv_cache_memory": POOL, "swap_bytes": POOL}
    return load_executor(folder, **{"dtype": "float32", **pools, **settings})


def deep(name: str, folder: Path) -> Path:
    changes = {"mlp_only_layers": [2]} if name == "qwen3-moe" else {}
    return small_model(name, folder, num_hidden_layers=LAYERS, **changes)


class PlainLinear:
    """A ``Linear`` in torch's operations alone, as a GPU's are, with its weight where those in host memory lie."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = in_arena(weight), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


def load_plain(folder: Path, **settings: Any) -> LoadedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnquantizedMethod, "pack", lambda _, weight, bias: PlainLinear(weight, bias))
        config = EngineArgs(model=folder, dtype="float32", attention="reference", **settings)
        return load_model_and_attention(config, read_model_config(folder), CPU)


def hidden_states(model: LoadedModel, prompts: list[list[int]], device: FakeDevice | None) -> list[torch.Tensor]:
    """Of three steps, each launched before the device has begun with the one before: a chunk of the prompts, and two of
    single tokens.
    """
    made, kv = [], model.make_kv_cache(model.cache_sizes(40, 0)).layers
    for start, end in ((0, 8), (8, 9), (9, 10)):
        chunks = [KnownChunk(number, prompt[start:end], start, [1 + number]) for number, prompt in enumerate(prompts)]
        inputs = prepare(chunks, model.block_size).model_input
        model.attention.prepare(*inputs.attention)
        with torch.inference_mode(), nullcontext() if device is None else QueuedOperations(device):
            made.append(model.model.forward(inputs.token_ids, inputs.positions, kv, model.attention))
    if device is not None:
        with torch.inference_mode():
            device.run()
    return made


def hidden_states_on(
    seed: int, folder: Path, prompts: list[list[int]], left_out: Wait | None = None
) -> list[torch.Tensor]:
    device = FakeDevice(seed)
    with offloads_on_the_cpu(5, device, left_out):
        model = load_plain(folder, **OFFLOAD)
        assert sum(isinstance(layer, StreamedLayer) for layer in model.model._stack.layers) == 5  # type: ignore[attr-defined]
        return hidden_states(model, prompts, device)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_whatever_the_device_does_first_its_numbers_are_the_same_and_each_wait_is_needed(
    small_models: SmallModels, tmp_path: Path, name: str
) -> None:
    """Every operation of three steps in flight is done when a simulated GPU comes to it."""
    folder, prompts = deep(name, tmp_path), [prompt for prompt in small_models.prompts if len(prompt) >= 10][:4]
    with cpu_path("torch"):
        wanted = hidden_states(load_plain(folder), prompts, None)

        def is_right(seed: int, left_out: Wait | None = None) -> bool:
            return all(map(torch.equal, hidden_states_on(seed, folder, prompts, left_out), wanted))

        assert all(is_right(seed) for seed in range(4))
        for left_out in Wait:
            assert not all(is_right(seed, left_out) for seed in range(4))


def expected(models: SmallModels, folder: Path) -> list[list[int]]:
    return greedy_oracle(folder, models.prompts[4 : 4 + PROMPTS], OUTPUT_TOKENS)


KINDS = (
    ("llama3", "float32", None),
    ("qwen3", "bfloat16", None),
    ("llama2", "float32", "int8"),
    ("qwen2", "float32", "int4"),
    ("mixtral", "float32", None),
    ("qwen3-moe", "float32", "int8"),
)


@needs_kernels
@pytest.mark.parametrize(("name", "dtype", "quantization", "number"), list(one_in(3, KINDS, (3, 4, 7))))
def test_tokens_are_those_of_the_model_without(
    small_models: SmallModels, tmp_path: Path, name: str, dtype: str, quantization: str | None, number: int
) -> None:
    folder = deep(name, tmp_path)
    settings = {"dtype": dtype, "quantization": quantization, "deterministic": True}
    with closing(load(folder, **settings)) as whole:
        wanted = generate(whole, small_models)
    with offloads_on_the_cpu(number, EagerDevice(seed=number)), closing(load(folder, **settings, **OFFLOAD)) as some:
        assert len(offloaded_layers(some)) == number
        made = generate(some, small_models)
        stats = some.weight_stats
        assert stats is not None
        assert stats.read_bytes > 10 * stats.host_bytes / 2, "they are copied in each step"
    assert made.choices == wanted.choices
    if dtype == "float32" and quantization is None:
        assert made.outputs == expected(small_models, folder)


@needs_kernels
def test_a_layer_that_does_not_wait_for_its_copy_makes_other_tokens(small_models: SmallModels, tmp_path: Path) -> None:
    """The control. Here everything is computed when it is launched, so the other wait cannot be missed."""
    folder = deep("llama3", tmp_path)
    with (
        offloads_on_the_cpu(4, EagerDevice(seed=0), Wait.COMPUTE_FOR_COPIES),
        closing(load(folder, **OFFLOAD, deterministic=True)) as some,
    ):
        assert generate(some, small_models).outputs != expected(small_models, folder)


@needs_kernels
def test_decode_steps_are_not_captured(tmp_path: Path) -> None:
    folder = deep("llama3", tmp_path)
    with closing(load(folder, deterministic=True)) as whole:
        assert whole._worker.runner._model.capturable  # type: ignore[union-attr]
    with offloads_on_the_cpu(3, None), closing(load(folder, **OFFLOAD, deterministic=True)) as some:
        assert not some._worker.runner._model.capturable  # type: ignore[union-attr]
        assert some._worker.runner._cpu_graphs is None  # type: ignore[union-attr]


@needs_kernels
@pytest.mark.parametrize("seed", range(3))
def test_two_steps_in_flight_make_what_steps_make_one_after_the_other(
    small_models: SmallModels, tmp_path: Path, seed: int
) -> None:
    folder, prompts = deep("llama3", tmp_path), [prompt[:60] for prompt in small_models.prompts]
    apart, overlapped = some_sequences(prompts), some_sequences(prompts)
    with closing(load(folder, deterministic=True)) as whole:
        Loop(whole, apart, seed=99).run()
    with (
        offloads_on_the_cpu(5, EagerDevice(seed)),
        closing(load(folder, **OFFLOAD, deterministic=True, async_scheduling=True)) as some,
    ):
        assert (some.depth, len(offloaded_layers(some))) == (2, 5)
        Loop(some, overlapped, seed).run_overlapped()
    assert came_of(overlapped) == came_of(apart)
    for one, other in zip(overlapped, apart, strict=True):
        assert_equal(one.logprobs, other.logprobs)


@pytest.mark.skipif(not is_fast(torch.float32), reason="oneDNN multiplies here, or torch: no weight to move")
@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel_size": 2}])
def test_adapters_stay_on_the_device_beside_layers_that_are_moved(
    small_models: SmallModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    ranks_are_threads(monkeypatch)
    folder = deep("llama3", tmp_path)
    sequences, wanted = sequences_with_adapters(folder, tmp_path, small_models.prompts[:9], OUTPUT_TOKENS)
    settings = {**WITH_ADAPTERS, **sizes}
    device = None if sizes else EagerDevice(seed=1)
    with offloads_on_the_cpu(5, device), closing(load(folder, **OFFLOAD, **settings)) as some:
        assert len(offloaded_layers(some)) == 5
        assert Driver(some, seed=1, max_chunk=13).run(sequences) == wanted


@needs_kernels
@pytest.mark.parametrize(
    ("name", "tensor", "stages", "number"), list(one_in(2, ("llama2", "mixtral"), ((2, 1, 6), (1, 2, 3), (2, 2, 3))))
)
def test_each_rank_moves_its_own_layers(
    small_models: SmallModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tensor: int,
    stages: int,
    number: int,
) -> None:
    ranks_are_threads(monkeypatch)
    folder = deep(name, tmp_path)
    settings = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "deterministic": True}
    with offloads_on_the_cpu(number, None), closing(load(folder, **OFFLOAD, **settings)) as some:
        assert len(offloaded_layers(some)) == number
        assert generate(some, small_models, num_stages=stages).outputs == expected(small_models, folder)


def test_a_gpu_that_is_too_small_is_refused_with_the_flag_for_it(
    small_models: SmallModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nSee documentation")

    monkeypatch.setattr(LlamaForCausalLM, "__init__", run_out)
    with pytest.raises(ModelError, match=r"^The weights do not fit .* 2\.00 MiB; --cpu-offload-gb .* the host's\.$"):
        load(small_models.folder("llama3"))


def test_more_than_the_host_has_is_refused_before_weights_are_read(small_models: SmallModels) -> None:
    engine = EngineArgs(model=small_models.folder("llama3"), cpu_offload_gb=1e6, tensor_parallel_size=2)
    settings = RankSettings(engine, read_model_config(engine.model), "cuda", threads=1)
    for rank in range(2):
        with pytest.raises(ModelError, match=r"^--cpu-offload-gb is too much: 2000000\.000 GiB for the GPUs of this"):
            settings.load(rank, settings.make_group(rank))


def test_on_the_cpu_it_is_refused_with_the_flag_for_it(small_models: SmallModels) -> None:
    with pytest.raises(ModelError, match=r"--cpu-offload-gb is for --device cuda: .* --weights-memory-gb"):
        load(small_models.folder("llama3"), **OFFLOAD)


def test_models_of_transformers_are_refused(small_models: SmallModels) -> None:
    folder = small_models.folder("gpt2")
    config = EngineArgs(model=folder, **OFFLOAD)
    with pytest.raises(ModelError, match="--cpu-offload-gb is for models with a native implementation, and GPT2"):
        check_start(config, read_model_config(folder), torch.device("cuda"))


def test_on_a_gpu_layers_on_disk_are_refused_with_the_flag_for_it(small_models: SmallModels) -> None:
    folder = small_models.folder("llama3")
    config = EngineArgs(model=folder, weights_memory_gb=1)
    with pytest.raises(ModelError, match=r"--weights-memory-gb is for --device cpu: .* --cpu-offload-gb"):
        check_start(config, read_model_config(folder), torch.device("cuda"))
