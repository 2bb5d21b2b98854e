"""A model that several ranks share makes the tokens of one that has everything, whatever happens to its blocks; when
its ranks part, or one is lost, that is said, and nothing of them is left.

Most ranks here are threads, so that none has to start; those that are killed are processes.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM
from quire_engine import SamplingParams as LlmParams
from quire_engine.core.block_pool import BlockCopies, BlockCopy
from quire_engine.errors import ModelError
from quire_engine.executor import multiproc, rank_worker
from quire_engine.executor.rank_processes import RankError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.kernels.bindings import library
from quire_engine.kernels.packed_linear import is_fast
from quire_engine.worker import model_runner, worker
from quire_engine.worker.cpu_graph import GraphKind
from quire_engine.worker.input_batch import InputBatch
from quire_engine.worker.request_states import RequestStates
from quire_proto.sampling import SamplingParams
from safetensors.torch import load_file, save_file

from tests.model.engine import BLOCK_SIZE, numbers_a_token, run
from tests.model.models import FAMILIES, SmallModels, small_model
from tests.model.ranks import (
    OUTPUT_TOKENS,
    PROMPTS,
    SCHEDULES,
    Watched,
    assert_gone,
    assert_near,
    assert_only_its_own_request_fails,
    chunk,
    expected,
    generate,
    in_background,
)
from tests.support import fake_graphs, forked_ranks
from tests.support.executors import load_executor
from tests.support.forked_ranks import running_ranks
from tests.support.rank_threads import ranks_are_threads
from tests.support.steps import make_step

DEMO = Path(__file__).parents[2] / "demo" / "model"
POOL = 2 << 20


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)


def load(folder: Path, size: int, blocks: int = 100, host_blocks: int = 0, **settings: Any) -> TorchExecutor:
    block_bytes = 4 * numbers_a_token(folder) * BLOCK_SIZE
    pools = {"kv_cache_memory": blocks * block_bytes, "swap_bytes": host_blocks * block_bytes}
    settings = {"dtype": "float32", **pools, **settings}
    executor = load_executor(folder, tensor_parallel_size=size, **settings)
    if settings["dtype"] == "float32" and len(executor.kv_cache_config.groups) == 1:
        assert (executor.kv_cache_config.device_blocks, executor.kv_cache_config.host_blocks) == (blocks, host_blocks)
        assert executor.kv_cache_config.block_bytes == block_bytes // size, "each rank holds its heads alone"
    return executor


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_make_the_tokens_of_one(threads: None, small_models: SmallModels, name: str) -> None:
    folder = small_models.folder(name)
    with closing(load(folder, 2)) as shared, closing(load(folder, 1)) as alone:
        made = generate(shared, small_models)
        assert made.outputs == expected(small_models, name)
        assert_near(made, generate(alone, small_models))


@pytest.mark.skipif(library() is None or not is_fast(torch.float32), reason="torch multiplies here")
@pytest.mark.parametrize("name", ["llama3", "qwen3-moe"])
def test_decode_steps_are_graphs_with_their_sums(threads: None, small_models: SmallModels, name: str) -> None:
    folder = small_models.folder(name)
    with closing(load(folder, 2)) as shared, closing(load(folder, 2, enforce_eager=True)) as eager:
        made, wanted = (generate(each, small_models) for each in (shared, eager))
        graphs = shared._worker.runner._cpu_graphs._graphs  # type: ignore[union-attr]
        assert graphs[GraphKind.LAYERS] is not None
    assert made.choices == wanted.choices


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["llama3", "qwen3-moe"])
def test_blocks_move_on_all_ranks_alike(threads: None, small_models: SmallModels, name: str, schedule: str) -> None:
    blocks, host_blocks, chunk = SCHEDULES[schedule]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with closing(load(small_models.folder(name), 2, blocks, host_blocks)) as shared:
        made = run(shared, small_models.prompts[:4], [params] * 4, chunk=chunk)
    assert made.outputs == small_models.outputs(name, range(4), 40)
    assert (made.statistics.preemptions_by_swap > 0) == (schedule == "swap")
    assert (made.statistics.preemptions_by_recompute > 0) == (schedule == "recompute")


def test_four_ranks_make_the_tokens_of_one(threads: None, small_models: SmallModels) -> None:
    with closing(load(small_models.folder("llama2"), 4)) as shared:
        assert generate(shared, small_models).outputs == expected(small_models, "llama2")


def test_sizes_that_do_not_divide_evenly_are_divided_too(
    threads: None, small_models: SmallModels, tmp_path: Path
) -> None:
    """Three ranks share 256 tokens of vocabulary and 4 experts, of which the last rank has none."""
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 3}
    folder = small_model("mixtral", tmp_path, **sizes)
    with closing(load(folder, 3)) as shared, closing(load(folder, 1)) as alone:
        assert_near(generate(shared, small_models), generate(alone, small_models))


def test_pools_are_measured_and_equal_on_all_ranks(threads: None, small_models: SmallModels) -> None:
    folder = small_models.folder("llama3")
    settings = {"swap_bytes": 1 << 20, "max_num_batched_tokens": 64, "max_num_seqs": 5, "dtype": "float32"}
    with closing(load_executor(folder, tensor_parallel_size=2, **settings)) as shared:
        assert shared.kv_cache_config.device_blocks > 1000
        assert generate(shared, small_models).outputs == expected(small_models, "llama3")


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_that_are_pending_reach_all_ranks(threads: None, small_models: SmallModels, depth: int) -> None:
    with closing(load(small_models.folder("llama3"), 2, async_scheduling=depth == 2)) as shared:
        assert shared.depth == depth
        assert generate(shared, small_models).outputs == expected(small_models, "llama3")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_are_shared(threads: None, small_models: SmallModels, quantization: str) -> None:
    folder = small_models.folder("llama2")
    with (
        closing(load(folder, 2, quantization=quantization)) as shared,
        closing(load(folder, 1, quantization=quantization)) as alone,
    ):
        made, wanted = generate(shared, small_models), generate(alone, small_models)
    first, other = ([choices[0].logprobs[0].logprob for choices in one.choices] for one in (made, wanted))
    assert first == pytest.approx(other, abs=0.5), "the same model, rounded in other places"


def test_deterministic_logits_do_not_depend_on_the_batch(threads: None, small_models: SmallModels) -> None:
    """A needle alone and among others, cut and cached in other ways, is the same to the last bit in bfloat16."""
    needle, *others = small_models.prompts[4 : 4 + PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=3)
    settings = {"dtype": "bfloat16", "deterministic": True, "kv_cache_memory": POOL}
    with closing(load(small_models.folder("llama2"), 4, **settings)) as shared:
        alone = run(shared, [needle], [params]).choices[0][0]
        for place, chunk in ((0, 64), (3, 7), (5, 1 << 20)):
            prompts = [*others[:place], needle, *others[place:]]
            among = run(shared, prompts, [params] * PROMPTS, chunk=chunk).choices[place][0]
            assert (among.token_ids, among.logprobs) == (alone.token_ids, alone.logprobs)


def test_log_probabilities_of_a_prompt_that_fail_on_rank_0_are_that_steps_error(
    threads: None, small_models: SmallModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank computes logits, and waits for nothing afterwards."""

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    asked = chunk([5, 6, 7], [1])
    asked.num_prompt_logprobs = 2
    with closing(load(small_models.folder("llama3"), 2)) as shared:
        wanted = shared.execute_model(make_step(0, [asked]))
        with monkeypatch.context() as patched:
            patched.setattr("quire_engine.sampling.prompt_logprobs.token_logprobs", fail)
            with pytest.raises(RuntimeError, match="no memory"):
                shared.execute_model(make_step(1, [asked]))
        again = shared.execute_model(make_step(2, [asked]))
    assert (again.token_ids, again.prompt_logprobs) == (wanted.token_ids, wanted.prompt_logprobs)
    assert len(again.prompt_logprobs[0]) == 2


