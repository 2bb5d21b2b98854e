"""The sizes of the KV cache and of the host pool, computed from what was asked for and what was measured."""

from dataclasses import dataclass

from quire_engine.kv.capacity import KVCacheConfig
from quire_engine.models.errors import ModelError

MIB = 1 << 20
# The fraction of a container's or a GPU's memory that an engine uses.
DEDICATED_FRACTION = 0.9
# Of a machine that others use too, the pools take a fraction of what is left, up to a limit.
SHARED_FRACTION, SHARED_MAX_BYTES = 0.25, 4 << 30


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """What was asked for. ``kv_cache_bytes`` None means all there is. ``utilization`` is the fraction of the limit
    that the engine may use in all; None means the default. ``swap_bytes`` is the most that the host pool may take.
    """

    kv_cache_bytes: int | None
    swap_bytes: int
    utilization: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What was found out before the pools are made, in bytes.

    ``limit``, ``source`` and ``dedicated`` are as in ``DeviceMemory``. ``used_before`` was in use without the model,
    ``used_loaded`` with it, ``peak`` during the largest step (None if not run); ``available`` can still be had with
    the model, and ``growth_reserve`` of it is kept for what comes later. ``host_available`` is what the host pool can
    have where it is in other memory; None where both pools share this one.
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

    @property
    def weights(self) -> int:
        """What the model added."""
        return max(0, self.used_loaded - self.used_before)

    @property
    def activations(self) -> int:
        """What the largest step added to that."""
        return max(0, (self.peak or 0) - self.used_loaded)

    @property
    def used_without_cache(self) -> int:
        """What the engine uses at most, without its pools."""
        return self.used_loaded + self.activations + self.growth_reserve

    @property
    def free(self) -> int:
        """What is left for the pools and for other processes."""
        return max(0, min(self.limit, self.used_loaded + self.available) - self.used_without_cache)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Bytes of the device's and of the host's pool."""

    kv_cache_bytes: int
    swap_bytes: int


def compute_cache_sizes(request: CacheBudget, measured: MemoryProfile, smallest: CacheSizes) -> CacheSizes:
    """The pools' sizes. A KV pool of a given size is made if the limit can hold it at all. The host pool takes what it
    was given as far as there is room: at most half of it, where both pools share it and the KV pool fills it. Raises
    ``ModelError`` where no KV pool fits.
    """
    if request.kv_cache_bytes is None:
        return _fill_memory(request, measured, smallest)
    if request.kv_cache_bytes > measured.limit - measured.used_loaded:
        raise ModelError(_too_large(request.kv_cache_bytes, measured))
    rest = measured.limit - measured.used_without_cache - request.kv_cache_bytes
    return CacheSizes(request.kv_cache_bytes, _host_pool(request, measured, rest))


def _fill_memory(request: CacheBudget, measured: MemoryProfile, smallest: CacheSizes) -> CacheSizes:
    room = _usable_bytes(request.utilization, measured)
    swap_bytes = _host_pool(request, measured, room // 2)
    kv_cache_bytes = room - swap_bytes if measured.host_available is None else room
    if kv_cache_bytes < smallest.kv_cache_bytes:
        raise ModelError(_no_memory_left(measured, room))
    return CacheSizes(kv_cache_bytes, swap_bytes)


def _usable_bytes(utilization: float | None, measured: MemoryProfile) -> int:
    """What both pools may take; below 0 where there is less than nothing."""
    if utilization is None and not measured.dedicated:
        return min(int(measured.free * SHARED_FRACTION), SHARED_MAX_BYTES)
    usable = int(measured.limit * (DEDICATED_FRACTION if utilization is None else utilization))
    return min(usable - measured.used_without_cache, measured.free)


def _host_pool(request: CacheBudget, measured: MemoryProfile, shared: int) -> int:
    """``shared`` is what there is for it where it shares the device's memory."""
    return min(request.swap_bytes, max(0, shared if measured.host_available is None else measured.host_available))


def format_memory_table(request: CacheBudget, measured: MemoryProfile, capacity: KVCacheConfig, length: int) -> str:
    """The decision as a table for the log. ``length`` is the longest sequence that the model may have, in tokens."""
    device, host = (count * capacity.block_bytes for count in (capacity.device_blocks, capacity.host_blocks))
    host_tokens = capacity.host_blocks * capacity.block_size
    step = "not measured: the KV pool's size was given" if measured.peak is None else "of the largest step"
    rows = [
        ("limit", _mib(measured.limit), f"{measured.source}; {_rule(request, measured)}"),
        ("process", _mib(measured.used_before), "before the model"),
        ("weights", _mib(measured.weights), "as loaded"),
        ("activations", _mib(measured.activations), step),
        ("kept free", _mib(measured.growth_reserve), "for what grows while it runs"),
        ("KV pool", _mib(device), f"{capacity.device_blocks} blocks, {capacity.usable_tokens} tokens"),
        ("host pool", _mib(host), f"{capacity.host_blocks} blocks, {host_tokens} tokens"),
        ("longest request", f"{min(length, capacity.usable_tokens)} tokens", f"the model's limit is {length}"),
    ]
    return "\n".join(f"  {name:<16}{size:>16}  {remark}" for name, size, remark in rows)


def _rule(request: CacheBudget, measured: MemoryProfile) -> str:
    if request.kv_cache_bytes is not None:
        return "the KV pool's size was given"
    if request.utilization is None and not measured.dedicated:
        return f"the pools take {SHARED_FRACTION:.0%} of what is left, at most {_mib(SHARED_MAX_BYTES)}"
    return f"{DEDICATED_FRACTION if request.utilization is None else request.utilization:.0%} of it may be taken"


def _too_large(size: int, measured: MemoryProfile) -> str:
    return (
        f"There is no memory for a KV pool of {size} bytes: {measured.source} is {measured.limit} bytes, and the "
        f"engine takes {measured.used_loaded} without it."
    )


def _no_memory_left(measured: MemoryProfile, room: int) -> str:
    return (
        f"There is no memory for KV blocks: {measured.source} is {_mib(measured.limit)}, the engine with its weights "
        f"takes {_mib(measured.used_loaded)}, its largest step {_mib(measured.activations)}, what grows later "
        f"{_mib(measured.growth_reserve)}, and of what it may take {_mib(room)} is left. Give it more memory or a "
        "larger part of it, or lower --max-num-batched-tokens or --max-num-seqs."
    )


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
