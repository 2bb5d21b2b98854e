"""What a flush writes of a request, as commands for Redis. Does no I/O."""

from collections.abc import Iterable

from quire_router.generation import GenerationRequest
from quire_router.journal import scripts
from quire_router.journal.codec import TOKEN_BYTES, encode_opening, encode_usage
from quire_router.journal.keys import BACKGROUND, keys
from quire_router.journal.pending import End, Entry, Write
from quire_router.journal.settings import JournalSettings
from quire_router.journal.wire import pack


class Commands:
    """Makes the commands of writes, with the times of ``settings``. With ``by_source`` they bring their scripts along,
    which Redis may have forgotten.
    """

    def __init__(self, settings: JournalSettings) -> None:
        self.by_source = False
        self._settings = settings

    def of(self, write: Write) -> list[bytes]:
        """The commands. A background request that goes on is noted in the index by the first, before it is opened, and
        one that has ended is to be taken out with ``unlist`` once it is known that it was written.
        """
        made = [self._index(write)] if is_listed(write) else []
        if write.opens:
            made.append(self._open(write.entry))
        made.append(self._append(write))
        if write.end is not None:
            made.append(self._finish(write, write.end))
        if write.releases:
            made.append(self._release(write.entry))
        return made

    def _open(self, entry: Entry) -> bytes:
        return self._evaluate(scripts.OPEN, entry, *opening(entry.generation, self._settings))

    def _append(self, write: Write) -> bytes:
        grown = write.start * TOKEN_BYTES, write.packed, write.checksum, "" if write.told is None else write.told
        terms = self._settings.lease_ms, self._settings.running_of(write.entry.generation)
        return self._evaluate(scripts.APPEND, write.entry, *terms, *grown)

    def _finish(self, write: Write, end: End) -> bytes:
        text = end.error.encode("utf-8", "surrogatepass")
        kept = self._settings.retention_of(write.entry.generation)
        terms = kept, end.reason.value, text, encode_usage(end.usage), write.stop * TOKEN_BYTES
        return self._evaluate(scripts.FINISH, write.entry, *terms)

    def _release(self, entry: Entry) -> bytes:
        retention = self._settings.retention_of(entry.generation)
        kept = self._settings.running_s if entry.generation.background else retention
        return self._evaluate(scripts.RELEASE, entry, kept, retention)

    def _index(self, write: Write) -> bytes:
        """Notes a background request in the index. It is in a slot of its own, so it can be behind or wrong:
        ``orphans`` looks at each record.
        """
        until = 0 if write.releases else self._settings.lease_ms
        terms = write.entry.lease.request_id, until, self._settings.running_s
        return pack(*self._named(scripts.INDEX), 1, BACKGROUND, *terms)

    def _evaluate(self, script: scripts.Script, entry: Entry, *arguments: str | int | bytes) -> bytes:
        lease = entry.lease
        return pack(*self._named(script), 2, *keys(lease.request_id), lease.owner, lease.epoch, *arguments)

    def _named(self, script: scripts.Script) -> tuple[str, str]:
        return ("EVAL", script.source) if self.by_source else ("EVALSHA", script.sha)


def opening(generation: GenerationRequest, settings: JournalSettings) -> tuple[str | int | bytes, ...]:
    """What ``open.lua`` takes after owner and epoch."""
    retention = "" if generation.retention is None else settings.retention_of(generation)
    return settings.lease_ms, settings.running_of(generation), *encode_opening(generation), retention


def is_listed(write: Write) -> bool:
    """Whether the request is in the index when this is written: also what begins and ends with it, as its end may be
    refused.
    """
    return write.entry.generation.background and (write.end is None or write.opens)


def is_unlisted(write: Write) -> bool:
    """Whether the request leaves the index once this is written."""
    return write.entry.generation.background and write.end is not None


def unlist(writes: Iterable[Write]) -> bytes:
    """Removes requests from the index, once their ends are known to be written: Redis executes a ZREM also while it
    refuses writes for lack of memory, and ``orphans`` does not find a request that is neither ended nor in the index.
    What stays in the index, because this fails, ``orphans`` removes.
    """
    return pack("ZREM", BACKGROUND, *(write.entry.lease.request_id for write in writes))
