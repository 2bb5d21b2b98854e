"""Engines that share experts make the tokens of transformers and of one engine alone, whichever of them has work, in
whatever steps; and end together where one of them cannot go on.

Engines are threads here, and their ranks too; what is killed is in ``tests/service/test_data_parallel.py``.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from time import sleep
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from quire_engine.config import EngineArgs, EngineConfig
from quire_engine.core.engine_core import AbortRequest
from quire_engine.core.executor import ExecutorError, Rates
from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.errors import ModelError
from quire_engine.executor import torch_executor
from quire_engine.executor.engine_group import EngineGroup
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.layers.mlp import AllToAllExperts
from quire_engine.worker.input_batch import ModelInput
from quire_engine.worker.model_runner import ModelRunner
from quire_proto.errors import ErrorCode
from quire_proto.sampling import SamplingParams
from safetensors import safe_open

from tests.model.data_parallel import Engine, group, load
from tests.model.engine import BLOCK_SIZE, numbers_a_token, run
from tests.model.models import VOCAB_SIZE, SmallModels, greedy_oracle, small_model
from tests.model.ranks import OUTPUT_TOKENS, PROMPTS, SCHEDULES, expected
from tests.model.streamed import gib_of, needs_kernels, streamed_layers
from tests.support.adapters import ATTENTION, write_adapter, write_merged_model
from tests.support.executors import load_executor
from tests.support.guessing import Reminder
from tests.support.processes import eventually
from tests.support.rank_threads import ranks_are_threads

NAMES = ["mixtral", "qwen3-moe"]


@pytest.fixture
def prompts(small_models: SmallModels) -> list[list[int]]:
    return small_models.prompts[4 : 4 + PROMPTS]


def is_idle(engines: list[Engine]) -> bool:
    """Whether no pass is under way or comes."""
    return len({engine.lockstep.number for engine in engines}) == 1 and not any(
        engine.lockstep.is_due for engine in engines
    )


# The same tokens


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_engines_that_all_have_work_make_transformers_tokens(
    small_models: SmallModels, prompts: list[list[int]], name: str, size: int, chunk: int
) -> None:
    """Three engines have two of mixtral's four experts, two and none."""
    with group(small_models.folder(name), size, max_num_batched_tokens=chunk) as engines:
        added = [each.add(prompts[each.rank :: size], max_tokens=OUTPUT_TOKENS) for each in engines]
        for engine, names in zip(engines, added, strict=True):
            assert engine.outputs(names) == expected(small_models, name)[engine.rank :: size]
        for engine in engines:
            engine.check_memory()


@pytest.mark.parametrize("name", NAMES)
def test_one_engine_works_while_the_others_take_part_and_all_sleep_between_waves(
    small_models: SmallModels, prompts: list[list[int]], name: str
) -> None:
    with group(small_models.folder(name), 3) as engines:
        for wave in range(2):
            for engine in engines:
                made = engine.run(prompts, f"{wave}-", max_tokens=OUTPUT_TOKENS)
                assert made == expected(small_models, name)
                eventually(lambda: is_idle(engines))
                number = engine.lockstep.number
                for each in engines:  # a round of the loop that nobody asked for makes no pass
                    each.core.send(AbortRequest("of nobody"))
                assert engines[0].run([[5]], f"{wave}-{engine.rank}-", max_tokens=1) == [
                    greedy_oracle_of(small_models, name)
                ]
                eventually(lambda: is_idle(engines))
                assert engine.lockstep.number == number + 1
        assert {engine.lockstep.number for engine in engines} == {engines[0].lockstep.number}


def greedy_oracle_of(models: SmallModels, name: str) -> list[int]:
    return greedy_oracle(models.folder(name), [[5]], 1)[0]


