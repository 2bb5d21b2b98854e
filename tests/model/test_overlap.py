"""A step that is launched before the last one's tokens are known makes what it makes when they are: tokens, errors and
log-probabilities, whatever is drawn and however the steps are cut.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quire_engine.config import EngineArgs
from quire_engine.core.executor import ExecutorError
from quire_engine.executor import torch_executor
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.kernels.experts_kernel import ExpertsKernel
from quire_engine.sampling.logits_processors import Draw
from quire_engine.sampling.sampler import PlainSamplerOutput, SamplerOutput
from quire_engine.worker.model_runner import LoadedModel
from quire_proto.errors import ErrorCode
from quire_proto.sampling import SamplingParams
from safetensors.torch import load_file, save_file

from tests.model.engine import load as load_engine
from tests.model.engine import run as run_engine
from tests.model.models import OUTPUT_TOKENS, VOCAB_SIZE, SmallModels, small_model, tight
from tests.model.overlapping import Loop, Sequence, assert_equal, came_of, some_sequences
from tests.support.executors import load_executor
from tests.support.sampling_inputs import ModuloGrammar, make_output
from tests.support.steps import PENDING, KnownChunk, make_step

POOL = 4 << 20


@pytest.fixture
def executor(small_models: SmallModels) -> Iterator[TorchExecutor]:
    executor = load(small_models.folder("llama3"))
    yield executor
    executor.close()


def load(folder: Path, async_scheduling: bool | None = True, **settings: Any) -> TorchExecutor:
    settings = {"dtype": "float32", "kv_cache_memory": POOL, "swap_bytes": 0, **settings}
    return load_executor(folder, async_scheduling=async_scheduling, **settings)


@pytest.mark.parametrize("seed", range(4))
def test_overlapped_steps_make_what_steps_make_one_after_the_other(
    executor: TorchExecutor, small_models: SmallModels, seed: int
) -> None:
    prompts = [prompt[:60] for prompt in small_models.prompts]
    apart, overlapped = some_sequences(prompts), some_sequences(prompts)
    Loop(executor, apart, seed=99).run()
    loop = Loop(executor, overlapped, seed)
    loop.run_overlapped()
    assert loop.num_pending > 20, "hardly anything was overlapped"
    assert came_of(overlapped) == came_of(apart)
    assert {one.error for one in apart} == {None, ErrorCode.INVALID}
    assert [len(one.output) for one in apart].count(14) == len(apart) - 2
    for one, other in zip(overlapped, apart, strict=True):
        assert len(one.prompt_logprobs) == one.made.request.num_prompt_tokens - 1
        assert_equal(one.logprobs, other.logprobs)
        assert_equal(one.prompt_logprobs, other.prompt_logprobs)


def test_a_sequence_whose_numbers_are_not_finite_ends_alone(tmp_path: Path, small_models: SmallModels) -> None:
    folder = small_model("llama2", tmp_path)
    weights = load_file(folder / "model.safetensors")
    sound = Sequence(make_output(0, [5, 6]), wanted=8)
    whole = load(folder)
    Loop(whole, [sound], seed=0).run()
    whole.close()
    weights["model.embed_tokens.weight"][sound.output[3]] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    executor = load(folder)
    first, second = (
        Sequence(make_output(0, [5, 6]), wanted=8),
        Sequence(make_output(1, [9, 4, 8]), wanted=8),
    )
    apart = Sequence(make_output(1, [9, 4, 8]), wanted=8)
    Loop(executor, [apart], seed=0).run()
    Loop(executor, [first, second], seed=1).run_overlapped()
    executor.close()
    assert first.output == sound.output[:4]
    assert first.error is ErrorCode.INTERNAL
    assert came_of([second]) == came_of([apart])


def test_a_launch_that_fails_leaves_the_step_before_it_as_it_was(executor: TorchExecutor) -> None:
    """And that one can still be gone on from: its tokens are found by the next launch that works."""
    one, oracle = (
        Sequence(make_output(0, [5, 6, 7]), wanted=3),
        Sequence(make_output(0, [5, 6, 7]), wanted=3),
    )
    Loop(executor, [oracle], seed=0).run()
    first = executor.execute_model_async(make_step(0, [one.chunk(40)]))
    first.sample_tokens()
    one.pending = True
    good = one.chunk(40)
    with pytest.raises(IndexError):
        executor.execute_model_async(make_step(1, [good, KnownChunk(1, [VOCAB_SIZE], 0, [30], ())]))
    second = executor.execute_model_async(make_step(1, [good]))
    one.made.token_ids.append(first.get_output().token_ids[0])
    second.sample_tokens()
    assert [*one.output, second.get_output().token_ids[0]] == oracle.output[:2]


@pytest.mark.parametrize(("draws", "style"), [("sample_plain", {}), ("sample", {"logprobs": 1})])
def test_an_error_in_sampling_is_raised_with_the_result(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch, draws: str, style: dict[str, int]
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no draw")

    one = Sequence(make_output(0, [5, 6, 7], **style), wanted=3)
    first = executor.execute_model_async(make_step(0, [one.chunk(40)]))
    with monkeypatch.context() as patch:
        patch.setattr(executor._worker.sampler, draws, fail)
        first.sample_tokens()
    one.pending = True
    second = executor.execute_model_async(make_step(1, [one.chunk(40)]))
    with pytest.raises(ValueError, match="no draw"):
        first.get_output()
    second.sample_tokens()
    assert len(second.get_output().token_ids) == 1


@pytest.mark.parametrize("style", [{}, {"logprobs": 1}])
@pytest.mark.parametrize("when", ["launch", "draw", "result"])
def test_a_device_that_fails_ends_the_engine(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch, when: str, style: dict[str, int]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    scheduler_output = make_step(0, [Sequence(make_output(0, [5, 6], **style), wanted=3).chunk(40)])
    target = {
        "launch": (executor._worker.runner, "forward"),
        "draw": (executor._worker.sampler, "sample" if style else "sample_plain"),
        "result": (SamplerOutput if style else PlainSamplerOutput, "fetch_into"),
    }
    monkeypatch.setattr(*target[when], fail)
    with pytest.raises(ExecutorError, match=r"^The device failed: CUDA error"):
        executor.execute_model(scheduler_output)


def test_copies_wait_for_a_forward_pass_that_failed_too(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    swap_stream = SimpleNamespace(record_compute=lambda: said.append("computed"))
    monkeypatch.setattr(executor._worker.runner._kv_cache, "swap_stream", swap_stream)

    def fail(*_: object) -> None:
        said.append("half of it")
        raise ValueError("no memory")

    monkeypatch.setattr(executor._worker.runner._attention, "prepare", fail)
    with pytest.raises(ValueError, match="no memory"):
        executor.execute_model(make_step(0, [Sequence(make_output(0, [5, 6]), wanted=3).chunk(40)]))
    assert said == ["half of it", "computed"]


def test_masks_of_known_tokens_are_filled_while_the_model_computes_and_others_when_their_token_is_there(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[list[int]] = []
    prepare = executor._worker.sampler.prepare

    def watched(draws: list[Draw]) -> object:
        begun.append([draw.number for draw in draws])
        return prepare(draws)

    monkeypatch.setattr(executor._worker.sampler, "prepare", watched)
    grammar = ModuloGrammar(3, VOCAB_SIZE)
    outputs = [make_output(0, [5, 6], grammar=grammar), make_output(1, [7, 8], grammar=grammar), make_output(2, [9])]
    one, two, three = (Sequence(output, wanted=9) for output in outputs)
    first = executor.execute_model_async(make_step(0, [one.chunk(40)]))
    assert begun == [[0]]
    first.sample_tokens()
    one.pending = True
    second = executor.execute_model_async(make_step(1, [one.chunk(40), two.chunk(40), three.chunk(40)]))
    assert begun == [[0], [1]]
    outputs[0].token_ids.append(first.get_output().token_ids[0])
    second.sample_tokens()
    assert begun == [[0], [1], [0, 2]]
    made = second.get_output().token_ids
    assert len(made) == 3
    assert grammar.allows(one.output, made[0])
    assert grammar.allows([], made[1])


@pytest.mark.parametrize(("asked", "depth"), [(None, 1), (False, 1), (True, 2)])
def test_on_the_cpu_steps_overlap_only_on_request(small_models: SmallModels, asked: bool | None, depth: int) -> None:
    executor = load(small_models.folder("llama3"), asked)
    assert executor.depth == depth
    executor.close()


@pytest.mark.parametrize("asked", [None, True])
@pytest.mark.parametrize(
    ("name", "settings", "waits"),
    [
        ("llama3", {}, False),
        ("mixtral", {"quantization": "int8"}, False),
        ("mixtral", {"quantization": "int8", "experts": None}, True),
        ("mixtral", {"tensor_parallel_size": 2, "all2all_backend": "alltoall"}, True),
    ],
)
def test_on_a_gpu_steps_overlap_unless_the_host_waits_for_each_layer(
    small_models: SmallModels,
    monkeypatch: pytest.MonkeyPatch,
    asked: bool | None,
    name: str,
    settings: dict[str, Any],
    waits: bool,
) -> None:
    """Then a step is launched when nearly all of it is computed, and the results of the one before would come late."""

    def on_a_gpu(config: EngineArgs, model: LoadedModel) -> int:
        depths.append(depth(config, replace(model, device=torch.device("cuda"))))
        return 1

    depths, depth = list[int](), torch_executor._depth
    monkeypatch.setattr(torch_executor, "_depth", on_a_gpu)
    if "experts" in settings:
        monkeypatch.setattr(ExpertsKernel, "of", lambda *_args, **_options: None)
    settings = {key: value for key, value in settings.items() if key != "experts"}
    load(small_models.folder(name), asked, **settings).close()
    assert depths == [1 if waits and not asked else 2]


# Through the whole engine


UNLIMITED = 1 << 20
PRESSURES = {"no pressure": (200, 0), "recompute": (18, 0), "swap": (18, 200)}


@pytest.mark.parametrize(("pressure", "chunk"), [("no pressure", UNLIMITED), ("recompute", 64), ("swap", 7)])
@pytest.mark.parametrize("model_name", ["llama3", "qwen2-yarn"])
def test_the_engine_with_overlap_makes_transformers_own_tokens(
    small_models: SmallModels, model_name: str, pressure: str, chunk: int
) -> None:
    folder, (device, host) = small_models.folder(model_name), PRESSURES[pressure]
    executor = load_engine(folder, tight(folder, device), host, async_scheduling=True)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    prompts = small_models.prompts
    made = run_engine(executor, prompts, [params] * len(prompts), chunk=chunk, max_num_seqs=8)
    executor.close()
    assert made.outputs == small_models.outputs(model_name)
    assert (made.statistics.preemptions_by_recompute > 0) == (pressure == "recompute")
    assert (made.statistics.preemptions_by_swap > 0) == (pressure == "swap")


@pytest.mark.parametrize("pressure", ["no pressure", "swap"])
def test_the_engine_makes_the_same_of_any_parameters_with_overlap_and_without(
    small_models: SmallModels, pressure: str
) -> None:
    prompts = small_models.prompts[:14]
    styles: list[dict[str, object]] = [
        {"n": 2, "temperature": 1.2, "logprobs": 2},
        {"temperature": 0, "repetition_penalty": 1.3, "prompt_logprobs": 2},
        {"temperature": 1.0, "top_k": 9, "max_tokens": 1},
        {"temperature": 0, "n": 3, "beam_width": 3},
        {"temperature": 0},
        {"temperature": 1.5, "min_tokens": 5},
        {"temperature": 1.0, "bad_words": ((7,), (9, 11)), "frequency_penalty": 0.5},
    ]
    params = [
        SamplingParams(seed=index, **{"max_tokens": 20} | styles[index % len(styles)]) for index in range(len(prompts))
    ]
    grammars = [ModuloGrammar(3, VOCAB_SIZE) if index % 7 in (4, 5) else None for index in range(len(prompts))]
    runs = []
    for overlaps in (False, True):
        executor = load_engine(small_models.folder("qwen3"), *PRESSURES[pressure], async_scheduling=overlaps)
        runs.append(run_engine(executor, prompts, params, chunk=64, grammars=grammars, max_num_seqs=8))
        executor.close()
    one_by_one, overlapped = runs
    for choices, expected in zip(overlapped.choices, one_by_one.choices, strict=True):
        for choice, oracle in zip(choices, expected, strict=True):
            assert (choice.token_ids, choice.finish_reason) == (oracle.token_ids, oracle.finish_reason)
            assert_equal(choice.logprobs, oracle.logprobs)
    for told, oracle in zip(overlapped.prompt_logprobs, one_by_one.prompt_logprobs, strict=True):
        assert_equal(told, oracle)


def test_a_token_that_nothing_drew_is_not_computed_with(executor: TorchExecutor) -> None:
    with pytest.raises(IndexError, match="vocabulary"):
        executor.execute_model(make_step(0, [KnownChunk(0, [PENDING - 1], 0, [1], ())]))
