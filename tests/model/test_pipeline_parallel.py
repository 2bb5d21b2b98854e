"""A model whose layers are divided into the stages of a pipeline makes the tokens of a whole one, to the last bit of
its log-probabilities, whatever happens to its blocks; and steps are under way in all stages at once.

Most ranks here are threads, so that none has to start; those that are killed are processes.
"""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM
from quire_engine import SamplingParams as LlmParams
from quire_engine.core.block_pool import BlockCopies, BlockCopy
from quire_engine.core.executor import CopyError
from quire_engine.errors import ModelError
from quire_engine.executor.multiproc import MultiprocRanks
from quire_engine.executor.rank_processes import RankError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.models.decoder import DecoderModel
from quire_engine.sampling.sampler import Sampler
from quire_proto.sampling import SamplingParams

from tests.model.engine import Run, run
from tests.model.models import OWN, SmallModels, small_model
from tests.model.ranks import (
    SCHEDULES,
    SECONDS_TO_BE_TOLD,
    Watched,
    assert_gone,
    assert_near,
    assert_only_its_own_request_fails,
    chunk,
    expected,
    generate,
    in_background,
)
from tests.support import forked_ranks
from tests.support.executors import load_executor
from tests.support.forked_ranks import running_ranks
from tests.support.rank_threads import ranks_are_threads
from tests.support.sampling_inputs import ModuloGrammar
from tests.support.steps import make_step

DEMO = Path(__file__).parents[2] / "demo" / "model"
POOL = 1 << 21


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of seven layers with a tied head, of which three stages get uneven shares."""
    folder = tmp_path_factory.mktemp("deep")
    return small_model("llama2", folder, num_hidden_layers=7, num_key_value_heads=2, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def deep_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with experts."""
    return small_model("mixtral", tmp_path_factory.mktemp("experts"), num_hidden_layers=7)


def load(folder: Path, num_stages: int, tensor_size: int = 1, **settings: Any) -> TorchExecutor:
    sizes = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": tensor_size}
    settings = {"dtype": "float32", "kv_cache_memory": POOL, "swap_bytes": 0, **settings}
    return load_executor(folder, **sizes, **settings)


def in_stages(executor: TorchExecutor, num_stages: int, models: SmallModels, **how: Any) -> Run:
    return generate(executor, models, num_stages=num_stages, **how)