@pytest.mark.parametrize("overlapped", [False, True])
def test_steps_of_engines_that_have_work_are_the_same_passes(small_models: SmallModels, overlapped: bool) -> None:
    """None makes a pass as a dummy that its own next step could have been."""
    begun: list[int] = []

    def add(engine: Engine) -> None:
        begun.append(engine.lockstep.number)
        engine.add([[5 + engine.rank]], max_tokens=40)

    settings = {"first": add, "async_scheduling": overlapped}
    with group(small_models.folder("mixtral"), 3, **settings) as engines:
        for engine in engines:
            engine.outputs(["0"])
        eventually(lambda: is_idle(engines))
        assert [engine.lockstep.number for engine in engines] == [number + 40 for number in begun]


def test_prompts_are_computed_beside_other_engines_decoding(
    small_models: SmallModels, prompts: list[list[int]]
) -> None:
    with group(small_models.folder("mixtral"), 2, max_num_batched_tokens=16) as (one, other):
        names = one.add(prompts, "long", max_tokens=60)
        one.wait_for_tokens("long0", 6)
        for wave in range(3):
            assert other.run(prompts, f"{wave}-", max_tokens=OUTPUT_TOKENS) == expected(small_models, "mixtral")
        made = small_models.outputs("mixtral", range(4, 4 + PROMPTS), 60)
        assert one.outputs(names) == made


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_blocks_are_swapped_and_computed_again_in_each_engine_for_itself(
    small_models: SmallModels, schedule: str
) -> None:
    (blocks, host_blocks, chunk), folder = SCHEDULES[schedule], small_models.folder("qwen3-moe")
    block_bytes = 4 * numbers_a_token(folder) * BLOCK_SIZE
    pools = {"kv_cache_memory": blocks * block_bytes, "swap_space": host_blocks * block_bytes / (1 << 30)}
    with group(folder, 2, max_num_batched_tokens=chunk, **pools) as engines:
        added = [engine.add(small_models.prompts[:4], max_tokens=40) for engine in engines]
        for engine, names in zip(engines, added, strict=True):
            assert engine.outputs(names) == [output[:40] for output in small_models.outputs("qwen3-moe")[:4]]
            stats = engine.core.scheduler.stats
            assert (stats.preemptions_by_swap > 0) == (schedule == "swap")
            assert (stats.preemptions_by_recompute > 0) == (schedule == "recompute")
            engine.check_memory()


@pytest.mark.parametrize("overlapped", [False, True])
def test_requests_that_are_aborted_in_the_middle_change_nothing_for_others(
    small_models: SmallModels, prompts: list[list[int]], overlapped: bool
) -> None:
    with group(small_models.folder("mixtral"), 2, async_scheduling=overlapped) as engines:
        assert {engine.executor.depth for engine in engines} == {2 if overlapped else 1}
        for wave in range(3):
            kept = [engine.add(prompts[:2], f"{wave}-", max_tokens=OUTPUT_TOKENS) for engine in engines]
            gone = [engine.add(prompts[2:4], f"{wave}-gone", max_tokens=200) for engine in engines]
            for engine, names in zip(engines, gone, strict=True):
                engine.wait_for_tokens(names[0], wave + 1)
                for name in names:
                    engine.abort(name)
            for engine, names in zip(engines, kept, strict=True):
                assert engine.outputs(names) == expected(small_models, "mixtral")[:2]
        for engine in engines:
            engine.check_memory()


@pytest.mark.parametrize("name", NAMES)
def test_steps_that_overlap_make_transformers_tokens(
    small_models: SmallModels, prompts: list[list[int]], name: str
) -> None:
    with group(small_models.folder(name), 2, async_scheduling=True) as engines:
        added = [engine.add(prompts, max_tokens=OUTPUT_TOKENS) for engine in engines]
        for engine, names in zip(engines, added, strict=True):
            assert engine.outputs(names) == expected(small_models, name)


