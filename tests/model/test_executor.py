"""The executor keeps its contract: swaps, errors of one request, steps with nothing in them, draws that repeat."""

from pathlib import Path

import pytest
import torch
from quire_engine.core.block_pool import BlockCopies, BlockCopy
from quire_engine.core.executor import CopyError
from quire_engine.core.step import SampleRequest
from quire_engine.executor.torch_executor import TorchExecutor
from quire_proto.errors import ErrorCode
from quire_proto.sampling import SamplingParams
from safetensors.torch import load_file, save_file

from tests.model.driver import GREEDY, Driver, Sequence
from tests.model.models import SmallModels, small_model
from tests.support.executors import load_executor
from tests.support.steps import KnownChunk, execute, make_step

POOL = 2 << 20


@pytest.fixture
def executor(small_models: SmallModels) -> TorchExecutor:
    return load_executor(small_models.folder("llama3"), kv_cache_memory=POOL, swap_bytes=POOL)


def chunk(tokens: list[int], blocks: list[int], id: int = 0, sampling: SamplingParams | None = GREEDY) -> KnownChunk:
    return KnownChunk(id, tokens, 0, blocks, () if sampling is None else sample_requests(tokens))


def sample_requests(tokens: list[int]) -> tuple[SampleRequest, ...]:
    return (SampleRequest(GREEDY, 0, len(tokens)),)


def test_a_step_with_nothing_in_it_makes_nothing(executor: TorchExecutor) -> None:
    model_output = executor.execute_model(make_step(0))
    assert (model_output.token_ids, model_output.errors) == ([], {})


def test_a_chunk_without_tokens_is_no_step(executor: TorchExecutor) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        executor.execute_model(make_step(0, [chunk([], [], id=1), chunk([5], [1], id=2)]))


def test_a_step_that_samples_nothing_still_stores_its_keys(executor: TorchExecutor) -> None:
    whole = executor.execute_model(make_step(0, [chunk([9, 8, 7, 6], [1])])).token_ids
    assert executor.execute_model(make_step(1, [chunk([9, 8, 7], [2], sampling=None)])).token_ids == []
    assert (
        executor.execute_model(make_step(2, [KnownChunk(0, [6], 3, [2], sample_requests([9, 8, 7, 6]))])).token_ids
        == whole
    )


def test_every_part_of_a_step_is_timed(executor: TorchExecutor) -> None:
    timings = executor.execute_model(make_step(0, [chunk([5], [1])], copies=BlockCopies([BlockCopy(2, 0)]))).timings
    assert min(timings.swap, timings.forward, timings.sample) > 0


@pytest.mark.parametrize("copy", [BlockCopy(-1, 0), BlockCopy(1, -1), BlockCopy(1 << 20, 0), BlockCopy(1, 1 << 20)])
@pytest.mark.parametrize("direction", ["blocks_to_swap_out", "blocks_to_swap_in"])
def test_a_copy_of_a_block_that_does_not_exist_ends_the_engine(
    executor: TorchExecutor, copy: BlockCopy, direction: str
) -> None:
    with pytest.raises(CopyError):
        executor.execute_model(make_step(0, copies=BlockCopies(**{direction: [copy]})))


def test_blocks_come_back_from_the_host_as_they_went(executor: TorchExecutor) -> None:
    tokens = list(range(3, 40))
    expected = executor.execute_model(make_step(0, [chunk(tokens, [1, 2, 3])])).token_ids
    executor.execute_model(make_step(1, [chunk(tokens[:-1], [4, 5, 6], sampling=None)]))
    out = BlockCopies([BlockCopy(4, 9), BlockCopy(5, 0), BlockCopy(6, 4)])
    executor.execute_model(make_step(2, copies=out))
    executor.execute_model(make_step(3, [chunk([50] * 48, [4, 5, 6])]))
    last = KnownChunk(0, tokens[-1:], len(tokens) - 1, [5, 6, 4], sample_requests(tokens))
    into = BlockCopies(blocks_to_swap_in=[BlockCopy(9, 5), BlockCopy(0, 6), BlockCopy(4, 4)])
    scheduler_output = make_step(4, [last], into)
    assert executor.execute_model(scheduler_output).token_ids == expected


def test_a_failed_step_can_be_run_again_chunk_by_chunk(executor: TorchExecutor) -> None:
    good, bad = chunk([5, 6], [1], id=1), chunk([999], [2], id=2)
    expected = executor.execute_model(make_step(0, [good])).token_ids
    with pytest.raises(IndexError):
        executor.execute_model(make_step(1, [good, bad]))
    assert executor.execute_model(make_step(1, [good])).token_ids == expected
    with pytest.raises(IndexError):
        executor.execute_model(make_step(1, [bad]))


def test_a_request_whose_numbers_are_not_finite_ends_alone(tmp_path: Path) -> None:
    folder = small_model("llama2", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    executor = load_executor(folder, kv_cache_memory=POOL, swap_bytes=0)
    alone = executor.execute_model(make_step(0, [chunk([5, 6], [1])])).token_ids[0]
    model_output = execute(executor, make_step(1, [chunk([5, 7], [2], id=1), chunk([5, 6], [3], id=2)]))
    assert model_output.token_ids == {2: alone}
    assert model_output.errors[1].code == ErrorCode.INTERNAL
    # The blocks that hold its keys are used again by others, who see only what they wrote themselves.
    assert executor.execute_model(make_step(2, [chunk([5, 6], [2])])).token_ids == [alone]


def test_sampled_output_is_the_same_alone_and_among_others(small_models: SmallModels) -> None:
    executor = load_executor(small_models.folder("qwen2"), kv_cache_memory=2 * POOL, swap_bytes=POOL)

    def sequences() -> list[Sequence]:
        styles = [
            {},
            {"top_k": 5},
            {"top_p": 0.8},
            {"temperature": 0.0},
            {"temperature": 2.0, "top_k": 60, "top_p": 0.9},
            {"temperature": 1.5, "min_p": 0.02, "repetition_penalty": 1.3},
            {"temperature": 0.0, "frequency_penalty": 1.0, "logit_bias": ((7, 3.0),), "bad_words": ((7, 7),)},
        ]
        return [
            Sequence(index, prompt, 24, SamplingParams(seed=index // 2 << 40, **styles[index % len(styles)]))
            for index, prompt in enumerate(small_models.prompts[:14])
        ]

    alone = [Driver(executor, seed=2, max_chunk=50, swapping=0).run([one])[0] for one in sequences()]
    assert Driver(executor, seed=3, max_chunk=9).run(sequences()) == alone


def test_nothing_can_be_run_after_close(executor: TorchExecutor) -> None:
    executor.close()
    with pytest.raises(AttributeError):
        executor.execute_model(make_step(0, [chunk([5], [1])]))
