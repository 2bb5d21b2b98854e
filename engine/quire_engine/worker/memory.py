"""Memory profiling: how much memory an engine takes, and how much the KV cache and the swap pool may have.

``MemoryProfiler`` measures a process before the model is loaded, after that, and during the largest step.
``compute_cache_sizes`` decides from the profile and the settings, and ``memory_table`` explains the decision in the
log. ``DeviceMemory`` is the memory of a host or a GPU. The end of the file makes the steps that measure an executor.
All sizes are in bytes unless a name says otherwise.
"""

import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch
from quire_proto.pooling import PoolingParams
from quire_proto.sampling import MAX_LOGPROBS, SamplingParams

from quire_engine.core.block_pool import BlockCopies, BlockCopy, KVCacheConfig, StateCacheConfig
from quire_engine.core.executor import Executor, Rates
from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import NewRequest, SampleRequest, ScheduledChunk, SchedulerOutput
from quire_engine.device.host import ROOT, cgroup_memory_limits, memory_field
from quire_engine.errors import ModelError, first_line

MIB = 1 << 20
GIB = 1 << 30
PROC_SELF = Path("/proc/self")
# The fraction of a container's or a GPU's memory that an engine uses.
DEDICATED_FRACTION = 0.9
# On a shared machine, both pools together take this fraction of the free memory, up to this limit.
SHARED_FRACTION, SHARED_MAX_BYTES = 0.25, 4 << 30
# How much a process grows after its largest step: kernels compiled for other shapes, heap fragmentation, connection
# buffers. Measured on a CPU: 80 MiB with the demo model, 30 MiB with a model of 135 M parameters.
GROWTH_RESERVE = 128 << 20


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Memory in bytes, measured before the pools are made.

    * ``limit``, ``source`` and ``dedicated`` are as in ``DeviceMemory``.
    * ``used_before`` was in use without the model, ``used_loaded`` with it, and ``peak`` during the largest step (None
      if that did not run).
    * ``available`` could still be allocated with the model loaded; ``growth_reserve`` of it stays free.
    * ``host_available`` is what the swap pool can have if it is in other memory (CUDA), or None if both pools share
      this memory. This process uses ``host_used`` of that memory, and the processes of one machine together can use
      ``host_limit``.
    """

    limit: int
    source: str
    dedicated: bool
    used_before: int
    used_loaded: int
    available: int
    peak: int | None = None
    growth_reserve: int = 0
    host_available: int | None = None
    host_used: int = 0
    host_limit: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes that loading the model added."""
        return max(0, self.used_loaded - self.used_before)

    @property
    def activation_bytes(self) -> int:
        """Bytes that the largest step added; 0 if it did not run."""
        return max(0, (self.peak or 0) - self.used_loaded)

    @property
    def used_without_cache(self) -> int:
        """The most bytes that the engine uses without its pools."""
        return self.used_loaded + self.activation_bytes + self.growth_reserve

    @property
    def free(self) -> int:
        """Bytes left for the pools and for other processes."""
        return max(0, min(self.limit, self.used_loaded + self.available) - self.used_without_cache)