def test_a_step_of_several_ranks_that_fails_is_made_up_for_by_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    small_models: SmallModels,
    prompts: list[list[int]],
) -> None:
    """A token that is none of the vocabulary's is found by each rank, before it sends anything."""
    ranks_are_threads(monkeypatch)
    settings = {"tensor_parallel_size": 2, "vocab_size": 2 * VOCAB_SIZE}  # the scheduler takes any of these
    with group(small_models.folder("qwen3-moe"), 2, **settings) as (one, other):
        names = one.add([*prompts, [VOCAB_SIZE + 1, 5]], max_tokens=OUTPUT_TOKENS)
        assert other.run(prompts, max_tokens=OUTPUT_TOKENS) == expected(small_models, "qwen3-moe")
        assert one.outputs(names[:-1]) == expected(small_models, "qwen3-moe")
        one.wait(lambda: one.answers[names[-1]].has_ended)
        assert one.answers[names[-1]].error is not None
    assert "running its" in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_engines_of_several_ranks_make_transformers_tokens(
    monkeypatch: pytest.MonkeyPatch, small_models: SmallModels, prompts: list[list[int]], name: str
) -> None:
    """Four ranks have two, two, two and none of qwen3-moe's six experts, and each a part of its engine's tokens."""
    ranks_are_threads(monkeypatch)
    with group(small_models.folder(name), 2, tensor_parallel_size=2) as (one, other):
        assert one.run(prompts, max_tokens=OUTPUT_TOKENS) == expected(small_models, name)
        names = one.add(prompts, "both", max_tokens=OUTPUT_TOKENS)
        assert other.run(prompts, max_tokens=OUTPUT_TOKENS) == expected(small_models, name)
        assert one.outputs(names) == expected(small_models, name)


def test_deterministic_tokens_do_not_depend_on_what_others_compute(
    small_models: SmallModels, prompts: list[list[int]]
) -> None:
    wanted = {"max_tokens": 40}
    settings = {"dtype": "bfloat16", "deterministic": True, "max_num_batched_tokens": 48}
    with group(small_models.folder("qwen3-moe"), 3, **settings) as (one, other, third):
        alone = one.run(prompts, "alone", **wanted)
        bits = [one.answers[f"alone{index}"].logprobs for index in range(PROMPTS)]
        beside = other.add(prompts[::-1], "beside", **wanted)
        third.add(prompts[:3], "beside", temperature=1.0, seed=5, **wanted)
        assert one.run(prompts, "among", **wanted) == alone
        assert [one.answers[f"among{index}"].logprobs for index in range(PROMPTS)] == bits
        assert other.outputs(beside) == alone[::-1]


WISHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "beams": ({}, {"beam_width": 3, "logprobs": None}),
    "guessed": ({"speculative_method": "ngram"}, {}),
    "int8": ({"quantization": "int8"}, {}),
    "measured": ({"kv_cache_memory": None, "swap_space": 0.001}, {}),
}


@pytest.mark.parametrize("wish", WISHES)
def test_whatever_an_engine_does_it_does_beside_others(
    small_models: SmallModels, prompts: list[list[int]], wish: str
) -> None:
    (settings, params), folder = WISHES[wish], small_models.folder("mixtral")
    greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=OUTPUT_TOKENS)
    with closing(
        load_executor(folder, swap_bytes=0, dtype="float32", **{"kv_cache_memory": 2 << 20, **settings})
    ) as alone:
        outputs = run(alone, prompts, [replace(greedy, **params)] * PROMPTS).outputs
        outputs_greedy = run(alone, prompts[:2], [greedy] * 2).outputs
    with group(folder, 2, **settings) as (one, other):
        names = other.add(prompts[:2], "beside", max_tokens=OUTPUT_TOKENS)
        if wish == "guessed":
            drawn = [[output] for output in outputs]
            one.core.scheduler._batch_scheduler.speculator = Reminder(Random(1), drawn, VOCAB_SIZE)
        assert one.run(prompts, max_tokens=OUTPUT_TOKENS, **params) == outputs
        assert other.outputs(names) == outputs_greedy
        assert (one.core.scheduler.stats.num_draft_tokens > 0) == (wish == "guessed")


