"""``LoadMessage``: what one router has in flight, as it is published to the other routers. Does no I/O."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Self

from google.protobuf.message import DecodeError
from quire.v1 import load_pb2
from quire_proto.hashing import HASH_BYTES

from quire_router.placement.engine_table import EngineTable
from quire_router.placement.prefix_index import PrefixIndex

MAX_PROMPT_HASHES = 64
"""Blocks of one prompt that are published. Most of what prompts share is at their beginning."""

MAX_HASHES = 4096
"""Blocks of all prompts in one message: 64 KiB of hashes."""


@dataclass(frozen=True, slots=True)
class SpeculativePrefix:
    """Blocks that an engine will have soon, by their hashes; they follow each other in one prompt."""

    engine_id: str
    hashes: tuple[bytes, ...]


class SpeculativeBlocks:
    """Blocks that engines will have soon, because a router sent a prompt there: published to the other routers, and
    received into the ``index``, whose ``clock`` counts seconds. An engine reports them when the prompt is computed.
    Until then the next prompt with the same prefix may come to any router, and a router without this information would
    send it elsewhere, where the prefix would be computed again. They are the index's ``SpeculativeEntries``.
    ``on_remote`` is called with those of other routers, for engines that will not report them.
    """

    def __init__(self, table: EngineTable, index: PrefixIndex, clock: Callable[[], float] = monotonic) -> None:
        self._table = table
        self._index = index
        self._clock = clock
        self.on_remote: Callable[[str, Sequence[bytes]], None] = lambda _engine_id, _hashes: None
        self._unpublished: deque[SpeculativePrefix] = deque()
        self._num_hashes = 0

    def add(self, engine_id: str, names: Iterable[bytes]) -> None:
        """Records that this router sent a prompt of which these blocks are new to the engine. Of one prompt the first
        ``MAX_PROMPT_HASHES`` are kept, and of all the newest, ``MAX_HASHES`` together.
        """
        expectation = SpeculativePrefix(engine_id, tuple(islice(names, MAX_PROMPT_HASHES)))
        if expectation.hashes:
            self._unpublished.appendleft(expectation)
            self._num_hashes += len(expectation.hashes)
        while self._num_hashes > MAX_HASHES:
            self._num_hashes -= len(self._unpublished.pop().hashes)

    def pop_all(self) -> tuple[SpeculativePrefix, ...]:
        """Returns what was added since the last call, newest first, and forgets it."""
        taken = tuple(self._unpublished)
        self._unpublished.clear()
        self._num_hashes = 0
        return taken

    def apply_remote(self, expectations: Iterable[SpeculativePrefix]) -> None:
        """Adds another router's blocks to the index. Ignores engines that are not known here."""
        for expectation in expectations:
            row = self._table.row_of(expectation.engine_id)
            if row >= 0:
                self._index.add_speculative(row, expectation.hashes, self._clock())
                self.on_remote(expectation.engine_id, expectation.hashes)


Counts = tuple[int, int, int]
"""Of one engine: requests in flight, tokens of their prompts that are pending, sequences that are decoding."""

VERSION = 1
MAX_PAYLOAD_BYTES = 2**20
_MAX_UINT32 = 2**32 - 1
_ROUTER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class InvalidLoadMessageError(ValueError):
    """A payload is not a share, or one of a version that is not known."""


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """What one router has in flight on each engine, by its id."""

    engines: Mapping[str, Counts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadMessage:
    """One router's load, with its ``sequence`` among that router's messages. ``speculative`` blocks of engines that are
    not in ``load`` are not encoded.
    """

    router_id: str
    sequence: int
    load: RouterLoad
    speculative: tuple[SpeculativePrefix, ...] = ()

    def encode(self) -> bytes:
        """The payload; numbers that do not fit are clamped."""
        return self.encode_load() + self.encode_speculative()

    def encode_load(self) -> bytes:
        """The payload without the speculative blocks."""
        engines = self.load.engines
        requests, pending_tokens, decoding = zip(*engines.values(), strict=True) if engines else ((), (), ())
        return load_pb2.LoadShare(
            version=VERSION,
            router_id=self.router_id,
            sequence=self.sequence,
            engine_ids=engines,
            requests=requests,
            pending_tokens=[min(tokens, _MAX_UINT32) for tokens in pending_tokens],
            decoding=decoding,
        ).SerializeToString()

    def encode_speculative(self) -> bytes:
        """The rest of the payload after ``encode_load``: protobuf reads two concatenated messages as one."""
        if not self.speculative:
            return b""
        places = {engine_id: place for place, engine_id in enumerate(self.load.engines)}
        prefixes = [each for each in self.speculative if each.engine_id in places]
        return load_pb2.LoadShare(
            expected_engines=[places[each.engine_id] for each in prefixes],
            expected_blocks=[len(each.hashes) for each in prefixes],
            expected_names=b"".join(name for each in prefixes for name in each.hashes),
        ).SerializeToString()

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Raises ``InvalidLoadMessageError``, whatever the bytes are."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise InvalidLoadMessageError("it is too long")
        try:
            share = load_pb2.LoadShare.FromString(payload)
        except DecodeError:
            raise InvalidLoadMessageError("it is not a message") from None
        if share.version != VERSION or not _ROUTER_ID.fullmatch(share.router_id):
            raise InvalidLoadMessageError("it has another version, or no sender")
        try:
            counts = zip(share.requests, share.pending_tokens, share.decoding, strict=True)
            engines = dict(zip(share.engine_ids, counts, strict=True))
        except ValueError:
            raise InvalidLoadMessageError("its columns differ in length") from None
        return cls(share.router_id, share.sequence, RouterLoad(engines), tuple(_speculative(share)))


def _speculative(share: load_pb2.LoadShare) -> Iterator[SpeculativePrefix]:
    """Prefixes whose engine is in the share. None if the columns do not fit together or are too long; the load in the
    share is valid nevertheless.
    """
    engines, blocks, names = share.expected_engines, share.expected_blocks, share.expected_names
    most = min(len(names) // HASH_BYTES, MAX_HASHES)
    if len(engines) != len(blocks) or len(blocks) > most or sum(blocks) * HASH_BYTES != len(names):
        return
    if sum(blocks) > most:
        return
    each = (names[start : start + HASH_BYTES] for start in range(0, len(names), HASH_BYTES))
    for engine, count in zip(engines, blocks, strict=True):
        expected = tuple(islice(each, count))
        if engine < len(share.engine_ids):
            yield SpeculativePrefix(share.engine_ids[engine], expected)
