"""Requests that came earlier, of either API, here or at another router: whose they are and how far they have come."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from quire_proto.errors import ErrorCode, QuireError, invalid
from quire_proto.sampling import FinishReason
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.api.auth import Identity
from quire_router.api.multi_prompt import MultiPromptRunner, total_usage
from quire_router.api.prepared_request import PreparedRequest, ResponseOptions
from quire_router.api.validation import unknown_model
from quire_router.core.generation import NO_USAGE, GenerationRequest, StreamCursor, Usage
from quire_router.journal.base import RequestRecord, decode_error

_ID = re.compile(r"(?:chatcmpl-|cmpl-)?([A-Za-z0-9_-]{1,64})", re.ASCII)
_CURSOR_CHARACTERS = 11  # of one choice
# A client may be here before the router that it comes from has written its request down. Requests of others take as
# long as those that never were.
_RETRY_DELAYS = (0.05, 0.1, 0.0)
_MAX_CONCURRENT_READS = 16  # records of one request's prompts that are read side by side
_POLLS, _POLL_INTERVAL = 20, 0.05  # seconds between looks for what is just being written


class RequestStatus(StrEnum):
    """How it is with a request."""

    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request by the records of its prompts, in order; some of them may not be written yet."""

    records: tuple[RequestRecord, ...]

    @property
    def first(self) -> GenerationRequest:
        """The first prompt's, which knows of the others."""
        return self.records[0].generation

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Those of all prompts."""
        return self.first.parts or (self.first.request_id,)

    @property
    def status(self) -> RequestStatus:
        """Of several prompts one that failed or was cancelled counts for all."""
        reasons = [record.finish_reason for record in self.records]
        if FinishReason.ERROR in reasons:
            return RequestStatus.FAILED
        if FinishReason.ABORT in reasons:
            return RequestStatus.CANCELLED
        is_running = None in reasons or len(reasons) < len(self.request_ids)
        return RequestStatus.RUNNING if is_running else RequestStatus.COMPLETED

    @property
    def error(self) -> QuireError | None:
        """What it ended with, if it failed."""
        failed = [record for record in self.records if record.finish_reason is FinishReason.ERROR]
        return decode_error(failed[0].error) if failed else None

    @property
    def usage(self) -> Usage:
        """So far."""
        return total_usage([_usage(record) for record in self.records])


def _usage(record: RequestRecord) -> Usage:
    """What was told, where nobody who ran the request said at its end what it consumed."""
    if record.usage != NO_USAGE:
        return record.usage
    made = sum(len(piece.token_ids) for piece in record.deltas)
    return Usage(len(record.generation.prompt_token_ids), made)


class RequestStore:
    """Finds requests that came earlier. Those of other callers are as unknown as those that never were."""

    def __init__(self, runner: MultiPromptRunner, texts: Mapping[str, ModelTokenizer]) -> None:
        self._runner = runner
        self._texts = texts

    async def get(self, request_id: str, caller: Identity) -> StoredRequest:
        """The request of this id, also in the form in which REST shows it. Raises ``QuireError``, NOT_FOUND among
        others.
        """
        name = _parse_id(request_id)
        for pause in _RETRY_DELAYS:
            record = await self._runner.record(name)
            if record is not None and record.generation.tenant == caller.tenant:
                return await self._with_other_prompts(record)
            await asyncio.sleep(pause)
        raise _request_not_found()

    async def status(self, request_id: str, caller: Identity) -> StoredRequest:
        """As ``find``, but only how it is with the request: its records have neither prompts nor pieces."""
        name = _parse_id(request_id)
        for pause in _RETRY_DELAYS:
            (record,) = await self._runner.statuses([name], surely=not pause)
            if record is not None and record.generation.tenant == caller.tenant:
                parts = record.generation.parts[1:]
                others = await self._runner.statuses(parts, surely=False) if parts else []
                return StoredRequest((record, *(other for other in others if other is not None)))
            await asyncio.sleep(pause)
        raise _request_not_found()

    async def peek(self, request_id: str) -> StoredRequest | None:
        """The request of this very id, if there is one. Raises ``QuireError``."""
        record = await self._runner.record(request_id)
        return None if record is None else await self._with_other_prompts(record)

    async def whole(self, earlier: StoredRequest, caller: Identity) -> StoredRequest:
        """The request with the records of all its prompts, once they are written. Raises ``QuireError``, NOT_FOUND when
        they never were: its router died first, or they were refused.
        """
        earlier = await self.settled(earlier, caller)
        if len(earlier.records) == len(earlier.request_ids):
            return earlier
        message = "Some prompts of this request were lost before they were written down."
        raise QuireError(ErrorCode.NOT_FOUND, message, param="request_id")

    async def settled(self, earlier: StoredRequest, caller: Identity) -> StoredRequest:
        """The request with the records of all its prompts, or of those that there are after a second. Raises
        ``QuireError``.
        """
        for _ in range(_POLLS):
            if len(earlier.records) == len(earlier.request_ids):
                break
            await asyncio.sleep(_POLL_INTERVAL)
            earlier = await self.get(earlier.first.request_id, caller)
        return earlier

    def prepare(self, earlier: StoredRequest) -> PreparedRequest:
        """What is needed to write its answer again. Raises ``QuireError``."""
        text = self._texts.get(earlier.first.model)
        if text is None:
            raise unknown_model(earlier.first.model)
        generations = tuple(record.generation for record in earlier.records)
        return PreparedRequest(generations, ResponseOptions.from_record(earlier.first), text, event_ids=True)

    async def _with_other_prompts(self, record: RequestRecord) -> StoredRequest:
        parts, others = record.generation.parts[1:], list[RequestRecord | None]()
        for start in range(0, len(parts), _MAX_CONCURRENT_READS):
            others += await asyncio.gather(*map(self._runner.record, parts[start : start + _MAX_CONCURRENT_READS]))
        return StoredRequest((record, *(other for other in others if other is not None)))


def _parse_id(request_id: str) -> str:
    """The id without what REST shows before it. Raises ``QuireError`` NOT_FOUND for what is none."""
    match = _ID.fullmatch(request_id[:128])
    if match is None:
        raise _request_not_found()
    return match[1]


def _request_not_found() -> QuireError:
    return QuireError(ErrorCode.NOT_FOUND, "There is no such request.", param="request_id")


def parse_cursor(text: str, earlier: StoredRequest, choices: int) -> StreamCursor:
    """Where the reader of an answer says it stands. Raises ``QuireError`` INVALID for what is no place in this one."""
    try:
        if len(text) > _CURSOR_CHARACTERS * choices + 1:
            raise ValueError("this is longer than any place in the answer")
        mark = StreamCursor.parse(text, choices)
        _check_within(mark, earlier)
    except ValueError:
        raise invalid("after", "This is no place in the answer to this request.") from None
    return mark


def _check_within(mark: StreamCursor, earlier: StoredRequest) -> None:
    """Nobody has read more of a choice than there is once it has ended, nor its end before that. (Of a choice that
    goes on a reader may know more than is written down.)
    """
    ends = [choice for record in earlier.records for choice in record.choices]
    for index, choice in enumerate(ends):
        beyond = mark.position(index) > len(choice.token_ids)
        early = mark.ended(index) and mark.position(index) < len(choice.token_ids)
        if early or (beyond and choice.finish_reason is not None):
            raise ValueError("the answer has no such place")