@needs_kernels
def test_layers_that_are_read_from_disk_are_read_for_others_too(small_models: SmallModels, tmp_path: Path) -> None:
    folder = small_model("mixtral", tmp_path, num_hidden_layers=6)
    prompts, expected = small_models.prompts[:3], greedy_oracle(folder, small_models.prompts[:3], 8)
    with group(folder, 2, weights_memory_gb=gib_of(4, bytes_of_half_the_experts(folder))) as (one, other):
        assert streamed_layers(one.executor)
        assert one.run(prompts, max_tokens=8) == expected
        names = one.add(prompts, "both", max_tokens=8)
        assert other.run(prompts, max_tokens=8) == expected
        assert one.outputs(names) == expected


def bytes_of_half_the_experts(folder: Path) -> int:
    """What an engine of two has of a layer, in float32."""
    total = 0
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
            if ".layers.0." in name:
                count = tensors.get_tensor(name).numel()
                total += 2 * count if ".experts." in name else 4 * count
    return total


def test_an_adapter_is_one_engines_own(small_models: SmallModels, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = small_models.folder("mixtral")
    adapter = write_adapter(tmp_path / "adapter", folder, targets=ATTENTION)
    merged = write_merged_model(tmp_path / "merged", folder, adapter)
    with group(folder, 2, enable_lora=True, max_lora_rank=16) as (one, other):
        lora = one.executor.check_lora(LoRARequest("a", 1, adapter))
        names = one.add(prompts, lora=lora, max_tokens=OUTPUT_TOKENS)
        assert other.run(prompts, max_tokens=OUTPUT_TOKENS) == expected(small_models, "mixtral")
        assert one.outputs(names) == greedy_oracle(merged, prompts, OUTPUT_TOKENS)


def test_speed_is_measured_once_all_engines_have_their_memory(
    monkeypatch: pytest.MonkeyPatch, small_models: SmallModels
) -> None:
    """A step that waits for an engine which still starts says nothing of this one's speed."""
    done: list[str] = []
    make, measure = TorchExecutor.__init__, torch_executor.measure_rates

    def make_slowly(executor: TorchExecutor, *arguments: Any, engines: EngineGroup, **settings: Any) -> None:
        if engines.place.dp_rank == 1:
            sleep(0.5)
        make(executor, *arguments, engines=engines, **settings)
        done.append("made")

    def measure_now(*arguments: Any) -> Rates:
        done.append("measured")
        return measure(*arguments)

    monkeypatch.setattr(TorchExecutor, "__init__", make_slowly)
    monkeypatch.setattr(torch_executor, "measure_rates", measure_now)
    with group(small_models.folder("mixtral"), 2):
        assert done == ["made", "made", "measured", "measured"]


def test_steps_teach_how_long_they_take_where_no_other_engine_has_more_tokens(
    monkeypatch: pytest.MonkeyPatch, small_models: SmallModels, prompts: list[list[int]]
) -> None:
    made: list[tuple[int, int, int, bool]] = []  # pass, engine, its tokens, and whether it waited

    def watch(engine: Engine) -> None:
        execute = engine.executor.execute_model

        def execute_model(scheduler_output: SchedulerOutput) -> ModelOutput:
            number = engine.lockstep.number
            output = execute(scheduler_output)
            tokens = sum(chunk.length for chunk in scheduler_output.chunks)
            made.extend([(number, engine.rank, tokens, output.waited_for_others)] if tokens else [])
            return output

        monkeypatch.setattr(engine.executor, "execute_model", execute_model)

    with group(small_models.folder("mixtral"), 2, max_num_batched_tokens=16, first=watch) as (one, other):
        learnt: list[Any] = []
        monkeypatch.setattr(one.core.scheduler.step_times, "observe", lambda *step: learnt.append(step))
        names = one.add(prompts[:1], "long", max_tokens=60)
        one.wait_for_tokens("long0", 6)
        other.run(prompts, max_tokens=OUTPUT_TOKENS)
        one.outputs(names)
    tokens = {(number, rank): count for number, rank, count, _ in made}
    assert {waited for _, rank, _, waited in made if rank == 0} == {False, True}
    for number, rank, count, waited in made:
        assert waited == (tokens.get((number, 1 - rank), 0) > count)
    assert len(learnt) == sum(rank == 0 and not waited for _, rank, _, waited in made)


# The end


def test_an_executor_may_be_closed_again(small_models: SmallModels) -> None:
    with group(small_models.folder("mixtral"), 2) as engines:
        pass
    for engine in engines:
        engine.executor.close()


def test_an_engine_that_is_to_end_takes_part_until_the_others_have_no_work(
    small_models: SmallModels, prompts: list[list[int]]
) -> None:
    with group(small_models.folder("mixtral"), 2) as (one, other):
        names = other.add(prompts, max_tokens=OUTPUT_TOKENS)
        one.shut_down()
        assert other.outputs(names) == expected(small_models, "mixtral")
        assert other.run(prompts, "later", max_tokens=OUTPUT_TOKENS) == expected(small_models, "mixtral")
        assert one._thread.is_alive()


def test_a_terminated_engine_has_the_others_leave(small_models: SmallModels) -> None:
    with group(small_models.folder("mixtral"), 3) as engines, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(engine.lockstep.wait_until_leaving) for engine in engines]
        engines[1].lockstep.leave()
        assert [each.result(10) for each in waiting] == [None] * 3


