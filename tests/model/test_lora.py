"""Requests of several adapters in one batch each get what the model with that adapter merged into its weights makes."""

import shutil
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, AsyncLLM, LoRARequest, SamplingParams
from quire_engine.core.step import SampleRequest
from quire_engine.errors import LoRAError, ModelError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.kernels.packed_linear import is_fast
from quire_engine.lora.adapter import LoRAAdapter
from quire_engine.lora.manager import LoRAManager
from quire_engine.worker.cpu_graph import GraphKind
from quire_proto.errors import ErrorCode, QuireError

from tests.model.driver import GREEDY, Driver, Sequence
from tests.model.models import OWN, SmallModels, greedy_oracle
from tests.support.adapters import ATTENTION, read_adapter, write_adapter, write_merged_model
from tests.support.executors import load_executor
from tests.support.model_folders import write_model_folder
from tests.support.rank_threads import ranks_are_threads
from tests.support.steps import KnownChunk, execute, make_step, prepare

POOL = 4 << 20
OUTPUT_TOKENS = 12
# Ranks below the largest, PEFT's other scale, few layers and stored dtypes.
ADAPTERS: list[dict[str, Any]] = [
    {"rank": 8, "alpha": 16},
    {
        "rank": 3,
        "alpha": 4,
        "use_rslora": True,
        "rank_pattern": {"v_proj": 7},
        "alpha_pattern": {"0.self_attn.q_proj": 9},
    },
    {"rank": 5, "alpha": 5, "targets": ("v_proj", "q_proj"), "dtype": torch.bfloat16},
    {"rank": 2, "alpha": 1, "targets": ("k_proj", "o_proj", "up_proj", "down_proj"), "dtype": torch.float16},
]


class Adapters:
    """The adapters of the small models and what transformers generates with each, made when first asked for."""

    def __init__(self, models: SmallModels, tmp: Path) -> None:
        self._models = models
        self._tmp = tmp
        self._outputs: dict[tuple[str, int], list[list[int]]] = {}

    def request(self, name: str, number: int) -> LoRARequest:
        """The adapter of that number, from 1."""
        folder = self._tmp / name / str(number)
        if not folder.exists():
            write_adapter(folder, self._models.folder(name), seed=number, **ADAPTERS[number - 1])
        return LoRARequest(str(number), number, folder, read_adapter(folder, self._models.folder(name)).digest)

    def sequences(self, name: str, numbers: list[int]) -> list[Sequence]:
        """A sequence for each prompt, whose adapters are ``numbers`` in turn; 0 is the model alone."""
        return [
            Sequence(index, prompt, OUTPUT_TOKENS, lora=self.request(name, number) if number else None)
            for index, (prompt, number) in enumerate(self._assigned(numbers))
        ]

    def expected(self, name: str, numbers: list[int]) -> list[list[int]]:
        """What transformers generates for ``sequences``."""
        outputs = []
        for index, (prompt, number) in enumerate(self._assigned(numbers)):
            if not number:
                outputs += self._models.outputs(name, [index], OUTPUT_TOKENS)
                continue
            merged = self._tmp / name / f"merged-{number}"
            if not merged.exists():
                adapter = self.request(name, number).lora_path
                write_merged_model(merged, self._models.folder(name), Path(adapter))
            outputs += greedy_oracle(merged, [prompt], OUTPUT_TOKENS)
        return outputs

    def _assigned(self, numbers: list[int]) -> list[tuple[list[int], int]]:
        return [(prompt, numbers[index % len(numbers)]) for index, prompt in enumerate(self._models.prompts[:10])]