class MemoryProfiler:
    """Measures this process. Create it before the model is loaded, and call ``profile`` afterwards. It keeps
    ``lora_bytes`` of host memory free for adapters that are loaded later.
    """

    def __init__(self, device: torch.device, lora_bytes: int = 0) -> None:
        self._lora_bytes = lora_bytes
        self._memory = device_memory(device)
        self._host = None if device.type == "cpu" else CpuMemory()
        self._used_before = self._memory.used()

    def profile(self, largest_step: Callable[[], object] | None) -> MemoryProfile:
        """Measures the loaded model, and runs ``largest_step`` unless it is None. Raises ``ModelError`` if it fails."""
        loaded, available = self._memory.used(), self._memory.available()
        reserve, host = GROWTH_RESERVE + self._lora_bytes, self._host
        return MemoryProfile(
            limit=self._memory.limit,
            source=self._memory.source,
            dedicated=self._memory.dedicated,
            used_before=self._used_before,
            used_loaded=loaded,
            available=available,
            peak=None if largest_step is None else self._peak(largest_step),
            growth_reserve=reserve if host is None else 0,
            host_available=None if host is None else host.available() - reserve,
            host_used=0 if host is None else host.used(),
            host_limit=0 if host is None else host.limit - reserve,
        )

    def _peak(self, largest_step: Callable[[], object]) -> int:
        try:
            return self._memory.peak_during(largest_step)
        except (MemoryError, RuntimeError) as error:
            # For CPU memory, torch reports out-of-memory only in the text; for a GPU also by the type.
            full = isinstance(error, MemoryError) or "memory" in str(error)
            advice = "; lower --max-num-batched-tokens or --max-num-seqs" if full else ""
            raise ModelError(f"The largest step that is allowed cannot be run: {first_line(error)}{advice}.") from None


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """The sizes that the settings ask for. ``kv_cache_bytes`` None means all free memory. ``utilization`` is the
    fraction of the limit that the whole engine may use; None means the default. ``swap_bytes`` is the maximum of the
    swap pool.
    """

    kv_cache_bytes: int | None
    swap_bytes: int
    utilization: float | None = None


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Bytes of the KV cache on the device and of the swap pool on the host."""

    kv_cache_bytes: int
    swap_bytes: int


def compute_cache_sizes(budget: CacheBudget, measured: MemoryProfile, smallest: CacheSizes) -> CacheSizes:
    """Returns the sizes of both pools. A KV cache of a given size is accepted if the limit can hold it at all. The swap
    pool gets up to ``budget.swap_bytes`` of the remaining memory. If both pools share a memory that the KV cache fills,
    the swap pool gets at most half of it. Raises ``ModelError`` if not even the ``smallest`` KV cache fits.
    """
    if budget.kv_cache_bytes is None:
        return _fill_memory(budget, measured, smallest)
    if budget.kv_cache_bytes > measured.limit - measured.used_loaded:
        raise ModelError(_too_large_message(budget.kv_cache_bytes, measured))
    rest = measured.limit - measured.used_without_cache - budget.kv_cache_bytes
    return CacheSizes(budget.kv_cache_bytes, _swap_bytes(budget, measured, rest))


def _fill_memory(budget: CacheBudget, measured: MemoryProfile, smallest: CacheSizes) -> CacheSizes:
    usable = _usable_bytes(budget.utilization, measured)
    swap_bytes = _swap_bytes(budget, measured, usable // 2)
    kv_cache_bytes = usable - swap_bytes if measured.host_available is None else usable
    if kv_cache_bytes < smallest.kv_cache_bytes:
        raise ModelError(_no_memory_message(measured, usable))
    return CacheSizes(kv_cache_bytes, swap_bytes)


def _usable_bytes(utilization: float | None, measured: MemoryProfile) -> int:
    """Returns the bytes that both pools may take; negative if the engine already uses more than it may."""
    if utilization is None and not measured.dedicated:
        return min(int(measured.free * SHARED_FRACTION), SHARED_MAX_BYTES)
    usable = int(measured.limit * (DEDICATED_FRACTION if utilization is None else utilization))
    return min(usable - measured.used_without_cache, measured.free)


def _swap_bytes(budget: CacheBudget, measured: MemoryProfile, shared: int) -> int:
    """Returns the bytes of the swap pool. ``shared`` is the maximum if it shares the device's memory."""
    return min(budget.swap_bytes, max(0, shared if measured.host_available is None else measured.host_available))


def _too_large_message(size: int, measured: MemoryProfile) -> str:
    return (
        f"There is no memory for a KV pool of {_mib(size)}: {measured.source} is {_mib(measured.limit)}, and the "
        f"engine takes {_mib(measured.used_loaded)} without it. Lower --kv-cache-memory, or leave it out."
    )