# Failures


@contextmanager
def failing(small_models: SmallModels, size: int = 2, **settings: Any) -> Iterator[list[Engine]]:
    """Engines of which at least one will be lost."""
    with ExitStack() as stack:
        engines = load(small_models.folder("mixtral"), size, **settings)
        for engine in engines:
            stack.callback(engine.close)
            engine.start()
        yield engines


def own_runner(engine: Engine) -> ModelRunner:
    runner = engine.executor._worker.runner
    assert isinstance(runner, ModelRunner)
    return runner


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_step_that_fails_is_run_one_by_one_while_the_others_keep_up(
    monkeypatch: pytest.MonkeyPatch, small_models: SmallModels, prompts: list[list[int]], overlapped: bool
) -> None:
    with group(small_models.folder("mixtral"), 2, async_scheduling=overlapped) as engines:
        one, other = engines
        runner, poison, failures = own_runner(one), prompts[0][0], 0
        forward = runner.forward

        def fail(batch: ModelInput, pending: torch.Tensor | None = None) -> torch.Tensor:
            nonlocal failures
            if poison in batch.token_ids[batch.positions == 0]:
                failures += 1
                raise RuntimeError("no batch for this model")
            return forward(batch, pending)

        monkeypatch.setattr(runner, "forward", fail)
        names, beside = one.add(prompts, max_tokens=OUTPUT_TOKENS), other.add(prompts, max_tokens=OUTPUT_TOKENS)
        one.wait(lambda: all(one.answers[name].has_ended for name in names))
        poisoned = [name for name, prompt in zip(names, prompts, strict=True) if prompt[0] == poison]
        assert poisoned
        assert failures > len(poisoned)
        for name, output in zip(names, expected(small_models, "mixtral"), strict=True):
            if name in poisoned:
                error = one.answers[name].error
                assert error is not None
                assert error.code is ErrorCode.INTERNAL
            else:
                assert one.answers[name].token_ids == output
        assert other.outputs(beside) == expected(small_models, "mixtral")
        eventually(lambda: is_idle(engines))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_engines_end_when_one_of_them_does_in_the_middle_of_a_pass(
    monkeypatch: pytest.MonkeyPatch, small_models: SmallModels, prompts: list[list[int]], rank: int
) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise ExecutorError("no memory")

    with failing(small_models, 3) as engines:
        for engine in engines:
            engine.add(prompts[:1], max_tokens=150)
        gone, others = engines[rank], [engine for engine in engines if engine.rank != rank]
        gone.wait_for_tokens("0", 4)
        monkeypatch.setattr(own_runner(gone), "forward", fail)
        gone.join()
        gone.close()
        said = r"Engine {} \(127\.0\.0\.1(:\d+)?\) has closed the connection, and the engines of its group cannot go on"
        for engine in others:
            engine.join()
            with pytest.raises(ExecutorError, match=said.format(rank)):
                raise engine.failures[0]
            assert engine.told == [str(engine.failures[0])]