@pytest.fixture(scope="module")
def adapters(small_models: SmallModels, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(small_models, tmp_path_factory.mktemp("adapters"))


def load(folder: Path, **settings: Any) -> TorchExecutor:
    limits = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8} if settings.get("enable_lora", True) else {}
    pools = {"kv_cache_memory": POOL, "swap_bytes": POOL}
    return load_executor(folder, **{"dtype": "float32", **limits, **pools, **settings})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if number % 2 else ()) for number, name in enumerate(OWN)]
)
def test_adapters_in_one_batch_make_the_tokens_of_merged_weights(
    small_models: SmallModels, adapters: Adapters, name: str
) -> None:
    numbers = [1, 0, 2, 3, 4, 1]
    with closing(load(small_models.folder(name))) as executor:
        outputs = Driver(executor, seed=1, max_chunk=13).run(adapters.sequences(name, numbers))
    assert outputs == adapters.expected(name, numbers)
    assert outputs != adapters.expected(name, [0]), "the adapters make a difference"


@pytest.mark.skipif(not is_fast(torch.float32), reason="oneDNN multiplies here, or torch, and no graph repeats that")
def test_a_graph_that_was_captured_with_one_adapter_serves_others(
    small_models: SmallModels, adapters: Adapters
) -> None:
    """Nine sequences decode again and again, each time with other adapters, and once with none."""
    with closing(load(small_models.folder("llama3"), enforce_eager=False)) as executor:
        for numbers in ([1], [0], [1, 2], [0, 4, 3], [2]):
            outputs = Driver(executor, seed=1, max_chunk=99).run(adapters.sequences("llama3", numbers))
            assert outputs == adapters.expected("llama3", numbers)
        graphs = executor._worker.runner._cpu_graphs._graphs  # type: ignore[union-attr]
    assert all(graphs[kind] is not None for kind in GraphKind)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_share_the_adapters(
    monkeypatch: pytest.MonkeyPatch, small_models: SmallModels, adapters: Adapters, tensor: int, pipeline: int
) -> None:
    ranks_are_threads(monkeypatch)
    numbers = [1, 0, 2, 3]
    folder, sizes = small_models.folder("llama2"), {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with closing(load(folder, max_cpu_loras=4, **sizes)) as executor:
        outputs = Driver(executor, seed=2, max_chunk=9).run(adapters.sequences("llama2", numbers))
    assert outputs == adapters.expected("llama2", numbers)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_ranks_that_send_tokens_to_experts_share_the_adapters(
    monkeypatch: pytest.MonkeyPatch, small_models: SmallModels, adapters: Adapters, name: str
) -> None:
    ranks_are_threads(monkeypatch)
    numbers, settings = [1, 0, 3], {"tensor_parallel_size": 2, "all2all_backend": "alltoall"}
    with closing(load(small_models.folder(name), max_cpu_loras=4, **settings)) as executor:
        outputs = Driver(executor, seed=2, max_chunk=9).run(adapters.sequences(name, numbers))
    assert outputs == adapters.expected(name, numbers)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_an_adapter_that_one_rank_alone_cannot_read_ends_its_own_requests_alone(
    monkeypatch: pytest.MonkeyPatch, small_models: SmallModels, adapters: Adapters, tensor: int, pipeline: int
) -> None:
    ranks_are_threads(monkeypatch)
    known, broken = adapters.request("llama2", 1), adapters.request("llama2", 2)
    read, rank = LoRAManager._read, threading.current_thread()

    def read_or_fail(manager: LoRAManager, lora: LoRARequest) -> LoRAAdapter:
        if lora.lora_int_id == broken.lora_int_id and threading.current_thread() is not rank:
            raise LoRAError("It has just been removed.")
        return read(manager, lora)

    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with closing(load(small_models.folder("llama2"), **sizes)) as executor:
        for number in (1, 2):
            with monkeypatch.context() as patch:
                patch.setattr(LoRAManager, "_read", read_or_fail)
                output = execute(executor, make_step(number, [chunk(0, known), chunk(1, broken)]))
            assert (sorted(output.token_ids), sorted(output.errors)) == ([0], [1])
        assert sorted(executor._worker._lora_manager.held) == [1]
        output = execute(executor, make_step(3, [chunk(0, known), chunk(1, broken)]))
        assert sorted(output.token_ids) == [0, 1], "and once it can be read it is used"


@pytest.mark.parametrize(
    ("max_loras", "max_cpu_loras"),
    [(1, 1), pytest.param(1, 3, marks=pytest.mark.soak), pytest.param(2, 2, marks=pytest.mark.soak), (2, 4)],
)
def test_adapters_take_turns_in_fewer_slots_and_less_memory(
    small_models: SmallModels, adapters: Adapters, max_loras: int, max_cpu_loras: int
) -> None:
    """One after the other, in an order that comes back to each: those that left are read again."""
    folder = small_models.folder("llama3")
    with closing(load(folder, max_loras=max_loras, max_cpu_loras=max_cpu_loras)) as executor:
        for number in (1, 2, 3, 1, 0, 4, 2, 1):
            outputs = Driver(executor, seed=number, max_chunk=20).run(adapters.sequences("llama3", [number])[:3])
            assert outputs == adapters.expected("llama3", [number])[:3]
            assert len(executor._worker._lora_manager.held) <= max_cpu_loras


def test_an_adapter_whose_folder_has_changed_ends_its_own_requests_alone(
    small_models: SmallModels, adapters: Adapters, tmp_path: Path
) -> None:
    model = small_models.folder("llama3")
    folder = write_adapter(tmp_path / "a", model)
    digest = read_adapter(folder, model).digest
    write_adapter(folder, model, seed=1)
    known, changed = adapters.request("llama3", 1), LoRARequest("changed", 7, folder, digest)
    with closing(load(model)) as executor:
        chunks = [chunk(0, None), chunk(1, known), chunk(2, changed)]
        output = execute(executor, make_step(1, chunks))
        assert sorted(output.token_ids) == [0, 1]
        assert {key: (error.code, error.param) for key, error in output.errors.items()} == {
            2: (ErrorCode.UNAVAILABLE, "model")
        }
        assert sorted(executor._worker._lora_manager.held) == [1]


def chunk(sequence_id: int, lora: LoRARequest | None) -> KnownChunk:
    tokens = [5, 6, 7]
    sample = SampleRequest(GREEDY, 0, len(tokens))
    return KnownChunk(sequence_id, tokens, 0, [sequence_id + 1], (sample,), lora=lora)


def test_a_batch_without_adapters_is_the_models_own_to_the_last_bit(small_models: SmallModels) -> None:
    folder = small_models.folder("qwen3")
    made = []
    for enable_lora in (False, True):
        with closing(load(folder, enable_lora=enable_lora, dtype="bfloat16")) as executor:
            batch = [chunk(each, None) for each in range(3)]
            made.append(_hidden(executor, batch))
    assert torch.equal(*made)


def _hidden(executor: TorchExecutor, chunks: list[KnownChunk]) -> torch.Tensor:

    with torch.inference_mode():
        return executor._worker.runner.forward(prepare(chunks, executor.kv_cache_config.block_size).model_input).clone()


def test_quantised_layers_have_adapters_too(small_models: SmallModels, adapters: Adapters) -> None:
    """Adapters keep their own precision: the difference that one makes is that in float32, roughly."""
    folder, request = small_models.folder("llama2"), adapters.request("llama2", 1)
    differences = []
    for quantization in (None, "int8"):
        with closing(load(folder, quantization=quantization)) as executor:
            own = _hidden(executor, [chunk(0, None)])
            executor._worker.runner.add_lora(request)
            differences.append(_hidden(executor, [chunk(0, request)]) - own)
    exact, rounded = differences
    assert (rounded - exact).norm() < 0.1 * exact.norm()


def test_a_model_that_runs_through_transformers_has_no_adapters(small_models: SmallModels) -> None:
    with pytest.raises(ModelError, match="--enable-lora is for models with a native implementation"):
        load(small_models.folder("gpt2"))


def test_the_largest_step_and_the_adapters_to_come_count_as_memory(small_models: SmallModels) -> None:
    folder = small_models.folder("llama3")
    common = {"kv_cache_memory": None, "max_num_batched_tokens": 64, "max_num_seqs": 5}
    with closing(load(folder, **common)) as executor:
        assert not executor._worker._lora_manager.held, "the step that memory was measured with has left its adapter"
        driven = Driver(executor, seed=0, max_chunk=9)
        assert driven.run([Sequence(0, [5, 6, 7], 4)])


# LLM


def test_llm_runs_the_adapters_that_its_prompts_name(
    small_models: SmallModels, adapters: Adapters, tmp_path: Path
) -> None:
    """More adapters than a step may have, with prompts in common: neither blocks nor tokens are mixed up."""
    model = Path(shutil.copytree(small_models.folder("qwen3"), tmp_path / "model"))
    write_model_folder(model)
    numbers = [1, 0, 2, 3]
    loras = [replace(adapters.request("qwen3", number), digest=b"") if number else None for number in numbers]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    settings = {"dtype": "float32", "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "kv_cache_memory": POOL}
    prompt = small_models.prompts[3]
    with LLM(model, **settings) as llm:
        for _ in range(2):
            each = llm.generate([prompt] * 4, params, lora_request=loras, use_tqdm=False)
            made = [output.outputs[0].token_ids for output in each]
            assert made == [adapters.expected("qwen3", [number])[3] for number in numbers]
        assert all(output.num_cached_tokens == 16 for output in each), "each adapter has blocks of its own"
        assert len({tuple(tokens) for tokens in made}) == 4
        one = llm.generate(prompt, params, lora_request=loras[2], use_tqdm=False)
        assert one[0].outputs[0].token_ids == made[2]
        with pytest.raises(QuireError, match="The number 1 is that of the adapter 1") as caught:
            llm.generate([prompt] * 2, params, lora_request=[loras[0], LoRARequest("other", 1, "x")])
        assert caught.value.param == "lora_request"
        with pytest.raises(QuireError, match="no folder"):
            llm.generate(prompt, params, lora_request=LoRARequest("other", 9, tmp_path / "nothing"))
        with pytest.raises(QuireError, match="above 0"):
            llm.generate(prompt, params, lora_request=LoRARequest("other", 0, tmp_path))
        with pytest.raises(QuireError, match="2 entries for 1 prompts"):
            llm.generate(prompt, params, lora_request=[None, None])


async def test_async_llm_too(small_models: SmallModels, adapters: Adapters, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small_models.folder("qwen3"), tmp_path / "model"))
    write_model_folder(model)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    settings = {"dtype": "float32", "enable_lora": True, "max_lora_rank": 8, "kv_cache_memory": POOL}
    async with AsyncLLM(model, **settings) as llm:
        request = adapters.request("qwen3", 1)
        *_, last = [output async for output in llm.generate(small_models.prompts[3], params, lora_request=request)]
    assert last.outputs[0].token_ids == adapters.expected("qwen3", [1])[3]


def test_llm_without_adapters_says_how_to_have_some(small_models: SmallModels, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small_models.folder("qwen3"), tmp_path / "model"))
    write_model_folder(model)
    with LLM(model, kv_cache_memory=POOL) as llm, pytest.raises(QuireError, match="start it with --enable-lora"):
        llm.generate([[5]], lora_request=LoRARequest("a", 1, tmp_path))


def test_attention_alone_may_be_the_target(small_models: SmallModels, tmp_path: Path) -> None:
    model = small_models.folder("qwen2")
    folder = write_adapter(tmp_path / "a", model, targets=ATTENTION)
    adapter = read_adapter(folder, model)
    assert {name.rpartition(".")[2] for name in adapter.weights} == set(ATTENTION)
