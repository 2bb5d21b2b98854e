"""How large the KV pools become: one decision from what was asked for and what was measured. Pure arithmetic; knows no
model and no device.
"""

from dataclasses import dataclass

from quire_engine.kv.capacity import KVCacheConfig
from quire_engine.models.errors import ModelError

MIB = 1 << 20
# The part of a container's or a GPU's memory that an engine takes.
GRANTED_PART = 0.9
# Of a machine that others use too, the pools take a part of what is left, and not all of a large one's.
SHARED_PART, SHARED_MOST = 0.25, 4 << 30


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What was asked for. ``kv_cache_bytes`` None means: as much as there is. ``utilization`` is the part of the limit
    that the engine may take in all; None means: as usual. ``swap_bytes`` is the most that the host pool may take.
    """

    kv_cache_bytes: int | None
    swap_bytes: int
    utilization: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found out before the pools are made, in bytes.

    ``limit``, ``source`` and ``granted`` are as in ``DeviceMemory``. ``before`` was in use without the model,
    ``loaded`` with it, ``peak`` during the largest step (None when it was not run); ``available`` can still be had with
    the model, and ``growth`` of it is kept for what comes later. ``host`` is what the host pool can have where it is in
    other memory; None where both pools share this one.
    """

    limit: int
    source: str
    granted: bool
    before: int
    loaded: int
    available: int
    peak: int | None = None
    growth: int = 0
    host: int | None = None

    @property
    def weights(self) -> int:
        """What the model added."""
        return max(0, self.loaded - self.before)

    @property
    def activations(self) -> int:
        """What the largest step added to that."""
        return max(0, (self.peak or 0) - self.loaded)

    @property
    def taken(self) -> int:
        """What the engine takes without its pools, sooner or later."""
        return self.loaded + self.activations + self.growth

    @property
    def left(self) -> int:
        """What there is for pools and for everybody else."""
        return max(0, min(self.limit, self.loaded + self.available) - self.taken)


@dataclass(frozen=True, slots=True)
class Pools:
    """Bytes of the device's and of the host's pool."""

    kv_cache_bytes: int
    swap_bytes: int


def decide(request: PoolRequest, measured: Measured, smallest: Pools) -> Pools:
    """The pools' sizes. A KV pool of a given size is made if the limit can hold it at all. The host pool takes what it
    was given as far as there is room: at most half of it, where both pools share it and the KV pool fills it. Raises
    ``ModelError`` where no KV pool fits.
    """
    if request.kv_cache_bytes is None:
        return _fill(request, measured, smallest)
    if request.kv_cache_bytes > measured.limit - measured.loaded:
        raise ModelError(_too_large(request.kv_cache_bytes, measured))
    rest = measured.limit - measured.taken - request.kv_cache_bytes
    return Pools(request.kv_cache_bytes, _host_pool(request, measured, rest))


def _fill(request: PoolRequest, measured: Measured, smallest: Pools) -> Pools:
    room = _room(request.utilization, measured)
    swap_bytes = _host_pool(request, measured, room // 2)
    kv_cache_bytes = room - swap_bytes if measured.host is None else room
    if kv_cache_bytes < smallest.kv_cache_bytes:
        raise ModelError(_nothing_left(measured, room))
    return Pools(kv_cache_bytes, swap_bytes)


def _room(utilization: float | None, measured: Measured) -> int:
    """What both pools may take; below 0 where there is less than nothing."""
    if utilization is None and not measured.granted:
        return min(int(measured.left * SHARED_PART), SHARED_MOST)
    usable = int(measured.limit * (GRANTED_PART if utilization is None else utilization))
    return min(usable - measured.taken, measured.left)


def _host_pool(request: PoolRequest, measured: Measured, shared: int) -> int:
    """``shared`` is what there is for it where it shares the device's memory."""
    return min(request.swap_bytes, max(0, shared if measured.host is None else measured.host))


def table(request: PoolRequest, measured: Measured, capacity: KVCacheConfig, length: int) -> str:
    """What was decided, for the log. ``length`` is the longest sequence that the model may have, in tokens."""
    device, host = (count * capacity.block_bytes for count in (capacity.device_blocks, capacity.host_blocks))
    host_tokens = capacity.host_blocks * capacity.block_size
    step = "not measured: the KV pool's size was given" if measured.peak is None else "of the largest step"
    rows = [
        ("limit", _mib(measured.limit), f"{measured.source}; {_rule(request, measured)}"),
        ("process", _mib(measured.before), "before the model"),
        ("weights", _mib(measured.weights), "as loaded"),
        ("activations", _mib(measured.activations), step),
        ("kept free", _mib(measured.growth), "for what grows while it runs"),
        ("KV pool", _mib(device), f"{capacity.device_blocks} blocks, {capacity.usable_tokens} tokens"),
        ("host pool", _mib(host), f"{capacity.host_blocks} blocks, {host_tokens} tokens"),
        ("longest request", f"{min(length, capacity.usable_tokens)} tokens", f"the model's limit is {length}"),
    ]
    return "\n".join(f"  {name:<16}{size:>16}  {remark}" for name, size, remark in rows)


def _rule(request: PoolRequest, measured: Measured) -> str:
    if request.kv_cache_bytes is not None:
        return "the KV pool's size was given"
    if request.utilization is None and not measured.granted:
        return f"the pools take {SHARED_PART:.0%} of what is left, at most {_mib(SHARED_MOST)}"
    return f"{GRANTED_PART if request.utilization is None else request.utilization:.0%} of it may be taken"


def _too_large(size: int, measured: Measured) -> str:
    return (
        f"There is no memory for a KV pool of {size} bytes: {measured.source} is {measured.limit} bytes, and the "
        f"engine takes {measured.loaded} without it."
    )


def _nothing_left(measured: Measured, room: int) -> str:
    return (
        f"There is no memory for KV blocks: {measured.source} is {_mib(measured.limit)}, the engine with its weights "
        f"takes {_mib(measured.loaded)}, its largest step {_mib(measured.activations)}, what grows later "
        f"{_mib(measured.growth)}, and of what it may take {_mib(room)} is left. Give it more memory or a larger part "
        "of it, or lower --max-num-batched-tokens or --max-num-seqs."
    )


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
