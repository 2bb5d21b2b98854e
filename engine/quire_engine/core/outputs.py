"""What a step means to the outside: new tokens, ends and the load. Plain data."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from quire_proto.errors import QuireError
from quire_proto.sampling import FinishReason, StopToken, TokenLogprobs

from quire_engine.core.absence import PreemptionMode, PreemptionReason
from quire_engine.core.block_table import BlockTable
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.kv_transfer.connector import TransferFailure
from quire_engine.core.lora import LoRAStats
from quire_engine.core.request import SequenceTimings
from quire_engine.core.step_time_model import Pace


@dataclass(slots=True)
class EngineCoreOutput:
    """New tokens of one choice of a request, its end, or both.

    ``index`` is the choice. ``position`` is the index of ``token_ids[0]`` in the choice's output, including earlier
    attempts. ``cached_tokens`` of the prompt were found in the prefix cache. An end-of-sequence or stop token is not
    part of the output. ``stop_token`` holds it if log-probabilities were requested or if the request lists it as a stop
    token. ``timings`` belong to the sequence and change until its end.
    ``logprobs`` has one entry for each of ``token_ids`` if requested, and ``prompt_logprobs`` one for each prompt token
    from ``prompt_position`` on. ``score`` is a beam's score, at its end. ``pooled`` is the pooled output as
    little-endian float32, at the end. ``ends_request`` is set on the last output of the request.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    position: int = 0
    finish_reason: FinishReason | None = None
    error: QuireError | None = None
    cached_tokens: int = 0
    timings: SequenceTimings | None = None
    index: int = 0
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    prompt_position: int = 0
    score: float | None = None
    stop_token: StopToken | None = None
    pooled: bytes = b""
    ends_request: bool = False


@dataclass(slots=True)
class TokenColumns:
    """New tokens of choices that go on, one of each choice: ``token_ids[i]`` is the token at ``positions[i]`` of choice
    ``indexes[i]`` of request ``request_ids[i]``. An ``EngineCoreOutput`` per token would cost more than the token. A
    choice's first token is never here, and neither is a token with log-probabilities.
    """

    request_ids: list[str] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def outputs(self) -> Iterator[EngineCoreOutput]:
        """Yields each token as an output. Slow: not for the hot path."""
        for request_id, index, token_id, position in zip(
            self.request_ids, self.indexes, self.token_ids, self.positions, strict=True
        ):
            yield EngineCoreOutput(request_id, [token_id], position, index=index)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load and the speed of an engine; see ``quire.v1.Load``."""

    running: int
    waiting: int
    swapped: int
    uncomputed_tokens: int
    blocks_total: int
    blocks_free: int
    host_blocks_total: int
    host_blocks_free: int
    pace: Pace | None = None
    prompt_tokens_per_step: int = 0
    best_effort: int = 0
    disk_blocks_total: int = 0
    disk_blocks_free: int = 0
    loras: LoRAStats = LoRAStats()  # noqa: RUF009 - it is frozen
    is_sleeping: bool = False


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start, for metrics and benchmarks.

    ``prefix_device_tokens`` of the prompts were found in the device pool, ``prefix_host_tokens`` in the host pool, and
    ``prefix_disk_tokens`` in blocks that had been loaded into the host pool from disk. ``blocks_copied_out`` and
    ``blocks_copied_in`` count all blocks copied between the pools, including swaps. ``blocks_copied_ahead`` were copied
    to the host before their sequences were swapped out, and ``blocks_used_ahead`` of them were then used.
    ``blocks_parted`` were copied because a sequence wrote into a shared block (copy on write).

    ``out_of_memory`` requests ran alone and could not grow. ``num_draft_tokens`` were proposed in ``num_drafts``
    chunks; ``num_accepted_tokens`` of them were accepted. ``disk_failures`` counts blocks that the disk did not store
    or return. ``wake_ups`` took ``wake_seconds`` in total.
    """

    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_device_tokens: int = 0
    prefix_host_tokens: int = 0
    prefix_disk_tokens: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    blocks_copied_out: int = 0
    blocks_copied_in: int = 0
    blocks_copied_ahead: int = 0
    blocks_used_ahead: int = 0
    blocks_parted: int = 0
    out_of_memory: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    preemptions: Counter[tuple[PreemptionMode, PreemptionReason]] = field(default_factory=Counter)
    disk_blocks_stored: int = 0
    disk_blocks_loaded: int = 0
    disk_bytes_stored: int = 0
    disk_bytes_loaded: int = 0
    disk_failures: Counter[TransferFailure] = field(default_factory=Counter)
    wake_ups: int = 0
    wake_seconds: float = 0.0

    @property
    def prefix_hit_tokens(self) -> int:
        """Prompt tokens found in any tier."""
        return self.prefix_device_tokens + self.prefix_host_tokens + self.prefix_disk_tokens

    @property
    def preemptions_by_swap(self) -> int:
        """Victims that were swapped out."""
        return sum(count for (way, _), count in self.preemptions.items() if way is PreemptionMode.SWAP)

    @property
    def preemptions_by_recompute(self) -> int:
        """Victims whose tokens are recomputed."""
        return sum(count for (way, _), count in self.preemptions.items() if way is PreemptionMode.RECOMPUTE)


@dataclass(frozen=True, slots=True)
class KVCacheFragmentation:
    """How much of the KV memory is held but unused. ``used_slots`` are the slots of the device blocks in use;
    ``empty_slots`` of them hold no computed token. ``leaked_blocks`` of both pools belong to no table; None if they
    were not counted.
    """

    empty_slots: int
    used_slots: int
    leaked_blocks: int | None = None

    @property
    def ratio(self) -> float:
        """Empty slots as a fraction of used ones; 0 if none is used."""
        return self.empty_slots / self.used_slots if self.used_slots else 0.0


def measure_fragmentation(
    kv_cache_manager: KVCacheManager, tables: Iterable[tuple[BlockTable, int]]
) -> KVCacheFragmentation:
    """Returns the empty slots of ``tables``, which are all tables with device blocks, each with its number of computed
    tokens. O(tables): only the last blocks can have empty slots.

    A block that several tables share counts once, as full as in the fullest of them.
    """
    size = kv_cache_manager.block_size
    empty: dict[int, int] = {}
    for table, num_computed_tokens in tables:
        for index in range(num_computed_tokens // size, table.num_blocks):
            missing = size - max(0, num_computed_tokens - index * size)
            for group in table.groups:
                block_id = group.block_ids[index]
                empty[block_id] = min(missing, empty.get(block_id, size))
    return KVCacheFragmentation(sum(empty.values()), kv_cache_manager.device_pool.num_used * size)


def count_leaked_blocks(kv_cache_manager: KVCacheManager, tables: Iterable[BlockTable]) -> int:
    """Returns the blocks of all pools that are in use although none of ``tables`` (all that exist) and no transfer of
    a tier holds them. Anything but 0 is a leak. O(blocks held).
    """
    device: set[int] = set()
    host: set[int] = set()
    tables = list(tables)
    for table in tables:
        for group in table.groups:
            device.update(group.block_ids[group.num_skipped :])
            host.update(group.host_block_ids)
    host.update(kv_cache_manager.tiers.held_host_blocks)
    held = len(device) + len(host)
    leaked = kv_cache_manager.device_pool.num_used + kv_cache_manager.host_pool.num_used - held
    states = kv_cache_manager.states
    return leaked if states is None else leaked + states.count_leaked(tables)
