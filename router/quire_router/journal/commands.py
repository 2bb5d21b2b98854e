"""What a flush writes of a request, as commands for Redis. Does no I/O."""

from quire_router.journal import scripts
from quire_router.journal.codec import TOKEN_BYTES, encode_opening, encode_usage
from quire_router.journal.keys import BACKGROUND, keys
from quire_router.journal.pending import End, Entry, Write
from quire_router.journal.settings import JournalSettings
from quire_router.journal.wire import pack


class Commands:
    """Makes the commands of writes, with the times of ``settings``."""

    def __init__(self, settings: JournalSettings) -> None:
        self._terms = settings.lease_ms, settings.running_s
        self._retention = settings.retention_s

    def of(self, write: Write) -> list[bytes]:
        """The commands, of which the last is the index' own when the request is a background one."""
        made = [self._open(write.entry)] if write.opens else []
        made.append(self._append(write))
        if write.end is not None:
            made.append(self._finish(write, write.end))
        if write.releases:
            made.append(self._release(write.entry))
        if write.entry.generation.background:
            made.append(self._index(write))
        return made

    def _open(self, entry: Entry) -> bytes:
        return _evaluate(scripts.OPEN, entry, *self._terms, *encode_opening(entry.generation))

    def _append(self, write: Write) -> bytes:
        grown = write.start * TOKEN_BYTES, write.packed, write.checksum
        return _evaluate(scripts.APPEND, write.entry, *self._terms, *grown)

    def _finish(self, write: Write, end: End) -> bytes:
        text = end.error.encode("utf-8", "surrogatepass")
        terms = self._retention, end.reason.value, text, encode_usage(end.usage), write.stop * TOKEN_BYTES
        return _evaluate(scripts.FINISH, write.entry, *terms)

    def _release(self, entry: Entry) -> bytes:
        _, running = self._terms
        kept = running if entry.generation.background else self._retention
        return _evaluate(scripts.RELEASE, entry, kept, self._retention)

    def _index(self, write: Write) -> bytes:
        """Notes a background request in the index. It is in a slot of its own, so it can be behind or wrong:
        ``orphans`` looks at each record.
        """
        request_id, (lease, ttl) = write.entry.lease.request_id, self._terms
        if write.end is not None:
            return pack("ZREM", BACKGROUND, request_id)
        return pack("EVALSHA", scripts.INDEX.sha, 1, BACKGROUND, request_id, 0 if write.releases else lease, ttl)


def _evaluate(script: scripts.Script, entry: Entry, *arguments: str | int | bytes) -> bytes:
    lease = entry.lease
    return pack("EVALSHA", script.sha, 2, *keys(lease.request_id), lease.owner, lease.epoch, *arguments)