@pytest.mark.parametrize("name", OWN)
def test_two_stages_make_the_tokens_of_transformers(threads: None, small_models: SmallModels, name: str) -> None:
    with closing(load(small_models.folder(name), 2)) as shared:
        assert in_stages(shared, 2, small_models).outputs == expected(small_models, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_stages", [2, 3, 7])
def test_the_stages_compute_what_one_process_does_bit_for_bit(
    threads: None, small_models: SmallModels, deep: Path, num_stages: int, dtype: str
) -> None:
    settings = {"dtype": dtype, "deterministic": True}
    with closing(load(deep, num_stages, **settings)) as shared, closing(load(deep, 1, **settings)) as whole:
        assert shared.depth == num_stages
        made, alone = in_stages(shared, num_stages, small_models), generate(whole, small_models)
    for mine, theirs in zip(made.choices, alone.choices, strict=True):
        assert (mine[0].token_ids, mine[0].logprobs) == (theirs[0].token_ids, theirs[0].logprobs)


@pytest.mark.parametrize("model", ["deep", "deep_experts"])
def test_a_grid_of_ranks_makes_the_tokens_of_one(
    threads: None, small_models: SmallModels, request: pytest.FixtureRequest, model: str
) -> None:
    folder = request.getfixturevalue(model)
    with closing(load(folder, 2, 2)) as shared, closing(load(folder, 1)) as whole:
        assert_near(in_stages(shared, 2, small_models), generate(whole, small_models))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_blocks_move_in_all_stages_alike(
    threads: None, small_models: SmallModels, deep: Path, schedule: str, num_stages: int
) -> None:
    """Stages of unlike numbers of layers have blocks of unlike sizes, with the same numbers."""
    blocks, host_blocks, most = SCHEDULES[schedule]
    block_bytes = 7 * 2 * 2 * 16 * 16 * 4
    pools = {"kv_cache_memory": blocks * block_bytes, "swap_bytes": host_blocks * block_bytes}
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 4
    with closing(load(deep, num_stages, **pools)) as shared, closing(load(deep, 1)) as whole:
        config = shared.kv_cache_config
        assert (config.device_blocks, config.host_blocks) == (blocks, host_blocks)
        made = run(shared, small_models.prompts[:4], params, chunk=most, num_stages=num_stages, swap_ahead=0.5)
        assert made.outputs == run(whole, small_models.prompts[:4], params).outputs
    assert (made.statistics.preemptions_by_swap > 0) == (schedule == "swap")
    assert (made.statistics.preemptions_by_recompute > 0) == (schedule == "recompute")


WISHES = {
    "sampled": {"temperature": 0.9, "seed": 7, "top_k": 20},
    "penalised": {"temperature": 0, "frequency_penalty": 1.0, "min_tokens": 5},
    "several": {"temperature": 1.0, "seed": 3, "n": 3},
    "beams": {"temperature": 0, "beam_width": 3, "n": 2},
    "prompt log-probabilities": {"temperature": 0, "prompt_logprobs": 2, "logprobs": 2},
}


@pytest.mark.parametrize("wish", WISHES)
def test_whatever_is_drawn_is_what_one_process_draws(
    threads: None, small_models: SmallModels, deep: Path, wish: str
) -> None:
    params = [SamplingParams(max_tokens=12, ignore_eos=True, **WISHES[wish])] * 5
    settings = {"deterministic": True}
    with closing(load(deep, 3, **settings)) as shared, closing(load(deep, 1, **settings)) as whole:
        made = run(shared, small_models.prompts[:5], params, chunk=48, num_stages=3)
        alone = run(whole, small_models.prompts[:5], params, chunk=48)
    assert made.outputs == alone.outputs
    assert made.choices == alone.choices
    assert made.prompt_logprobs == alone.prompt_logprobs


@pytest.mark.parametrize("host_blocks", [0, 100])
def test_a_mixture_of_everything_is_what_one_process_makes_of_it_under_pressure(
    threads: None, small_models: SmallModels, deep: Path, host_blocks: int
) -> None:
    """Sampled, several, beams, penalised and by a grammar, in memory that some of them have to leave."""
    wishes = [*WISHES.values(), {"temperature": 0}, {"temperature": 1.1, "bad_words": ((7,), (9, 11))}]
    prompts = small_models.prompts[:14]
    params = [
        SamplingParams(max_tokens=40, **{"seed": index} | wishes[index % len(wishes)]) for index in range(len(prompts))
    ]
    grammars = [ModuloGrammar(3, 256) if index % len(wishes) == 5 else None for index in range(len(prompts))]
    block_bytes = 7 * 2 * 2 * 16 * 16 * 4
    pools = {"kv_cache_memory": 20 * block_bytes, "swap_bytes": host_blocks * block_bytes}
    with closing(load(deep, 3, **pools)) as shared, closing(load(deep, 1)) as whole:
        made = run(shared, prompts, params, chunk=64, grammars=grammars, max_num_seqs=8, num_stages=3)
        alone = run(whole, prompts, params, chunk=64, grammars=grammars, max_num_seqs=8)
    assert sum(made.statistics.preemptions.values()) > 1
    for mine, theirs in zip(made.choices, alone.choices, strict=True):
        assert [(each.token_ids, each.finish_reason) for each in mine] == [
            (each.token_ids, each.finish_reason) for each in theirs
        ]


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}])
def test_quantised_stages_round_as_one_process_does(
    threads: None, small_models: SmallModels, deep: Path, settings: dict[str, str]
) -> None:
    with closing(load(deep, 2, **settings)) as shared, closing(load(deep, 1, **settings)) as whole:
        assert in_stages(shared, 2, small_models).outputs == generate(whole, small_models).outputs


