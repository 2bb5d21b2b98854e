"""A step reads the states that its chunks begin with and never overwrites them, so that it can run again."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.attention.state_cache import StateCache, StateChunks
from quire_engine.core.block_pool import BlockCopy, PoolCopies, StateCacheConfig

from tests.support.paged_executor import PagedStates
from tests.support.steps import KnownChunk

MAX_SEQS = 3
BLOCKS_A_SEQUENCE = 12


def cache(size: int, num_blocks: int = 40, spares: int = 8) -> StateCache:
    return StateCache(torch.zeros(num_blocks + spares, 1), torch.zeros(4, 1), num_blocks, size)


def chunks(size: int, *spans: tuple[int, int], first_block: int = 1) -> StateChunks:
    """Chunks (start, end) of sequences with blocks of their own, the first of which are from ``first_block`` on."""
    counts = [-(-end // size) - max(0, start - 1) // size for start, end in spans]
    indptr = [0, *accumulate(counts)]
    return StateChunks(
        starts=np.array([start for start, _ in spans]),
        query_indptr=np.array([0, *accumulate(end - start for start, end in spans)]),
        blocks=np.arange(first_block, first_block + indptr[-1]),
        indptr=np.array(indptr),
    )


@given(st.integers(1, 7), st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_the_tokens_of_a_step_are_cut_only_where_blocks_end(size: int, lengths: list[int]) -> None:
    """They are computed once each, and those of a chunk in order."""
    states = cache(size, 100)
    runs, written = states.begin_step(chunks(size, *[(0, length) for length in lengths]))
    bounds = [0, *accumulate(lengths)]
    computed = [0] * len(lengths)
    for run in runs:
        tokens = list(range(bounds[-1])[run.tokens] if isinstance(run.tokens, slice) else run.tokens.tolist())
        for first in tokens[:: run.length]:
            chunk = next(number for number, end in enumerate(bounds[1:]) if first < end)
            start = first - bounds[chunk]
            assert computed[chunk] == start
            assert (start > 0) == (run.read is not None)
            assert start // size == (start + run.length - 1) // size
            computed[chunk] += run.length
    assert computed == lengths
    assert len(written.blocks) == sum(-(-length // size) for length in lengths)


def test_a_long_prompt_takes_a_run_for_each_checkpoint_and_decoding_takes_one() -> None:
    states = cache(512)
    (*runs, _), _ = states.begin_step(chunks(512, (0, 2048)))
    assert [run.length for run in runs] == [512] * 3
    assert [run.tokens for run in runs] == [slice(0, 512), slice(512, 1024), slice(1024, 1536)]
    spans = [(100, 101), (7, 8), (300, 301)]
    for number, (start, _) in enumerate(spans):
        states.end_step(states.begin_step(chunks(512, (0, start), first_block=5 + number))[1])
    (run,), _ = states.begin_step(chunks(512, *spans, first_block=5))
    assert run.tokens == slice(0, 3)
    assert run.read is not None
    assert not set(run.read.tolist()) & set(run.write.tolist())


@given(st.integers(1, 6), st.data())
def test_steps_that_failed_run_again_chunk_by_chunk(size: int, data: st.DataObject) -> None:
    """No chunk begins with another state than that of its tokens: ``PagedStates`` checks it. There are more sequences
    than may run at once; some end, and others take their blocks.
    """
    states = PagedStates(StateCacheConfig(size, 1 + 5 * BLOCKS_A_SEQUENCE, 4, 1, MAX_SEQS))
    lengths = [0] * 5
    tokens = [[number] * size * BLOCKS_A_SEQUENCE for number in range(5)]
    tables = [[1 + number * BLOCKS_A_SEQUENCE + index for index in range(BLOCKS_A_SEQUENCE)] for number in range(5)]
    for _ in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=MAX_SEQS, unique=True))
        step: list[KnownChunk] = []
        for number in chosen:
            start, most = lengths[number], len(tokens[number])
            end = data.draw(st.integers(start + 1, min(start + 3 * size, most))) if start < most else 0
            if not end or data.draw(st.integers(0, 9)) == 0:  # ends, and the next one begins
                lengths[number], tokens[number] = 0, [each + 5 for each in tokens[number]]
                continue
            step.append(KnownChunk(number, tokens[number][start:end], start, tables[number], known=tokens[number]))
        if step:
            states.compute(step)
        if data.draw(st.booleans()):
            for chunk in step:
                states.compute([chunk])
        for chunk in step:
            lengths[chunk.sequence_id] = chunk.end


def test_a_copy_is_of_the_last_state_and_goes_where_the_block_is() -> None:
    states = PagedStates(StateCacheConfig(4, 8, 4, 1, 2))
    known = [1, 2, 3, 4, 5]
    states.compute([KnownChunk(0, [1], 0, [5], known=known)])
    states.compute([KnownChunk(0, [2], 1, [5], known=known)])  # in another row
    states.copy(PoolCopies([BlockCopy(5, 0)], [BlockCopy(5, 6)], [BlockCopy(0, 7)]))
    for block in (5, 6, 7):
        states.compute([KnownChunk(0, [3], 2, [block], known=known)])
    with pytest.raises(RuntimeError, match="block 6 has the state after 3 tokens, and not after 1"):
        states.compute([KnownChunk(0, [2], 1, [6], known=known)])
    states.cache.forget()
    with pytest.raises(RuntimeError, match="block 5 has the state after -1 tokens, and not after 3"):
        states.compute([KnownChunk(0, [4], 3, [5], known=known)])
