"""``SimulatedExecutor``: executes steps without a model. A formula, ``LatencyModel``, says how long a step takes.
Tokens and log-probabilities are a pure function of a seed and a position, so that runs are reproducible. Needs no
torch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import log1p

from quire_proto.sampling import TokenLogprobs

from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.executor import Rates
from quire_engine.core.kv_transfer.transfer import DiskContents, TransferResult
from quire_engine.core.step import (
    BeamCandidates,
    ModelOutput,
    SampleRequest,
    ScheduledChunk,
    SchedulerOutput,
    StepTimings,
)
from quire_engine.simulation.simulated_disk import SimulatedDisk

VOCAB_SIZE = 32_000
Ranking = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """The roofline of a step: each part takes as long as the slower of computing and reading memory.

    ``tokens_per_second``: tokens that the linear layers compute when many share a step. ``weights_seconds``: reading
    all weights once, the least time of a step that computes. ``context_seconds``: reading the keys and values of one
    token of context. ``pair_seconds``: computing the attention of one token to one token of its context.
    ``draw_seconds``: the logits and the sampling of one token. ``overhead_seconds``: all other costs of a step.
    ``bytes_per_second``: copying blocks between the pools, one way. ``jitter``: the fraction by which a step may be
    longer or shorter. ``disk_bytes_per_second``: reading or writing blocks on disk, parallel to the steps.
    """

    tokens_per_second: float
    weights_seconds: float
    context_seconds: float
    pair_seconds: float
    draw_seconds: float
    overhead_seconds: float
    bytes_per_second: float
    jitter: float = 0.0
    disk_bytes_per_second: float = 2e9

    def __post_init__(self) -> None:
        if min(self.tokens_per_second, self.bytes_per_second, self.disk_bytes_per_second) <= 0:
            raise ValueError("tokens_per_second, bytes_per_second and disk_bytes_per_second must be above 0.")
        if not 0 <= self.jitter < 1:
            raise ValueError("jitter must be at least 0 and below 1.")
        for field in fields(self):
            if not 0 <= getattr(self, field.name) < float("inf"):
                raise ValueError(f"{field.name} must be at least 0 and finite.")

    @property
    def rates(self) -> Rates:
        """The rates that an engine would measure at its start."""
        return Rates(self.tokens_per_second, self.bytes_per_second)

    def empty_disk(self, num_blocks: int, block_bytes: int) -> DiskContents | None:
        """Returns an empty disk, as an executor would open it; None if ``num_blocks`` is 0."""
        block_seconds = block_bytes / self.disk_bytes_per_second
        disk = DiskContents(num_blocks, block_seconds=block_seconds, block_bytes=block_bytes)
        return disk if num_blocks else None

    def timings(self, scheduler_output: SchedulerOutput, block_size: int, block_bytes: int) -> StepTimings:
        """Returns the seconds of each part of the step, before jitter and without the overhead. Blocks that are swapped
        ahead are copied during the forward pass.
        """
        return StepTimings(
            swap=scheduler_output.num_swapped_blocks * block_bytes / self.bytes_per_second
            + len(scheduler_output.copies.blocks_to_copy) * 2 * block_size * self.context_seconds,
            forward=max(
                self._forward(scheduler_output) if scheduler_output.rows else 0.0,
                len(scheduler_output.copies.blocks_to_swap_ahead) * block_bytes / self.bytes_per_second,
            ),
            sample=scheduler_output.total_num_draws * self.draw_seconds,
        )

    def _forward(self, scheduler_output: SchedulerOutput) -> float:
        linear = max(self.weights_seconds, scheduler_output.num_tokens / self.tokens_per_second)
        return linear + sum(map(self._attention, scheduler_output.starts, scheduler_output.lengths))

    def _attention(self, start: int, length: int) -> float:
        end = start + length
        pairs = length * (start + end + 1) / 2  # the first token attends to start + 1 tokens, the last to all
        return max(end * self.context_seconds, pairs * self.pair_seconds)


class SimulatedExecutor:
    """Samples tokens as a model might, and spends the time that a device would take with ``sleep(seconds)``: a virtual
    clock's, or ``time.sleep``.

    The next token depends only on the last token, its position and, unless greedy, the seed. Equal prompts with equal
    parameters thus have equal outputs, as with a model. Logits are not simulated, so parameters that change logits
    (penalties, biases, bad words, grammars) have no effect, except ``min_tokens``. With ``depth`` 2 it overlaps steps:
    the overhead of one passes while another is computed.

    With ``num_stages`` above 1 it is a pipeline of that many devices. Each has an equal part of the model and spends an
    equal part of a step's time; the first one samples the tokens. ``clock`` returns the time in seconds that passes in
    ``sleep``.
    """

    def __init__(
        self,
        capacity: KVCacheConfig,
        latency: LatencyModel,
        *,
        seed: int = 0,
        vocab_size: int = VOCAB_SIZE,
        depth: int = 1,
        num_stages: int = 1,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.depth = max(depth, num_stages)
        self._num_stages = num_stages
        self._stages_free = [0.0] * num_stages
        self._clock = clock
        self._capacity = capacity
        self._latency = latency
        self._seed = seed
        self._vocab_size = vocab_size
        self._sleep = sleep
        self._rows: dict[int, SimulatedRow] = {}
        self._disk = SimulatedDisk(capacity.block_bytes / latency.disk_bytes_per_second)

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """See ``Executor.kv_cache_config``."""
        return self._capacity

    @property
    def rates(self) -> Rates:
        """The rates of the latency model."""
        return self._latency.rates

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """See ``Executor.execute_model``. Never fails."""
        self._begin(scheduler_output)
        model_output = self.compute(scheduler_output)
        self.spend_time(scheduler_output, model_output)
        return model_output

    def execute_model_async(self, scheduler_output: SchedulerOutput) -> "SimulatedStep":
        """See ``AsyncExecutor.execute_model_async``. Never fails."""
        self._begin(scheduler_output)
        is_pipeline = self._num_stages > 1
        return SimulatedStep(self, scheduler_output, self._pass_stages(scheduler_output) if is_pipeline else None)

    def compute(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Returns the output of the step, without timings."""
        model_output, draw = ModelOutput([0] * scheduler_output.total_num_draws), 0
        for number, chunk in enumerate(scheduler_output.chunks):
            row = self._rows[chunk.row]
            if chunk.num_draws and not row.sample_requests:
                model_output.pooled[draw] = b""  # there are no hidden states
            for index in range(chunk.num_draws if row.sample_requests else 0):
                choice, position = index, chunk.end
                if chunk.draft_token_ids:
                    choice, position = 0, chunk.end - chunk.num_draft_tokens + index
                self._sample(row, choice, position, draw + index, model_output)
            if row.prompt_logprobs is not None and (scored := self._score(row, chunk)):
                model_output.prompt_logprobs[number] = scored
            if chunk.num_draws and row.sample_requests and not chunk.draft_token_ids:
                row.put(chunk.end, model_output.token_ids[draw])
            draw += chunk.num_draws
        return model_output

    def spend_time(
        self, scheduler_output: SchedulerOutput, model_output: ModelOutput, computed: float | None = None
    ) -> None:
        """Sleeps for the time of the step, and writes its timings into ``model_output``. In a pipeline, ``computed`` is
        when the last stage has computed the step.
        """
        timings, overhead = self._timings(scheduler_output)
        model_output.timings = timings
        if computed is not None:
            self._stages_free[0] = max(computed, self._stages_free[0]) + timings.sample
            self._sleep(max(0.0, self._stages_free[0] - self._clock()) + overhead)
            return
        device = timings.swap + timings.forward + timings.sample
        self._sleep(device + overhead if self.depth == 1 else max(device, overhead))

    def _begin(self, scheduler_output: SchedulerOutput) -> None:
        """Updates the rows, and starts the step's transfers to and from the disk, which run parallel to this and later
        steps.
        """
        for row in scheduler_output.freed_rows:
            self._rows.pop(row, None)
        for new in scheduler_output.new:
            token_ids = new.token_ids.tolist()
            self._rows[new.row] = SimulatedRow(token_ids, new.sample_requests, new.num_prompt_logprobs)
        changes = iter(scheduler_output.new_tokens)
        for row, index, token_id in zip(changes, changes, changes, strict=True):
            self._rows[row].put(index, token_id)
        self._disk.submit(scheduler_output.copies, self._clock())

    def _timings(self, scheduler_output: SchedulerOutput) -> tuple[StepTimings, float]:
        """Returns the seconds of each part of a step, and its overhead."""
        timings = self._latency.timings(scheduler_output, self._capacity.block_size, self._capacity.block_bytes)
        factor = 1 + self._latency.jitter * (2 * uniform(self._seed, scheduler_output.step) - 1)
        timings.swap *= factor
        timings.forward *= factor
        timings.sample *= factor
        return timings, self._latency.overhead_seconds * factor

    def _pass_stages(self, scheduler_output: SchedulerOutput) -> float:
        """Sends a step through the stages, each of which starts when it is free. Returns when the last one is done."""
        timings, _ = self._timings(scheduler_output)
        seconds, done = (timings.swap + timings.forward) / self._num_stages, self._clock()
        for stage, free in enumerate(self._stages_free):
            done = self._stages_free[stage] = max(done, free) + seconds
        return done

    def take_transfers(self, timeout: float) -> Sequence[TransferResult]:
        """See ``Executor.take_transfers``."""
        seconds = min(timeout, self._disk.seconds_to_next(self._clock()))
        if seconds > 0:
            self._sleep(seconds)
        return self._disk.take(self._clock())

    def remove_lora(self, lora_id: int) -> None:
        """Does nothing, because adapters have no memory here."""

    def close(self) -> None:
        """Does nothing, because nothing is allocated."""

    def _sample(self, row: "SimulatedRow", choice: int, position: int, draw: int, model_output: ModelOutput) -> None:
        request, last = row.sample_requests[choice], row.token_ids[position - 1]
        greedy = request.params.greedy or request.num_candidates > 0
        context_hash = splitmix(self._seed, position, last, 0 if greedy else request.seed + 1)
        is_early = position - request.num_prompt_tokens < request.params.min_tokens
        banned = request.stop_token_ids if is_early else frozenset[int]()
        if request.num_candidates:
            ranking = self._ranking(context_hash, request.num_candidates, banned)
            token_ids, logprobs = zip(*ranking, strict=True)
            model_output.candidates[draw] = BeamCandidates(list(token_ids), list(logprobs))
            return
        if not (banned or request.params.wants_logprobs):
            model_output.token_ids[draw] = context_hash % self._vocab_size
            return
        ranking = self._ranking(context_hash, max(1, request.params.logprobs or 0), banned)
        model_output.token_ids[draw] = ranking[0][0]
        if request.params.wants_logprobs:
            top = tuple(ranking[: request.params.logprobs or 0])
            model_output.logprobs[draw] = TokenLogprobs(ranking[0][1], top)

    def _ranking(self, context_hash: int, count: int, banned: frozenset[int]) -> Ranking:
        """Returns the ``count`` most probable tokens of a hashed context, or all of a smaller vocabulary, best
        first.
        """
        ranking: Ranking = []
        for offset in range(self._vocab_size):
            token_id = (context_hash + offset) % self._vocab_size
            if token_id not in banned:
                ranking.append((token_id, _logprob(context_hash, len(ranking))))
            if len(ranking) == count:
                break
        return ranking

    def _score(self, row: "SimulatedRow", chunk: ScheduledChunk) -> list[TokenLogprobs]:
        """Returns log-probabilities of the prompt tokens that follow the chunk's tokens."""
        ends = range(chunk.start + 1, min(chunk.end + 1, row.sample_requests[0].num_prompt_tokens))
        return [
            self._score_one(
                splitmix(self._seed, end, row.token_ids[end - 1], 0), row.token_ids[end], row.prompt_logprobs or 0
            )
            for end in ends
        ]

    def _score_one(self, context_hash: int, target: int, num_top: int) -> TokenLogprobs:
        rank = (target - context_hash) % self._vocab_size
        top = tuple(self._ranking(context_hash, num_top, frozenset())) if num_top else ()
        return TokenLogprobs(_logprob(context_hash, rank), top)


