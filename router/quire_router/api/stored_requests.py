"""Stored requests of either API, run by this router or another one: whom they belong to, and their status."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from quire_proto.errors import QuireError, invalid
from quire_proto.sampling import FinishReason
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.api.auth import Identity
from quire_router.api.multi_prompt import total_usage
from quire_router.api.prepared_request import PreparedRequest, Runner
from quire_router.core.errors import prompts_lost, request_not_found, unknown_model
from quire_router.core.generation import NO_USAGE, GenerationRequest, StreamCursor, Usage
from quire_router.core.response_options import ResponseOptions
from quire_router.core.tenant_ids import owns
from quire_router.journal.base import RequestRecord, decode_error

_ID = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)?([A-Za-z0-9_-]{1,64})", re.ASCII)
_CURSOR_CHARACTERS = 11  # of one choice
# Seconds. A client may arrive here before the router that it comes from has written its record. Requests of other
# tenants take as long to refuse as unknown ones.
_RETRY_DELAYS = (0.05, 0.1, 0.0)
_MAX_CONCURRENT_READS = 16  # of one request's records
_POLLS, _POLL_INTERVAL = 20, 0.05  # seconds between reads of a record that is being written


class RequestStatus(StrEnum):
    """The state of a request."""

    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request as the records of its prompts, in order; some of them may not be written yet."""

    records: tuple[RequestRecord, ...]

    @property
    def first(self) -> GenerationRequest:
        """The generation of the first prompt, which has the ids of the others in ``parts``."""
        return self.records[0].generation

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of all prompts."""
        return self.first.parts or (self.first.request_id,)

    @property
    def status(self) -> RequestStatus:
        """The status; of several prompts one that failed or was cancelled counts for all."""
        reasons = [record.finish_reason for record in self.records]
        if FinishReason.ERROR in reasons:
            return RequestStatus.FAILED
        if FinishReason.ABORT in reasons:
            return RequestStatus.CANCELLED
        is_running = None in reasons or len(reasons) < len(self.request_ids)
        return RequestStatus.RUNNING if is_running else RequestStatus.COMPLETED

    @property
    def error(self) -> QuireError | None:
        """The error that the request ended with; None if it did not fail."""
        failed = [record for record in self.records if record.finish_reason is FinishReason.ERROR]
        return decode_error(failed[0].error) if failed else None

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        return total_usage([_usage(record) for record in self.records])


def _usage(record: RequestRecord) -> Usage:
    """Counts the recorded deltas where the record has no usage: its router did not write the request's end."""
    if record.usage != NO_USAGE:
        return record.usage
    generated = sum(len(delta.token_ids) for delta in record.deltas)
    return Usage(len(record.generation.prompt_token_ids), generated)


class RequestStore:
    """Finds stored requests. Those of other tenants are not found."""

    def __init__(self, runner: Runner, tokenizers: Mapping[str, ModelTokenizer]) -> None:
        self._runner = runner
        self._tokenizers = tokenizers

    async def get(self, request_id: str, caller: Identity) -> StoredRequest:
        """Returns the request of this id, with REST's prefix or not. Raises ``QuireError``, NOT_FOUND among others."""
        name = _parse_id(request_id)
        for delay in _RETRY_DELAYS:
            record = await self._runner.record(name)
            if record is not None and owns(caller.tenant, record.generation.tenant):
                return await self._with_other_prompts(record)
            await asyncio.sleep(delay)
        raise request_not_found()

    async def status(self, request_id: str, caller: Identity) -> StoredRequest:
        """As ``get``, but the records have neither prompts nor deltas."""
        name = _parse_id(request_id)
        for delay in _RETRY_DELAYS:
            (record,) = await self._runner.statuses([name], confirm_missing=not delay)
            if record is not None and owns(caller.tenant, record.generation.tenant):
                parts = record.generation.parts[1:]
                others = await self._runner.statuses(parts, confirm_missing=False) if parts else []
                return StoredRequest((record, *(other for other in others if other is not None)))
            await asyncio.sleep(delay)
        raise request_not_found()

    async def exists(self, request_id: str) -> bool:
        """Returns whether there is a record of exactly this id. Raises ``QuireError``."""
        (record,) = await self._runner.statuses([request_id], confirm_missing=False)
        return record is not None

    async def peek(self, request_id: str) -> StoredRequest | None:
        """Returns the request of exactly this id at once, or None. Raises ``QuireError``."""
        record = await self._runner.record(request_id)
        return None if record is None else await self._with_other_prompts(record)

    async def wait_written(
        self, stored: StoredRequest, caller: Identity, *, all_prompts: bool = False
    ) -> StoredRequest:
        """Returns the request with the records of all its prompts, or with those that are written within a second.
        Raises ``QuireError``; with ``all_prompts`` NOT_FOUND when some are missing: their router died before it wrote
        them, or they were refused.
        """
        for _ in range(_POLLS):
            if len(stored.records) == len(stored.request_ids):
                return stored
            await asyncio.sleep(_POLL_INTERVAL)
            stored = await self.get(stored.first.request_id, caller)
        if all_prompts and len(stored.records) != len(stored.request_ids):
            raise prompts_lost()
        return stored

    def prepare(self, stored: StoredRequest) -> PreparedRequest:
        """Returns what writing the response again needs. Raises ``QuireError``."""
        tokenizer = self._tokenizers.get(stored.first.model)
        if tokenizer is None:
            raise unknown_model(stored.first.model)
        generations = tuple(record.generation for record in stored.records)
        return PreparedRequest(generations, ResponseOptions.from_record(stored.first), tokenizer, event_ids=True)

    async def _with_other_prompts(self, record: RequestRecord) -> StoredRequest:
        parts, others = record.generation.parts[1:], list[RequestRecord | None]()
        for start in range(0, len(parts), _MAX_CONCURRENT_READS):
            others += await asyncio.gather(*map(self._runner.record, parts[start : start + _MAX_CONCURRENT_READS]))
        return StoredRequest((record, *(other for other in others if other is not None)))


def _parse_id(request_id: str) -> str:
    """Returns the id without REST's prefix. Raises ``QuireError`` NOT_FOUND for what is no id."""
    match = _ID.fullmatch(request_id[:128])
    if match is None:
        raise request_not_found()
    return match[1]


def parse_cursor(text: str, stored: StoredRequest, choices: int) -> StreamCursor:
    """Returns the cursor that a client sent. Raises ``QuireError`` INVALID for what is no position in this response."""
    try:
        if len(text) > _CURSOR_CHARACTERS * choices + 1:
            raise ValueError("this is longer than any place in the answer")
        cursor = StreamCursor.parse(text, choices)
        _check_within(cursor, stored)
    except ValueError:
        raise no_such_place() from None
    return cursor


def no_such_place() -> QuireError:
    """Returns the error of an event id that no event of the answer has."""
    return invalid("after", "This is not a position in the answer to this request.")


def _check_within(cursor: StreamCursor, stored: StoredRequest) -> None:
    """Raises ``ValueError`` for a cursor beyond a choice that has ended, or behind the end of one that has not. (Of a
    choice that runs, a client may have more tokens than are recorded.)
    """
    ends = [choice for record in stored.records for choice in record.choices]
    for index, choice in enumerate(ends):
        beyond = cursor.position(index) > len(choice.token_ids)
        early = cursor.ended(index) and cursor.position(index) < len(choice.token_ids)
        if early or (beyond and choice.finish_reason is not None):
            raise ValueError("the answer has no such place")