def test_an_engine_that_is_idle_hears_of_a_loss_too(small_models: SmallModels) -> None:
    with failing(small_models) as (one, other):
        other.executor._engines.close()  # type: ignore[union-attr]
        eventually(lambda: one.told)
        one.add([[5]], max_tokens=5)
        one.join()
        assert [str(failure) for failure in one.failures] == one.told


@pytest.mark.parametrize("place", ["before its tokens are sent", "before its results are"])
def test_an_engine_that_fails_alone_in_a_pass_ends(
    monkeypatch: pytest.MonkeyPatch, small_models: SmallModels, place: str
) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("quire_engine.executor.engine_group.LOSS_SECONDS", 0.1)
    with failing(small_models) as (one, other):
        one.run([[5]], max_tokens=5)
        experts = own_runner(one)._model._stack.layers[1]._mlp._experts  # type: ignore[attr-defined]
        assert isinstance(experts, AllToAllExperts)
        monkeypatch.setattr(experts, *(("_local", fail) if "results" in place else ("_communicator", None)))
        other.add([[6]], max_tokens=5)
        one.join()
        with pytest.raises(ExecutorError, match="This engine failed in a step in which others did not"):
            raise one.failures[0]
        one.close()
        other.join()
        assert [str(failure) for failure in other.failures] == other.told
        assert "Engine 0 (127.0.0.1" in other.told[0]


# What cannot be


def test_a_model_without_experts_is_refused(small_models: SmallModels) -> None:
    for name, architecture in (("llama3", "LlamaForCausalLM"), ("gpt2", "GPT2LMHeadModel")):
        args = EngineArgs(model=small_models.folder(name), data_parallel_size=2)
        with pytest.raises(ModelError) as caught:
            TorchExecutor.load(args)
        assert str(caught.value) == (
            "--data-parallel-size is for engines that share the experts of a model, and "
            f"{architecture} has none that can be shared: start several engines without it."
        )


def test_the_offline_engine_has_no_group(small_models: SmallModels) -> None:
    with pytest.raises(ModelError, match="--data-parallel-size is for engines with a server"):
        TorchExecutor.load(EngineArgs(model=small_models.folder("mixtral"), data_parallel_size=2))


def test_more_ranks_than_there_can_be_are_refused(small_models: SmallModels) -> None:
    args = EngineArgs(model=small_models.folder("mixtral"), data_parallel_size=64, tensor_parallel_size=2)
    with pytest.raises(ModelError, match=r"^128 ranks of all engines are more than 64\.$"):
        TorchExecutor.load(args)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data_parallel_rank": 2}, "--data-parallel-rank is not below --data-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--data-parallel-size and --pipeline-parallel-size exclude each other"),
        ({"tensor_parallel_size": 2, "enable_dbo": True}, "--enable-dbo and --data-parallel-size exclude each other"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "--data-parallel-size and --nnodes exclude each other"),
        ({"data_parallel_address": "10.0.0.1"}, "--data-parallel-size needs --tls-cert, --tls-key and --tls-client-ca"),
        ({"data_parallel_rank": 1, "node_addr": "10.0.0.2"}, "--data-parallel-size needs --tls-cert"),
    ],
)
def test_settings_that_a_group_cannot_have_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EngineConfig.model_validate({"model": "/m", "data_parallel_size": 2, **settings})


def test_a_group_may_be_asked_for_in_vllms_words() -> None:
    for settings in ({"all2all_backend": "alltoall"}, {"data_parallel_rank": 1}, {"data_parallel_address": "::1"}):
        EngineConfig.model_validate({"model": "/m", "data_parallel_size": 2, **settings})
