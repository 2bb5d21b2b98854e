"""Layers without keys and values keep states: forks have their own, a step that is run again goes on from what it began
with, requests begin at checkpoints, and nothing is computed that would be taken back.
"""

import random
from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch
from quire_engine.config import PreemptionPolicy
from quire_engine.errors import ModelError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_proto.sampling import SamplingParams

from tests.model import engine
from tests.model.models import VOCAB_SIZE, SmallModels, greedy_oracle
from tests.support.executors import load_executor

NAMES = ("qwen3.5", "lfm2")
TOKENS = 24
CHECKPOINT_TOKENS = 48  # three KV blocks
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def executors(small_models: SmallModels) -> dict[str, TorchExecutor]:
    return {name: load(small_models, name, 200, 0) for name in NAMES}


def load(small_models: SmallModels, name: str, device_blocks: int, host_blocks: int) -> TorchExecutor:
    folder = small_models.folder(name)
    return engine.load(folder, device_blocks, host_blocks, checkpoint_tokens=CHECKPOINT_TOKENS)


@pytest.mark.parametrize("name", NAMES)
def test_forks_of_a_prompt_go_on_from_its_state_each_on_its_own(
    small_models: SmallModels, executors: dict[str, TorchExecutor], name: str
) -> None:
    prompts, expected = small_models.prompts[2:4], small_models.outputs(name, range(2, 4), TOKENS)
    params = SamplingParams(temperature=0, n=3, max_tokens=TOKENS, ignore_eos=True)
    made = engine.run(executors[name], prompts, [params] * len(prompts), chunk=7)
    assert [[choice.token_ids for choice in each] for each in made.choices] == [[one] * 3 for one in expected]


@pytest.fixture(scope="module")
def long_prompts() -> list[list[int]]:
    """Prompts that have 2 checkpoints in common, or 1, or none."""
    generator = random.Random(1)

    def some(count: int) -> list[int]:
        return [generator.randrange(3, VOCAB_SIZE) for _ in range(count)]

    shared = some(110)
    return [shared[:length] + some(generator.randint(1, 40)) for length in (110, 100, 60, 47, 110, 96, 110)]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_begin_at_checkpoints_that_they_have_in_common(
    small_models: SmallModels, executors: dict[str, TorchExecutor], long_prompts: list[list[int]], name: str
) -> None:
    made = engine.run(executors[name], long_prompts, [GREEDY] * len(long_prompts), chunk=64, max_num_seqs=1)
    assert made.outputs == greedy_oracle(small_models.folder(name), long_prompts, TOKENS)
    assert made.statistics.prefix_device_tokens == sum((0, 96, 48, 0, 96, 96, 96))


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("name", NAMES)
def test_preempted_sequences_go_on_from_their_state_or_from_a_checkpoint(
    small_models: SmallModels, long_prompts: list[list[int]], name: str, mode: PreemptionPolicy
) -> None:
    """The chunks end within blocks of every kind. Prefixes also come back from the host."""
    executor, params = load(small_models, name, 22, 200), SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    prompts = [prompt[-90:] for prompt in long_prompts]
    made = engine.run(
        executor, prompts * 2, [params] * len(prompts) * 2, chunk=37, max_num_seqs=4, preemption_mode=mode
    )
    assert made.outputs == greedy_oracle(small_models.folder(name), prompts, 70) * 2
    counted = made.statistics
    assert counted.preemptions_by_swap + counted.preemptions_by_recompute > 2
    assert (counted.preemptions_by_swap > 0) == (mode == "swap")
    assert counted.prefix_hit_tokens > 0
    executor.close()


@pytest.mark.parametrize("place", ["in a layer", "behind all layers"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_failed_is_run_again_from_the_states_that_it_began_with(
    small_models: SmallModels,
    executors: dict[str, TorchExecutor],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    place: str,
) -> None:
    """Every fifth step fails, and then its sequences are run one by one."""
    executor, calls = executors[name], iter(range(1 << 30))
    runner = executor._worker.runner
    model = runner._model
    # Behind the first layer with a state.
    where, attribute = (model._decoder.layers[1], "forward") if place == "in a layer" else (runner, "logits")
    known = getattr(where, attribute)

    def failing(*arguments: object, **options: object) -> object:
        if next(calls) % 5 == 4:
            raise RuntimeError("no memory")
        return known(*arguments, **options)

    monkeypatch.setattr(where, attribute, failing)
    prompts = small_models.prompts[:4]
    made = engine.run(executor, prompts, [GREEDY] * len(prompts), chunk=7, max_num_seqs=4)
    assert made.outputs == small_models.outputs(name, range(4), TOKENS)
    assert next(calls) > 30


def test_a_sequence_whose_state_is_lost_ends_and_no_other(
    small_models: SmallModels, executors: dict[str, TorchExecutor]
) -> None:
    from tests.support.steps import KnownChunk, prepare

    runner, tokens = executors["lfm2"]._worker.runner, small_models.prompts[9][:4]

    def forward(*chunks: tuple[int, list[int], int, int]) -> torch.Tensor:
        """Of sequences with a block and a state of the same number."""
        known = [KnownChunk(id, part, start, [block], other_block_ids=[[block]]) for id, part, start, block in chunks]
        batch = prepare(known, engine.BLOCK_SIZE, state_block_size=CHECKPOINT_TOKENS)
        with torch.inference_mode():
            return runner.forward(batch.model_input).clone()

    forward((0, tokens, 0, 1), (1, tokens, 0, 2))
    with pytest.raises(RuntimeError, match="block 1 has the state after 4 tokens, and not after 3"):
        forward((0, tokens[:1], 3, 1), (1, tokens[:1], 4, 2))
    assert len(forward((1, tokens[:1], 4, 2))) == 1


def test_an_engine_that_has_slept_begins_without_states(
    small_models: SmallModels, executors: dict[str, TorchExecutor], long_prompts: list[list[int]]
) -> None:
    executor, expected = executors["lfm2"], greedy_oracle(small_models.folder("lfm2"), long_prompts[:2], TOKENS)
    rows = executor._worker.runner._kv_cache.states.rows
    for _ in range(2):
        assert engine.run(executor, long_prompts[:2], [GREEDY] * 2, chunk=64).outputs == expected
        used = rows.count_nonzero()
        executor.sleep()
        executor.wake_up()
        assert rows.count_nonzero() < min(used, PAGESIZE)  # what is left is in a page with others


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"speculative_method": "ngram"}, "--speculative"),
        ({"async_scheduling": True}, "--async"),
        ({"kv_disk_path": Path("disk"), "kv_disk_space": 1.0}, "--kv-disk-path"),
    ],
)
def test_what_states_cannot_follow_is_refused(
    small_models: SmallModels, settings: dict[str, object], flag: str
) -> None:
    with pytest.raises(ModelError, match=f"{flag}.* is for models whose layers keep no state"):
        load_executor(small_models.folder("lfm2"), kv_cache_memory=1 << 20, swap_bytes=0, **settings)
