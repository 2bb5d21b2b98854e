"""What a flush writes of a request, as commands for Redis. Does no I/O."""

from collections.abc import Iterable

from quire_router.generation import GenerationRequest
from quire_router.journal import scripts
from quire_router.journal.codec import TOKEN_BYTES, encode_request_fields, encode_usage
from quire_router.journal.keys import BACKGROUND, keys
from quire_router.journal.pending import BufferedRequest, BufferedWrite, RequestEnd
from quire_router.journal.settings import JournalSettings
from quire_router.journal.wire import encode_command


class CommandBuilder:
    """Makes the commands of writes, with the times of ``settings``. With ``by_source`` they bring their scripts along,
    which Redis may have forgotten.
    """

    def __init__(self, settings: JournalSettings) -> None:
        self.send_source = False
        self._settings = settings

    def build(self, write: BufferedWrite) -> list[bytes]:
        """The commands. A background request that goes on is noted in the index by the first, before it is opened, and
        one that has ended is to be taken out with ``unlist`` once it is known that it was written.
        """
        made = [self._index(write)] if enters_index(write) else []
        if write.opens:
            made.append(self._open(write.request))
        made.append(self._append(write))
        if write.end is not None:
            made.append(self._finish(write, write.end))
        if write.releases:
            made.append(self._release(write.request))
        return made

    def _open(self, request: BufferedRequest) -> bytes:
        return self._evaluate(scripts.OPEN, request, *open_arguments(request.generation, self._settings))

    def _append(self, write: BufferedWrite) -> bytes:
        grown = (
            write.start * TOKEN_BYTES,
            write.packed,
            write.checksum,
            "" if write.num_tokens is None else write.num_tokens,
        )
        terms = self._settings.lease_ms, self._settings.running_ttl_of(write.request.generation)
        return self._evaluate(scripts.APPEND, write.request, *terms, *grown)

    def _finish(self, write: BufferedWrite, end: RequestEnd) -> bytes:
        text = end.error.encode("utf-8", "surrogatepass")
        kept = self._settings.retention_of(write.request.generation)
        terms = kept, end.reason.value, text, encode_usage(end.usage), write.stop * TOKEN_BYTES
        return self._evaluate(scripts.FINISH, write.request, *terms)

    def _release(self, request: BufferedRequest) -> bytes:
        retention = self._settings.retention_of(request.generation)
        kept = self._settings.running_ttl_s if request.generation.background else retention
        return self._evaluate(scripts.RELEASE, request, kept, retention)

    def _index(self, write: BufferedWrite) -> bytes:
        """Notes a background request in the index. It is in a slot of its own, so it can be behind or wrong:
        ``orphans`` looks at each record.
        """
        until = 0 if write.releases else self._settings.lease_ms
        terms = write.request.lease.request_id, until, self._settings.running_ttl_s
        return encode_command(*self._script_reference(scripts.INDEX), 1, BACKGROUND, *terms)

    def _evaluate(self, script: scripts.LuaScript, request: BufferedRequest, *arguments: str | int | bytes) -> bytes:
        lease = request.lease
        return encode_command(
            *self._script_reference(script), 2, *keys(lease.request_id), lease.owner, lease.epoch, *arguments
        )

    def _script_reference(self, script: scripts.LuaScript) -> tuple[str, str]:
        return ("EVAL", script.source) if self.send_source else ("EVALSHA", script.sha)


def open_arguments(generation: GenerationRequest, settings: JournalSettings) -> tuple[str | int | bytes, ...]:
    """What ``open.lua`` takes after owner and epoch."""
    retention = "" if generation.retention is None else settings.retention_of(generation)
    return settings.lease_ms, settings.running_ttl_of(generation), *encode_request_fields(generation), retention


def enters_index(write: BufferedWrite) -> bool:
    """Whether the request is in the index when this is written: also what begins and ends with it, as its end may be
    refused.
    """
    return write.request.generation.background and (write.end is None or write.opens)


def leaves_index(write: BufferedWrite) -> bool:
    """Whether the request leaves the index once this is written."""
    return write.request.generation.background and write.end is not None


def index_removal(writes: Iterable[BufferedWrite]) -> bytes:
    """Removes requests from the index, once their ends are known to be written: Redis executes a ZREM also while it
    refuses writes for lack of memory, and ``orphans`` does not find a request that is neither ended nor in the index.
    What stays in the index, because this fails, ``orphans`` removes.
    """
    return encode_command("ZREM", BACKGROUND, *(write.request.lease.request_id for write in writes))