def _no_memory_message(measured: MemoryProfile, usable: int) -> str:
    return (
        f"There is no memory for KV blocks: {measured.source} is {_mib(measured.limit)}, the engine with its weights "
        f"takes {_mib(measured.used_loaded)}, its largest step {_mib(measured.activation_bytes)}, what grows later "
        f"{_mib(measured.growth_reserve)}, and of what it may take {_mib(usable)} is left. Give it more memory or a "
        "larger part of it, or lower --max-num-batched-tokens or --max-num-seqs."
    )


def memory_table(budget: CacheBudget, measured: MemoryProfile, config: KVCacheConfig, max_length: int) -> list[str]:
    """Returns the decision as rows for the log. ``max_length`` is the model's longest sequence in tokens."""
    device, host = (count * config.block_bytes for count in (config.device_blocks, config.host_blocks))
    states = (
        []
        if config.states is None
        else _state_rows(config.states, config.device_bytes - device, config.host_bytes - host)
    )
    more = "" if all(group.window is None for group in config.groups) else ", and more in long sequences"
    host_tokens = config.host_blocks // len(config.groups) * config.block_size
    step = "not measured: the KV pool's size was given" if measured.peak is None else "of the largest step"
    rows = [
        ("limit", _mib(measured.limit), f"{measured.source}; {_describe_limit(budget, measured)}"),
        ("process", _mib(measured.used_before), "before the model"),
        ("weights", _mib(measured.weight_bytes), "as loaded"),
        ("activations", _mib(measured.activation_bytes), step),
        ("kept free", _mib(measured.growth_reserve), "for what grows while it runs"),
        ("KV pool", _mib(device), f"{config.device_blocks} blocks, {config.num_tokens} tokens{more}"),
        ("host pool", _mib(host), f"{config.host_blocks} blocks, {host_tokens} tokens"),
        *states,
        ("longest request", f"{min(max_length, config.usable_tokens)} tokens", f"the model's limit is {max_length}"),
    ]
    return [f"{name:<16}{size:>16}  {remark}" for name, size, remark in rows]


def _state_rows(states: StateCacheConfig, device: int, host: int) -> list[tuple[str, str, str]]:
    """Returns the rows of recurrent states, which take ``device`` and ``host`` bytes."""
    running = f"of {states.max_num_seqs} running sequences, and checkpoints after each {states.block_size} tokens"
    swapped = f"{states.host_blocks} states of swapped sequences, and checkpoints"
    return [("states", _mib(device), running), ("host states", _mib(host), swapped)]


def _describe_limit(budget: CacheBudget, measured: MemoryProfile) -> str:
    if budget.kv_cache_bytes is not None:
        return "the KV pool's size was given"
    if budget.utilization is None and not measured.dedicated:
        return f"the pools take {SHARED_FRACTION:.0%} of what is left, at most {_mib(SHARED_MAX_BYTES)}"
    return f"{DEDICATED_FRACTION if budget.utilization is None else budget.utilization:.0%} of it may be taken"


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"


class DeviceMemory(Protocol):
    """The memory of a host or a GPU. ``limit`` is all that this process can have, in bytes, and ``source`` names the
    origin of that limit. ``dedicated`` says whether all of it is meant for this process, as with a container or a GPU.
    """

    limit: int
    source: str
    dedicated: bool

    def used(self) -> int:
        """Returns the bytes in use now, without caches that are freed on demand."""
        ...

    def available(self) -> int:
        """Returns the bytes that can still be allocated now."""
        ...

    def peak_during(self, work: Callable[[], object]) -> int:
        """Runs ``work`` and returns the most bytes in use at once during it."""
        ...