# What each rank knows


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_makes_the_same_batch_of_a_step(
    threads: None, small_models: SmallModels, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], schedule: str
) -> None:
    """Tokens that were drawn and blocks that have changed reach them all, though sequences leave memory and return."""
    made: dict[int, list[tuple[object, ...]]] = {}
    prepare_inputs = worker.prepare_inputs

    def record(states: RequestStates, *step: Any) -> InputBatch:
        batch = prepare_inputs(states, *step)
        group, known = batch.model_input.attention[0], batch.model_input
        tensors = (known.token_ids, known.positions, group.page_ids, group.last_page_len, known.sampled_rows)
        made.setdefault(id(states), []).append(tuple(tensor.tolist() for tensor in tensors))
        return batch

    folder, (blocks, host_blocks, most) = small_models.folder("llama3"), SCHEDULES[schedule]
    block_bytes, (tensor_size, num_stages) = 4 * numbers_a_token(folder) * BLOCK_SIZE, sizes
    pools = {"kv_cache_memory": blocks * block_bytes, "swap_bytes": host_blocks * block_bytes}
    divided = {"tensor_parallel_size": tensor_size, "pipeline_parallel_size": num_stages}
    params = [SamplingParams(temperature=1, seed=index, max_tokens=40, ignore_eos=True) for index in range(5)]
    monkeypatch.setattr(worker, "prepare_inputs", record)
    with closing(load_executor(folder, dtype="float32", **pools, **divided)) as shared:
        made.clear()
        ran = run(shared, small_models.prompts[:5], params, chunk=most, num_stages=num_stages)
        assert sum(ran.statistics.preemptions.values()) > 0
    own, *others = made.values()
    assert len(others) == tensor_size * num_stages - 1
    assert len(own) > 40
    assert all(other == own for other in others)


