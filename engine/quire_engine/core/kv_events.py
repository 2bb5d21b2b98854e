"""The changes of the prefix cache that routers hear of."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from quire_proto.hashing import HASH_BYTES

from quire_engine.core.block_pool import UNBOUNDED_TOKENS, BlockStored, KVCacheEvent, KVCacheGroup


class KVEventPublisher:
    """Collects the events of pools in order, until they are taken out of ``events``. ``emit`` adds one.

    Of several groups of layers it publishes only one, so that routers get one event per block of a prompt: the group
    with the largest window, which bounds the cached prefix of a request. ``suffixes`` are the ends of names in each of
    ``groups``.
    """

    def __init__(self, groups: Sequence[KVCacheGroup], suffixes: Sequence[bytes]) -> None:
        self.events: list[KVCacheEvent] = []
        windows = [UNBOUNDED_TOKENS if group.window is None else group.window for group in groups]
        self._suffix = suffixes[windows.index(max(windows))]
        self.emit: Callable[[KVCacheEvent], None] = self.events.append if len(groups) == 1 else self._emit_published

    def published(self, stored: Sequence[BlockStored]) -> list[BlockStored]:
        """Returns the ``stored`` blocks that events have reported."""
        published = [each for each in stored if each.block_hash.endswith(self._suffix)]
        return (
            [BlockStored(each.block_hash[:HASH_BYTES], each.tier) for each in published] if self._suffix else published
        )

    def _emit_published(self, event: KVCacheEvent) -> None:
        if event.block_hash.endswith(self._suffix):
            self.events.append(replace(event, block_hash=event.block_hash[:HASH_BYTES]))
