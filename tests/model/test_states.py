"""States of layers without keys and values lie in blocks: forks have their own, a step that is run again goes on from
what it began with, and nothing is computed that would be taken back.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.attention.base import AttentionBatch
from quire_engine.errors import ModelError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.models.transformers_state import pieces_of
from quire_engine.worker.memory import GROWTH_RESERVE, MemoryProfile, MemoryProfiler
from quire_proto.sampling import SamplingParams

from tests.model import engine
from tests.model.models import STATES, SmallModels
from tests.support.executors import load_executor

NAMES = ("qwen3.5", "lfm2")
TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def executors(small_models: SmallModels) -> dict[str, TorchExecutor]:
    return {name: engine.load(small_models.folder(name), 200, 0) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_forks_of_a_prompt_go_on_from_its_state_each_on_its_own(
    small_models: SmallModels, executors: dict[str, TorchExecutor], name: str
) -> None:
    prompts, expected = small_models.prompts[2:4], small_models.outputs(name, range(2, 4), TOKENS)
    params = SamplingParams(temperature=0, n=3, max_tokens=TOKENS, ignore_eos=True)
    made = engine.run(executors[name], prompts, [params] * len(prompts), chunk=7)
    assert [[choice.token_ids for choice in each] for each in made.choices] == [[one] * 3 for one in expected]


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

    def forward(chunks: list[KnownChunk]) -> torch.Tensor:
        with torch.inference_mode():
            return runner.forward(prepare(chunks, engine.BLOCK_SIZE).model_input).clone()

    forward([KnownChunk(0, tokens, 0, [1]), KnownChunk(1, tokens, 0, [2])])
    with torch.inference_mode():
        runner._kv_cache.layers[-1].pages[1].zero_()
    with pytest.raises(RuntimeError, match="block 1 has the state behind 0 tokens, and not behind 4"):
        forward([KnownChunk(0, tokens[:1], 4, [1]), KnownChunk(1, tokens[:1], 4, [2])])
    assert len(forward([KnownChunk(1, tokens[:1], 4, [2])])) == 1


@pytest.mark.parametrize(
    ("settings", "flag"), [({"speculative_method": "ngram"}, "--speculative"), ({"async_scheduling": True}, "--async")]
)
def test_what_would_compute_tokens_that_are_taken_back_is_refused(
    small_models: SmallModels, settings: dict[str, object], flag: str
) -> None:
    with pytest.raises(ModelError, match=f"{flag}.* is for models whose layers keep no state"):
        load_executor(small_models.folder("lfm2"), kv_cache_memory=1 << 20, swap_bytes=0, **settings)


@given(
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=4),
)
def test_pieces_are_the_tokens_of_a_step_cut_where_blocks_end(size: int, chunks: list[tuple[int, int]]) -> None:
    contexts = [tokens + past for tokens, past in chunks]
    counts = [-(-context // size) for context in contexts]
    batch = AttentionBatch(
        query_indptr=torch.tensor([0, *(tokens for tokens, _ in chunks)]).cumsum(0).int(),
        page_indptr=torch.tensor([0, *counts]).cumsum(0).int(),
        page_ids=torch.arange(100, 100 + sum(counts)).int(),
        last_page_len=torch.zeros(len(chunks)).int(),
        context_lens=torch.tensor(contexts).int(),
        positions=torch.zeros(0).int(),
    )
    pieces = pieces_of(batch, size)
    assert [token for piece in pieces for token in range(piece.start, piece.end)] == list(
        range(sum(tokens for tokens, _ in chunks))
    )
    first_page = dict(enumerate(batch.page_indptr.tolist()))
    for piece in pieces:
        end = contexts[piece.chunk] - (int(batch.query_indptr[piece.chunk + 1]) - piece.end)
        assert piece.seen == end
        assert piece.block == 100 + first_page[piece.chunk] + (end - 1) // size
        assert (end - (piece.end - piece.start)) // size == (end - 1) // size
        assert end % size == 0 or piece.end == int(batch.query_indptr[piece.chunk + 1])


def test_what_steps_keep_of_states_is_kept_free(small_models: SmallModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each sequence the state that it begins with, in the step and until the next."""
    profiles: list[MemoryProfile] = []
    profile = MemoryProfiler.profile

    def recorded(self: MemoryProfiler, *arguments: Any) -> MemoryProfile:
        profiles.append(profile(self, *arguments))
        return profiles[-1]

    monkeypatch.setattr(MemoryProfiler, "profile", recorded)
    for name in ("qwen3.5", "gemma3"):
        load_executor(small_models.folder(name), kv_cache_memory=1 << 20, swap_bytes=0, max_num_seqs=100)
    kept = [profile.growth_reserve - GROWTH_RESERVE for profile in profiles]
    assert STATES["qwen3.5"] - 16 < kept[0] / 200 <= STATES["qwen3.5"]
    assert kept[1] == 0


def test_a_block_of_a_model_without_a_state_has_none(small_models: SmallModels) -> None:
    executor = load_executor(small_models.folder("gemma3"), kv_cache_memory=1 << 20, swap_bytes=0)
    assert executor._worker.runner._model.state_bytes == 0
    assert len(executor._worker.runner._kv_cache.layers) == 2
