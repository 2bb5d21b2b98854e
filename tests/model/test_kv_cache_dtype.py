"""KV memory in int8 through the whole engine: the same tokens however the work is cut, cached, preempted or swapped,
right answers, half the memory, and blocks that are not mistaken for others.
"""

from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
from quire_engine.config import EngineArgs
from quire_engine.errors import ModelError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.factory import block_revision, make_scheduler
from quire_engine.kernels.bindings import library
from quire_proto.sampling import SamplingParams
from transformers import AutoTokenizer

from tests.model.engine import Run, load, run
from tests.model.models import FALLBACK, SmallModels, tight
from tests.model.test_demo import CONVERSATIONS, DEMO, prompts_of
from tests.model.test_schedules import PRESSURES, SCHEDULES, UNLIMITED
from tests.support.executors import load_executor
from tests.support.kernels import PATHS, cpu_path
from tests.support.rank_threads import ranks_are_threads
from tests.support.variants import one_in

BITWISE = (("mixtral", "bfloat16"), ("qwen3", "float32"))
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=48, ignore_eos=True, logprobs=2)
needs_kernel = pytest.mark.skipif(library() is None, reason="the kernels cannot be compiled here")


@cache
def executor_of(folder: Path, pressure: str, dtype: str = "float32") -> TorchExecutor:
    device, host = PRESSURES[pressure]
    return load(folder, tight(folder, device), host, dtype=dtype, kv_cache_dtype="int8", deterministic=True)


def outputs_of(made: Run) -> list[tuple[list[int], list[object]]]:
    """Tokens and log-probabilities of each prompt."""
    return [(choices[0].token_ids, choices[0].logprobs) for choices in made.choices]


@cache
def alone(folder: Path, prompts: tuple[tuple[int, ...], ...], dtype: str) -> list[tuple[list[int], list[object]]]:
    """What each prompt leads to with nothing next to it."""
    executor = executor_of(folder, "no pressure", dtype)
    return [outputs_of(run(executor, [list(prompt)], [SAMPLED], prefix_caching=False))[0] for prompt in prompts]


@needs_kernel
@pytest.mark.parametrize(("model_name", "dtype", "pressure", "caching"), list(one_in(2, BITWISE, SCHEDULES)))
def test_tokens_and_logprobs_are_the_same_bits_however_the_work_is_cut(
    small_models: SmallModels, model_name: str, pressure: str, caching: str, dtype: str
) -> None:
    folder, prompts = small_models.folder(model_name), small_models.prompts
    expected = alone(folder, tuple(map(tuple, prompts)), dtype)
    for chunk in (7, UNLIMITED):
        made = run(
            executor_of(folder, pressure, dtype),
            prompts,
            [SAMPLED] * len(prompts),
            chunk=chunk,
            prefix_caching=caching != "none",
            host_caching=caching == "host",
            max_num_seqs=12,
        )
        assert outputs_of(made) == expected
        assert (made.statistics.preemptions_by_recompute > 0) == (pressure == "recompute")
        assert (made.statistics.preemptions_by_swap > 0) == (pressure == "swap")


@pytest.mark.parametrize("model_name", FALLBACK)
def test_models_without_a_native_implementation_take_it_too(small_models: SmallModels, model_name: str) -> None:
    folder, prompts = small_models.folder(model_name), small_models.prompts
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    with closing(load(folder, 200, 0)) as plain, closing(load(folder, 200, 0, kv_cache_dtype="int8")) as int8:
        made, wanted = (run(executor, prompts, [greedy] * len(prompts)) for executor in (int8, plain))
    first, other = ([choices[0].logprobs[0].logprob for choices in one.choices] for one in (made, wanted))
    assert first == pytest.approx(other, abs=0.5), "the same model, rounded a little"
    assert first != other


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_still_answers_right(dtype: str, path: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    prompts = prompts_of(tokenizer)
    with cpu_path(path):
        executor = load_executor(DEMO, dtype=dtype, kv_cache_dtype="int8", kv_cache_memory=32 << 20, swap_bytes=0)
        made = run(executor, prompts, [SamplingParams(temperature=0, max_tokens=40)] * len(prompts))
    texts = [tokenizer.decode(output) for output in made.outputs]
    assert texts[:-1] == list(CONVERSATIONS)
    assert texts[-1].startswith("Once upon a time")


def test_two_ranks_hold_their_heads_in_int8(monkeypatch: pytest.MonkeyPatch, small_models: SmallModels) -> None:
    ranks_are_threads(monkeypatch)
    folder, prompts = small_models.folder("llama3"), small_models.prompts[4:10]
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * len(prompts)
    settings = {"dtype": "float32", "kv_cache_dtype": "int8", "kv_cache_memory": 1 << 21, "swap_bytes": 0}
    with (
        closing(load_executor(folder, tensor_parallel_size=2, **settings)) as shared,
        closing(load_executor(folder, **settings)) as single,
    ):
        assert 2 * shared.kv_cache_config.block_bytes == single.kv_cache_config.block_bytes
        assert run(shared, prompts, params).outputs == run(single, prompts, params).outputs


def test_blocks_of_int8_take_a_byte_for_each_number_and_have_other_hashes(small_models: SmallModels) -> None:
    args = {kind: EngineArgs(model=DEMO, kv_cache_dtype=kind, kv_cache_memory=8 << 20) for kind in ("auto", "int8")}
    hashes, sizes = {}, {}
    for kind, config in args.items():
        with closing(TorchExecutor.load(config)) as executor:
            sizes[kind] = executor.kv_cache_config.block_bytes
            hashes[kind] = make_scheduler(config, executor).config.model_revision
            assert hashes[kind] == block_revision(config, executor)
    assert hashes["auto"] != hashes["int8"]
    head_dim = 64
    assert sizes["int8"] * 2 * head_dim == sizes["auto"] * (head_dim + 4)


def test_fp8_is_refused_on_a_cpu_before_weights_are_read(small_models: SmallModels, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((small_models.folder("llama3") / "config.json").read_text())
    with pytest.raises(ModelError, match="--kv-cache-dtype int8"):
        load_executor(tmp_path, kv_cache_dtype="fp8", swap_bytes=0)
