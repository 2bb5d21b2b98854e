"""vLLM's KV events (``vllm/distributed/kv_events.py``): how they are read, and which blocks of ours they speak of.

A batch of events is msgpack, in one of two forms: newer versions write objects as maps, older ones as arrays, whose
fields were only ever added at the end. Fields and events that are not known here are ignored. Hashes are numbers or
bytes (``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES``) and mean nothing outside the server, but an event has the tokens and the
parent's hash: from those ``ReportedCache`` computes the hashes that placement looks for, as llm-d's KV-cache manager
does. Does no I/O.
"""

from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from quire_proto.hashing import ROOT, TOKEN_BYTES, extra_key, hash_chain, pack

from quire_router.engines.external.estimates import PredictedCache

BlockHash = int | bytes

_DEVICE = (None, "GPU")
_FULL_ATTENTION = (None, "full_attention", "mla_attention", "sink_full_attention")
_MIN_BLOCK_SIZE = 8  # tokens
_MAX_HASH_BYTES = 64
MAX_EVENTS = 16_384  # of a batch: reading one that is damaged takes more than a microsecond


class BadEventError(ValueError):
    """What was received is no batch of KV events, or no event that can be."""


class BlockStored(msgspec.Struct, tag="BlockStored"):
    """Blocks that follow each other and the parent. ``token_ids`` are of all of them; ``extra_keys`` has for each block
    what else its hash depends on: the salt, in the first block of a sequence, and what a picture is. What is ``Any``
    has not been the same in all versions and forks.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: Any = None
    medium: Any = None
    lora_name: Any = None
    extra_keys: Any = None
    group_idx: Any = None
    kv_cache_spec_kind: Any = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    """Blocks that were evicted."""

    block_hashes: list[BlockHash]
    medium: Any = None
    group_idx: Any = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """The prefix cache was reset."""


class _StoredArray(BlockStored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]


class _BatchArray(_Batch, array_like=True):
    pass


_TAGS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_batch_of_map = msgspec.msgpack.Decoder(_Batch)
_batch_of_array = msgspec.msgpack.Decoder(_BatchArray)
_event_of_map = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_event_of_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)

Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one step of the server, at ``ts`` seconds of its clock; ``bad`` more could not be read."""

    ts: float
    events: Sequence[Event]
    bad: int = 0


def read_batch(payload: bytes) -> EventBatch:
    """Reads a batch. Raises ``BadEventError`` if it is none."""
    try:
        batch = (_batch_of_map if _is_map(payload) else _batch_of_array).decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadEventError(f"no batch of KV events: {error}") from None
    if len(batch.events) > MAX_EVENTS:
        raise BadEventError(f"a batch has {len(batch.events)} events, and no step of a server has {MAX_EVENTS}")
    events: list[Event] = []
    bad = 0
    for raw in batch.events:
        try:
            events.append((_event_of_map if _is_map(bytes(raw)) else _event_of_array).decode(raw))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            bad += not _is_unknown(raw)
    return EventBatch(batch.ts, events, bad)


def _is_map(packed: bytes) -> bool:
    """Whether it begins as a map of msgpack does."""
    return bool(packed) and (packed[0] in (0xDE, 0xDF) or packed[0] >> 4 == 0x8)