# Graphs


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Sets what this process records decode steps with."""
    for module in (multiproc, rank_worker):
        monkeypatch.setattr(module, "ModelRunner", module.ModelRunner)
    monkeypatch.setattr(model_runner, "make_attention", model_runner.make_attention)
    return fake_graphs.capture_on_the_cpu


def test_ranks_none_of_which_can_capture_do_without_graphs(
    threads: None, capturing: Callable[[Any], None], small_models: SmallModels, caplog: pytest.LogCaptureFixture
) -> None:
    capturing(fake_graphs.refuse)
    with closing(load(small_models.folder("llama3"), 2)) as shared:
        warnings = [record.getMessage() for record in caplog.records]
        assert generate(shared, small_models).outputs == expected(small_models, "llama3")
    assert set(warnings) == {"no CUDA graphs: out of memory; short steps take longer to launch"}


@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_rank_that_alone_cannot_capture_ends_the_start_instead_of_leaving_the_others_waiting(
    capturing: Callable[[Any], None], small_models: SmallModels, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    capturers = [fake_graphs.FakeCapturer(), fake_graphs.FakeCapturer()]
    capturers[failing] = fake_graphs.refuse
    monkeypatch.setattr(forked_ranks, "prepare", partial(fake_graphs.capture_on_the_cpu, capturers[1]))
    capturing(capturers[0])
    thread, raised = in_background(lambda: load(small_models.folder("llama3"), 2).close())
    thread.join(60)
    assert not thread.is_alive(), "the ranks wait for each other"
    assert [type(error) for error in raised] == [RankError]
    sentence = f"Rank {failing} failed in a step in which other ranks did not: GraphCaptureError: out of memory."
    assert str(raised[0]) == sentence


# What goes wrong on all ranks alike


def test_a_step_that_no_rank_can_run_is_that_requests_error(threads: None, small_models: SmallModels) -> None:
    with closing(load(small_models.folder("llama3"), 2)) as shared:
        assert_only_its_own_request_fails(shared)


def test_a_copy_that_fails_on_every_rank_ends_the_engine(threads: None, small_models: SmallModels) -> None:
    from quire_engine.core.executor import CopyError

    with closing(load(small_models.folder("llama3"), 2)) as shared, pytest.raises(CopyError):
        shared.execute_model(make_step(0, copies=BlockCopies(blocks_to_copy=[BlockCopy(1, 1 << 20)])))


@pytest.mark.parametrize("size", [3, 64])
def test_a_size_that_cannot_be_is_refused(small_models: SmallModels, size: int) -> None:
    with pytest.raises(ModelError, match=f"The tensor parallel size is {size}, which does not divide the model's 4"):
        load(small_models.folder("llama3"), size)


def test_models_without_a_native_implementation_are_refused(small_models: SmallModels) -> None:
    with pytest.raises(ModelError, match="GPT2LMHeadModel runs through transformers"):
        load_executor(small_models.folder("gpt2"), tensor_parallel_size=2, swap_bytes=0)


@pytest.mark.parametrize("missing", ["model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.experts.gate_up_proj"])
def test_a_tensor_that_is_missing_is_named(threads: None, tmp_path: Path, missing: str) -> None:
    folder = small_model("qwen3-moe" if "experts" in missing else "llama2", tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = missing if missing in weights else next(name for name in weights if name.endswith("experts.gate_up_proj"))
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="has no tensor"):
        load(folder, 2)


def test_a_tensor_that_only_another_rank_reads_is_missed_too(threads: None, tmp_path: Path) -> None:
    folder = small_model("mixtral", tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"has no tensor {name}"):
        load(folder, 2)


# Ranks that are lost


@pytest.fixture
def watched(small_models: SmallModels) -> Iterator[Watched]:
    with closing(Watched(partial(load, small_models.folder("llama3"), 2))) as watched:
        yield watched


def test_a_stopped_rank_is_waited_for_and_one_killed_meanwhile_is_reported(watched: Watched) -> None:
    watched.check_stopped_and_killed(1)


def test_a_rank_that_fails_alone_is_reported_although_rank_0_waits_for_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = watched.loss_by_a_wrong_batch(monkeypatch)
    assert "Rank 1 failed in a step in which other ranks did not: IndexError" in told


def test_rank_0_failing_alone_is_reported_although_the_others_wait_for_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    watched.run()
    monkeypatch.setattr(watched.executor._worker.runner._attention, "prepare", fail)
    with pytest.raises(RankError, match=r"Rank 0 failed in a step in which other ranks did not: .*out of memory"):
        watched.run()
    watched.loss()


def test_offline_an_idle_rank_that_dies_fails_the_next_call_and_nothing_is_left() -> None:
    params = LlmParams(temperature=0, max_tokens=8)
    pools = {"kv_cache_memory": 32 << 20, "swap_space": 0.0, "dtype": "float32"}
    with LLM(DEMO, tensor_parallel_size=2, **pools) as llm, LLM(DEMO, **pools) as alone:
        (other,) = running_ranks()
        texts = [one.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text for one in (llm, alone)]
        assert texts[0] == texts[1]
        other.terminate()
        assert_gone(other)
        with pytest.raises(RankError, match="was killed by SIGTERM"):
            llm.generate("Once upon a time", params, use_tqdm=False)
    assert running_ranks() == []


def test_a_garbage_collected_executor_leaves_no_process(small_models: SmallModels) -> None:
    load(small_models.folder("llama3"), 2)
    assert running_ranks() == []