def test_pools_are_measured_over_all_stages(threads: None, small_models: SmallModels, deep: Path) -> None:
    limits = {"kv_cache_memory": None, "swap_bytes": 1 << 20, "max_num_batched_tokens": 64, "max_num_seqs": 5}
    with closing(load(deep, 2, **limits)) as shared, closing(load(deep, 1)) as whole:
        assert shared.kv_cache_config.device_blocks > 1000
        assert in_stages(shared, 2, small_models).outputs == generate(whole, small_models).outputs


def test_steps_are_under_way_in_all_stages_at_once(
    threads: None, small_models: SmallModels, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stage 0 has launched when it waits for the last stage: nearly always a step for each stage."""
    waiting: list[int] = []
    under_way: list[object] = []
    execute, get_output = MultiprocRanks.execute, MultiprocRanks.get_output

    def count(ranks: MultiprocRanks, *step: Any) -> Any:
        under_way.append(step)
        return execute(ranks, *step)

    def look(ranks: MultiprocRanks) -> Any:
        waiting.append(len(under_way))
        under_way.pop()
        return get_output(ranks)

    monkeypatch.setattr(MultiprocRanks, "execute", count)
    monkeypatch.setattr(MultiprocRanks, "get_output", look)
    with closing(load(deep, 3)) as shared:
        waiting.clear()
        under_way.clear()
        in_stages(shared, 3, small_models)
    assert max(waiting) == 3
    assert sum(waiting) > 2.5 * len(waiting)


def test_decode_steps_of_each_stage_are_captured(
    threads: None, small_models: SmallModels, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    layers = DecoderModel.layers
    monkeypatch.setattr(
        DecoderModel, "layers", lambda model, *rest: ran.append(model._stage.index) or layers(model, *rest)
    )
    with closing(load(deep, 2, deterministic=True)) as shared:
        generate(shared, small_models, num_stages=2)
        ran.clear()
        made = generate(shared, small_models, num_stages=2)
    steps = made.statistics.generated_tokens / 3
    assert len(ran) < steps, "a captured step does not call the model"


# What goes wrong


def test_a_step_that_no_stage_can_run_is_that_requests_error(threads: None, deep: Path) -> None:
    with closing(load(deep, 3)) as shared:
        assert_only_its_own_request_fails(shared)


def test_a_step_that_fails_between_others_leaves_them_as_they_are(threads: None, deep: Path) -> None:
    with closing(load(deep, 3)) as shared:
        good, bad = chunk([5, 6], [1], id=1), chunk([999], [2], id=2)
        wanted = shared.execute_model(make_step(0, [good])).token_ids
        first = shared.execute_model_async(make_step(1, [good]))
        with pytest.raises(IndexError):
            shared.execute_model_async(make_step(2, [bad]))
        second = shared.execute_model_async(make_step(3, [chunk([7, 8, 9], [3], id=3)]))
        first.sample_tokens()
        assert first.get_output().token_ids == wanted
        second.sample_tokens()
        alone = shared.execute_model(make_step(4, [chunk([7, 8, 9], [4], id=4)])).token_ids
        assert second.get_output().token_ids == alone


def test_a_draw_that_fails_in_the_last_stage_is_that_steps_error(
    threads: None, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("no luck")

    with closing(load(deep, 3)) as shared:
        wanted = shared.execute_model(make_step(0, [chunk([5, 6], [1])])).token_ids
        with monkeypatch.context() as patched:
            patched.setattr(Sampler, "sample_plain", fail)
            with pytest.raises(RuntimeError, match="ZeroDivisionError: no luck"):
                shared.execute_model(make_step(1, [chunk([5, 6], [1])]))
        assert shared.execute_model(make_step(2, [chunk([5, 6], [1])])).token_ids == wanted


def test_logits_that_fail_on_all_ranks_of_the_last_stage_are_that_steps_error(
    threads: None, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no error of the step that was launched behind it."""
    failed: list[int] = []
    logits = DecoderModel.logits

    def fail_once(model: DecoderModel, hidden: torch.Tensor) -> torch.Tensor:
        if model.communicator.rank not in failed:
            failed.append(model.communicator.rank)
            raise ZeroDivisionError("no luck")
        return logits(model, hidden)

    one, other = chunk([5, 6], [1], id=1), chunk([7, 8, 9], [3], id=3)
    with closing(load(deep, 2, 2)) as shared:
        wanted = [shared.execute_model(make_step(0, [each])).token_ids for each in (one, other)]
        monkeypatch.setattr(DecoderModel, "logits", fail_once)
        first, second = (shared.execute_model_async(make_step(1, [each])) for each in (one, other))
        first.sample_tokens()
        with pytest.raises(RuntimeError, match="ZeroDivisionError: no luck"):
            first.get_output()
        assert sorted(failed) == [0, 1]
        second.sample_tokens()
        assert second.get_output().token_ids == wanted[1]
        assert shared.execute_model(make_step(2, [one])).token_ids == wanted[0]


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_logits_that_fail_on_one_rank_of_the_last_stage_end_the_engine(
    deep: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """The rank that samples, or one that it waits for."""
    monkeypatch.setattr(forked_ranks, "prepare", partial(fail_logits_of, part))
    with closing(Watched(partial(load, deep, 2, 2))) as watched:
        thread, raised = in_background(watched.run)
        told = f"Rank {2 + part} failed in a step in which other ranks did not: ZeroDivisionError: no luck."
        assert watched.loss() == told
        thread.join(SECONDS_TO_BE_TOLD)
        assert [type(error) for error in raised] == [RankError]


def fail_logits_of(part: int) -> None:
    """What this process computes of logits fails if its rank has this part of a stage."""
    logits = DecoderModel.logits

    def fail(model: DecoderModel, hidden: torch.Tensor) -> torch.Tensor:
        if model.communicator.rank == part:
            raise ZeroDivisionError("no luck")
        return logits(model, hidden)

    DecoderModel.logits = fail  # type: ignore[method-assign]


def test_a_copy_that_fails_in_every_stage_ends_the_engine(threads: None, deep: Path) -> None:
    with closing(load(deep, 2)) as shared, pytest.raises(CopyError):
        shared.execute_model(make_step(0, copies=BlockCopies(blocks_to_copy=[BlockCopy(1, 1 << 20)])))


def test_more_stages_than_layers_are_refused(small_models: SmallModels) -> None:
    with pytest.raises(ModelError, match="The pipeline parallel size is 3, and the model has 2 layers"):
        load(small_models.folder("llama3"), 3)


def test_models_without_a_native_implementation_are_refused(small_models: SmallModels) -> None:
    with pytest.raises(ModelError, match="GPT2LMHeadModel runs through transformers"):
        load(small_models.folder("gpt2"), 2)


@pytest.fixture
def watched(deep: Path) -> Iterator[Watched]:
    with closing(Watched(partial(load, deep, 3))) as watched:
        yield watched


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_stopped_stage_is_waited_for_and_one_killed_meanwhile_is_reported(watched: Watched, rank: int) -> None:
    watched.check_stopped_and_killed(rank)


def test_a_stage_that_fails_alone_is_reported_although_the_others_wait_for_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "failed in a step that rank 0 computed: IndexError" in watched.loss_by_a_wrong_batch(monkeypatch)


def test_offline_a_pipeline_makes_the_texts_of_one_process_and_ends_with_it() -> None:
    params = LlmParams(temperature=0, max_tokens=8)
    pools = {"kv_cache_memory": 32 << 20, "swap_space": 0.0, "dtype": "float32"}
    prompts = ["Once upon a time", "The sea", "A dog"]
    with LLM(DEMO, pipeline_parallel_size=2, **pools) as llm, LLM(DEMO, **pools) as alone:
        (other,) = running_ranks()
        texts = [
            [each.outputs[0].text for each in one.generate(prompts, params, use_tqdm=False)] for one in (llm, alone)
        ]
        assert texts[0] == texts[1]
        other.terminate()
        assert_gone(other)
        with pytest.raises(RankError, match="was killed by SIGTERM"):
            llm.generate(prompts, params, use_tqdm=False)
    assert running_ranks() == []


def test_nothing_of_a_pipeline_is_left_when_its_executor_is_garbage(deep: Path) -> None:
    load(deep, 2)
    assert running_ranks() == []
