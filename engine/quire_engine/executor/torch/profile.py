"""Steps that an executor is measured with: the largest that it will have to run, and short ones that are timed. Knows
executors as a scheduler does, through plans.
"""

import math
from collections.abc import Callable, Iterator
from time import perf_counter

from quire_proto.sampling import MAX_LOGPROBS, SamplingParams

from quire_engine.executor.base import Executor
from quire_engine.kv.copy import BlockCopy
from quire_engine.scheduling.plan import SampleRequest, ScheduledChunk, SchedulerOutput
from quire_engine.scheduling.rates import Rates

# What costs most to draw: everything that needs more than the logits.
COSTLIEST_PARAMS = SamplingParams(
    top_p=0.9, top_k=1 << 20, min_p=0.01, frequency_penalty=0.1, repetition_penalty=1.1, logprobs=MAX_LOGPROBS
)
# Log-probabilities of prompts are made in pieces, of which none has more tokens.
PROMPT_LOGPROB_TOKENS = 256
TIMED_TOKENS = 256
TIMED_COPY_BYTES = 8 << 20
TRIES, MAX_SECONDS = 5, 0.2


def largest_step(
    max_num_batched_tokens: int, max_num_seqs: int, length: int, block_size: int, vocab: int
) -> SchedulerOutput:
    """As many tokens and as many sequences as a step can have, each drawing a token and with log-probabilities of the
    prompt. ``length`` is the longest sequence. All tokens lie in block 1, so that a pool of two blocks is enough.
    """
    sizes = _sizes(max_num_batched_tokens, max_num_seqs, length)
    return SchedulerOutput(0, [_chunk(number, size, block_size, vocab) for number, size in enumerate(sizes)])


def measure_rates(executor: Executor, longest: int, vocab: int) -> Rates:
    """How fast ``executor`` computes a prompt, of at most ``longest`` tokens, and copies blocks. Takes a fraction of a
    second unless one step takes longer. What is in the blocks afterwards means nothing.
    """
    size = executor.kv_cache_config.block_size
    tokens = min(TIMED_TOKENS, longest, executor.kv_cache_config.usable_tokens)
    prompt = ScheduledChunk(0, _tokens(tokens, vocab), 0, list(range(1, -(-tokens // size) + 1)))
    seconds = _min_seconds(lambda: executor.execute_model(SchedulerOutput(0, [prompt])))
    return Rates(tokens / seconds, _bytes_per_second(executor))


def _bytes_per_second(executor: Executor) -> float:
    """Infinite where there is no host pool, and nothing to copy."""
    capacity = executor.kv_cache_config
    wanted = max(1, TIMED_COPY_BYTES // capacity.block_bytes)
    blocks = min(wanted, capacity.host_blocks, capacity.device_blocks - 1)
    if blocks == 0:
        return math.inf
    out = [BlockCopy(1 + number, number) for number in range(blocks)]
    into = [BlockCopy(number, 1 + number) for number in range(blocks)]
    seconds = _min_seconds(
        lambda: executor.execute_model(SchedulerOutput(0, blocks_to_swap_out=out, blocks_to_swap_in=into))
    )
    return 2 * blocks * capacity.block_bytes / seconds


def _min_seconds(work: Callable[[], object]) -> float:
    """The least time of a few tries: whatever disturbs a try only makes it longer."""
    begin, best = perf_counter(), math.inf
    for _ in range(TRIES):
        start = perf_counter()
        work()
        best = min(best, perf_counter() - start)
        if perf_counter() - begin > MAX_SECONDS:
            break
    return best


def _sizes(max_num_batched_tokens: int, max_num_seqs: int, length: int) -> Iterator[int]:
    """Tokens of each sequence: long ones first, and at least one for each of the others."""
    left = max_num_batched_tokens
    for others in reversed(range(min(max_num_seqs, max_num_batched_tokens))):
        yield (size := min(length, left - others))
        left -= size


def _chunk(number: int, size: int, block_size: int, vocab: int) -> ScheduledChunk:
    tokens = _tokens(size, vocab)
    draw = SampleRequest(number, COSTLIEST_PARAMS, number, tokens, len(tokens))
    blocks = [1] * -(-size // block_size)
    return ScheduledChunk(
        number,
        tokens,
        0,
        blocks,
        (draw,),
        prompt_logprob_targets=tokens[1 : PROMPT_LOGPROB_TOKENS + 1],
        num_prompt_logprobs=MAX_LOGPROBS,
    )


def _tokens(count: int, vocab: int) -> list[int]:
    """Tokens from all over the vocabulary, so that all experts of a model have some."""
    return [place * 7919 % vocab for place in range(count)]