class CpuMemory:
    """Host memory within the limits of this process's cgroups, or else the whole machine's memory."""

    def __init__(self, root: Path = ROOT) -> None:
        self._meminfo = root / "proc/meminfo"
        total = self._machine_field("MemTotal")
        limit = min(cgroup_memory_limits(root), default=total)
        self.dedicated = limit < total
        self.limit = min(limit, total)
        self.source = "the container's limit" if self.dedicated else "the machine's memory"

    def used(self) -> int:
        """Returns the resident set size of this process."""
        return self._process_field("VmRSS")

    def available(self) -> int:
        """Returns the rest of the limit, or the machine's available memory if that is less."""
        return max(0, min(self.limit - self.used(), self._machine_field("MemAvailable")))

    def peak_during(self, work: Callable[[], object]) -> int:
        """Returns the largest resident set size while ``work`` runs. If the peak cannot be reset, returns the largest
        since the process started.
        """
        self._reset_peak()
        work()
        return self._process_field("VmHWM")

    def _reset_peak(self) -> None:
        with suppress(OSError):
            (PROC_SELF / "clear_refs").write_text("5")

    def _process_field(self, name: str) -> int:
        return memory_field(PROC_SELF / "status", name)

    def _machine_field(self, name: str) -> int:
        return memory_field(self._meminfo, name)