@dataclass(slots=True)
class SimulatedRow:
    """The known state of a sequence. ``prompt_logprobs`` as in ``NewRequest.num_prompt_logprobs``."""

    token_ids: list[int]
    sample_requests: tuple[SampleRequest, ...]
    prompt_logprobs: int | None

    def put(self, index: int, token_id: int) -> None:
        """Replaces the token at ``index``, or appends it."""
        self.token_ids[index : index + 1] = [token_id]


class SimulatedStep:
    """A step in flight. ``sample_tokens`` computes its output, and its time passes in ``get_output``. In a pipeline,
    ``computed`` is when the last stage has computed the step.
    """

    def __init__(
        self, executor: SimulatedExecutor, scheduler_output: SchedulerOutput, computed: float | None = None
    ) -> None:
        self._computed = computed
        self._executor = executor
        self._scheduler_output = scheduler_output
        self._model_output = ModelOutput()

    def sample_tokens(self) -> None:
        """See ``AsyncModelOutput.sample_tokens``."""
        self._model_output = self._executor.compute(self._scheduler_output)

    def get_output(self) -> ModelOutput:
        """See ``AsyncModelOutput.get_output``."""
        self._executor.spend_time(self._scheduler_output, self._model_output, self._computed)
        return self._model_output


def _logprob(context_hash: int, rank: int) -> float:
    """Returns the log-probability of the token at ``rank``. It strictly decreases, and the probabilities sum to less
    than 1.
    """
    return -1.0 - uniform(context_hash) - 2.0 * log1p(rank)


MASK = (1 << 64) - 1


GOLDEN = 0x9E3779B97F4A7C15
MIX_A, MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def splitmix(seed: int, *values: int) -> int:
    """Returns a pseudo-random number below 2^64 that depends only on the arguments, on every machine. Folds the values
    into one key, which then passes through the finaliser of SplitMix64 (Steele, Lea and Flood).
    """
    key = seed + GOLDEN
    for value in values:
        key = (key * MIX_A + value + GOLDEN) & MASK
    key = ((key ^ (key >> 30)) * MIX_A) & MASK
    key = ((key ^ (key >> 27)) * MIX_B) & MASK
    return key ^ (key >> 31)


def uniform(seed: int, *values: int) -> float:
    """Like ``splitmix``, uniform in [0, 1)."""
    return (splitmix(seed, *values) >> 11) / (1 << 53)