def _is_unknown(raw: msgspec.Raw) -> bool:
    """Whether it is an event of a kind that is not known here."""
    try:
        event = msgspec.msgpack.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    tag = event.get("type") if isinstance(event, dict) else event[0] if isinstance(event, list) and event else None
    return isinstance(tag, str) and tag not in _TAGS


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of the server's: the ``hashes`` of our blocks that end in it, and what the next block's depend on: the
    hash of our last full block so far (``parent``), the packed tokens after it (``rest``), and the sequence's
    ``extra``.
    """

    hashes: tuple[bytes, ...]
    parent: bytes
    rest: bytes
    extra: bytes


class ReportedCache:
    """What a server has cached by its own events, entered into ``cache`` by the hashes that placement looks for: those
    of blocks of ``block_size`` tokens in the namespace of ``revision``. Blocks of the server may have another size; one
    of ours counts for as long as the server has the block that its last token is in.

    Blocks that no request of this router can use are left out: of adapters, of pictures, in other memory than the
    device's, of layers with sliding windows, and those that follow a block that is not known. At most ``max_tokens``
    tokens are remembered; ``dropped`` blocks were more than that.

    A server may have two copies of a block, and reports both. It counts as gone with the first that is evicted.

    ``complete`` says whether all that was reported since the server started, or cleared its cache, was read, so that
    nothing else is cached there. ``salted`` has to be set once requests are salted: versions that report no
    ``extra_keys`` then do not say whose a block is, and their blocks are left out.
    """

    def __init__(self, cache: PredictedCache, revision: str, block_size: int, max_tokens: int) -> None:
        self.complete = False
        self.salted = False
        self.dropped = 0
        self._cache = cache
        self._revision = revision
        self._block_bytes = block_size * TOKEN_BYTES
        self._max_tokens = max_tokens
        self._tokens = 0
        self._blocks: dict[BlockHash, _Block] = {}
        self._size = 0
        self._group: Any = None

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Forgets everything, and what was predicted: the server's cache is empty, or not known any more."""
        self._blocks.clear()
        self._tokens = self._size = 0
        self._group = None
        self._cache.clear()

    def apply(self, event: Event) -> None:
        """Takes one event in. Raises ``BadEventError`` if its parts do not fit together."""
        if isinstance(event, AllBlocksCleared):
            self.clear()
            self.complete = True
        elif isinstance(event, BlockRemoved):
            self._remove(event)
        else:
            self._store(event)

    def _store(self, event: BlockStored) -> None:
        if event.medium not in _DEVICE or event.kv_cache_spec_kind not in _FULL_ATTENTION:
            return
        if event.lora_id is not None or event.lora_name is not None:
            return
        if self._blocks and (event.block_size, event.group_idx) != (self._size, self._group):
            return  # of another group of layers, of which some blocks may be left out
        if event.block_size < _MIN_BLOCK_SIZE or len(event.token_ids) != len(event.block_hashes) * event.block_size:
            raise BadEventError("the tokens do not match its blocks")
        self._size, self._group = event.block_size, event.group_idx
        before = self._first(event) if event.parent_block_hash is None else self._blocks.get(event.parent_block_hash)
        if before is None:
            return
        tokens = _pack(event.token_ids)
        width = event.block_size * TOKEN_BYTES
        new: list[bytes] = []
        for index, block_hash in enumerate(event.block_hashes):
            if _keys(event, index) and (index or event.parent_block_hash is not None):  # what is no text
                break
            before = self._follow(before, tokens[index * width : (index + 1) * width])
            if not self._keep(block_hash, before):
                break
            new += before.hashes
        self._cache.add(new)

    def _first(self, event: BlockStored) -> _Block | None:
        """What the first block of a sequence follows; None if it is not known whose it is."""
        if event.extra_keys is None and self.salted:
            self.complete = False
            return None
        salt = _salt(_keys(event, 0))
        return None if salt is None else _Block((), ROOT, b"", extra_key(self._revision, salt))

    def _follow(self, before: _Block, tokens: bytes) -> _Block:
        """The block with these tokens after ``before``."""
        tokens = before.rest + tokens
        hashes = tuple(hash_chain(tokens, self._block_bytes, before.extra, before.parent))
        rest = tokens[len(hashes) * self._block_bytes :]
        return _Block(hashes, hashes[-1] if hashes else before.parent, rest, before.extra)

    def _keep(self, block_hash: BlockHash, block: _Block) -> bool:
        if isinstance(block_hash, bytes) and len(block_hash) > _MAX_HASH_BYTES:
            raise BadEventError("a hash is too long")
        if block_hash not in self._blocks:
            if self._tokens + self._size > self._max_tokens:
                self.dropped += 1
                self.complete = False
                return False
            self._tokens += self._size
        self._blocks[block_hash] = block
        return True

    def _remove(self, event: BlockRemoved) -> None:
        if event.medium not in _DEVICE or event.group_idx != self._group:
            return
        gone = [block for block_hash in event.block_hashes if (block := self._blocks.pop(block_hash, None)) is not None]
        self._tokens -= len(gone) * self._size
        self._cache.remove([block_hash for block in gone for block_hash in block.hashes])


def _keys(event: BlockStored, index: int) -> Any:
    """What the hash of a block depends on beside its tokens."""
    keys = event.extra_keys
    if not isinstance(keys, list):
        return keys
    return keys[index] if index < len(keys) else None


def _salt(keys: Any) -> bytes | None:
    """The salt among a first block's keys, empty if there are none; None if they are not what this router sends."""
    if not keys:
        return b""
    try:
        return b64decode(keys[0], validate=True) if len(keys) == 1 and isinstance(keys[0], str) else None
    except (KeyError, TypeError, ValueError):
        return None


def _pack(token_ids: Sequence[int]) -> bytes:
    try:
        return pack(token_ids)
    except (OverflowError, TypeError):
        raise BadEventError("a token is not one") from None