class CudaMemory:
    """The memory of one GPU. The memory of other processes on it counts as used."""

    dedicated = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.limit: int = torch.cuda.mem_get_info(device)[1]
        self.source = "the GPU's memory"

    def used(self) -> int:
        """Empties torch's cache, then returns all memory that is not free."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return self.limit - free

    def available(self) -> int:
        """Returns the free memory."""
        return self.limit - self.used()

    def peak_during(self, work: Callable[[], object]) -> int:
        """Returns the bytes in use before, plus the peak of what torch reserved in addition while ``work`` ran, plus
        what others took meanwhile: the driver for kernels and graphs, and libraries for workspaces.
        """
        before, reserved, others = self.used(), self._reserved(), self._used_outside_torch()
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        most: int = torch.cuda.max_memory_reserved(self._device)
        return before + most - reserved + max(0, self._used_outside_torch() - others)

    def _reserved(self) -> int:
        """Returns the bytes that torch has reserved."""
        reserved: int = torch.cuda.memory_reserved(self._device)
        return reserved

    def _used_outside_torch(self) -> int:
        """Returns the bytes in use that torch has not reserved."""
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return self.limit - free - self._reserved()


def device_memory(device: torch.device) -> DeviceMemory:
    """Returns the memory that holds tensors on ``device``."""
    return CpuMemory() if device.type == "cpu" else CudaMemory(device)


def check_host_memory(nbytes: int, processes: int, memory: CpuMemory) -> None:
    """Raises ``ModelError`` if ``processes`` processes that start together on this machine cannot pin ``nbytes``
    each.
    """
    rest = min(memory.limit - memory.used(), processes * memory.available()) - GROWTH_RESERVE
    if processes * nbytes > rest:
        raise ModelError(
            f"--cpu-offload-gb is too much: {processes * nbytes / GIB:.3f} GiB for the GPUs of this machine, and of "
            f"{memory.source}, {memory.limit / GIB:.3f} GiB, {max(0, rest) / GIB:.3f} are left."
        )


# The most expensive sampling parameters: they use everything that needs more than the logits.
COSTLIEST_PARAMS = SamplingParams(
    top_p=0.9, top_k=1 << 20, min_p=0.01, frequency_penalty=0.1, repetition_penalty=1.1, logprobs=MAX_LOGPROBS
)
# Prompt log-probabilities are computed for at most this many tokens at a time.
PROMPT_LOGPROB_TOKENS = 256
TIMED_TOKENS = 256
TIMED_COPY_BYTES = 8 << 20
TRIES, MAX_SECONDS = 5, 0.2


def largest_step(
    max_num_batched_tokens: int,
    max_num_seqs: int,
    length: int,
    block_size: int,
    vocab: int,
    *,
    lora: LoRARequest | None = None,
    pooling: PoolingParams | None = None,
    num_tables: int = 1,
) -> SchedulerOutput:
    """Returns the largest step: as many tokens and sequences as allowed. Each sequence samples a token and returns
    prompt log-probabilities, or is pooled if ``pooling`` is given. ``length`` is the longest sequence in tokens. All
    sequences use the adapter ``lora``. All blocks of each of ``num_tables`` block tables are block 1, so the smallest
    pools are enough.
    """
    step = SchedulerOutput(0)
    for row, size in enumerate(_chunk_lengths(max_num_batched_tokens, max_num_seqs, length)):
        new = _new_request(row, size, vocab, [1] * -(-size // block_size), num_tables)
        if pooling is not None:
            step.new.append(replace(new, pooling=pooling))
        else:
            request = SampleRequest(COSTLIEST_PARAMS, seed=row, num_prompt_tokens=min(size, PROMPT_LOGPROB_TOKENS + 1))
            step.new.append(replace(new, sample_requests=(request,), num_prompt_logprobs=MAX_LOGPROBS, lora=lora))
        step.add_chunk(ScheduledChunk(row, row, 0, size, num_draws=1))
    return step


def measure_rates(executor: Executor, longest: int, vocab: int) -> Rates:
    """Measures how fast ``executor`` computes a prompt of at most ``longest`` tokens and copies blocks. Takes a
    fraction of a second unless one step takes longer. Overwrites the contents of blocks.
    """
    capacity = executor.kv_cache_config
    size = capacity.block_size
    tokens = min(TIMED_TOKENS, longest, (capacity.device_blocks - 1) * size)
    blocks = list(range(1, -(-tokens // size) + 1))
    step = SchedulerOutput(0, new=[_new_request(0, tokens, vocab, blocks, capacity.num_tables)])
    step.add_chunk(ScheduledChunk(0, 0, 0, tokens))
    seconds = _min_seconds(lambda: executor.execute_model(step))
    return Rates(tokens / seconds, _bytes_per_second(executor))


def _bytes_per_second(executor: Executor) -> float:
    """Returns the bytes per second copied between the pools; infinity without a swap pool."""
    capacity = executor.kv_cache_config
    wanted = max(1, TIMED_COPY_BYTES // capacity.block_bytes)
    blocks = min(wanted, capacity.host_blocks, capacity.device_blocks - 1)
    if blocks == 0:
        return math.inf
    out = [BlockCopy(1 + number, number) for number in range(blocks)]
    into = [BlockCopy(number, 1 + number) for number in range(blocks)]
    seconds = _min_seconds(
        lambda: executor.execute_model(SchedulerOutput(0, copies=BlockCopies(out, blocks_to_swap_in=into)))
    )
    return 2 * blocks * capacity.block_bytes / seconds


def _min_seconds(work: Callable[[], object]) -> float:
    """Returns the shortest of a few runs in seconds, because a disturbance can only make a run longer."""
    begin, best = perf_counter(), math.inf
    for _ in range(TRIES):
        start = perf_counter()
        work()
        best = min(best, perf_counter() - start)
        if perf_counter() - begin > MAX_SECONDS:
            break
    return best


def _chunk_lengths(max_num_batched_tokens: int, max_num_seqs: int, length: int) -> Iterator[int]:
    """Yields the number of tokens of each sequence: as many as possible, with at least one left for each of the
    others.
    """
    left = max_num_batched_tokens
    for others in reversed(range(min(max_num_seqs, max_num_batched_tokens))):
        yield (size := min(length, left - others))
        left -= size


def _new_request(row: int, length: int, vocab: int, blocks: list[int], num_tables: int) -> NewRequest:
    """Returns a sequence with the same blocks in each table. Its tokens are spread over the vocabulary, so that all
    experts of a model get some.
    """
    tokens = array("i", [index * 7919 % vocab for index in range(length)])
    return NewRequest(row, tokens, (array("i", blocks),) * num_tables)
