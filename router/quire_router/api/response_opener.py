"""``ResponseOpener``: how the response to a request begins. A request is run, is run only if its idempotency key is
new, is started in the background, or is resumed. Where it asks for that, each choice begins with the prompt's text.
"""

import asyncio
from collections.abc import AsyncGenerator, Container, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from quire_proto.errors import internal
from quire_proto.structured_output import StructuredKind
from quire_proto.text.detokenizer import REPLACEMENT, OutputTextStream
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.api.auth import Identity
from quire_router.api.multi_prompt import MultiPromptRunner
from quire_router.api.prepared_request import PreparedRequest, Runner
from quire_router.api.stored_requests import RequestStore, StoredRequest, parse_cursor
from quire_router.api.tools_and_reasoning import name_schema_at_fault
from quire_router.core.errors import key_conflict, key_unavailable
from quire_router.core.generation import Delta, GenerationRequest, OwnedDeltaStream, StreamCursor
from quire_router.core.tenant_ids import owns
from quire_router.journal.base import RequestRecord

_ATTEMPTS, _RETRY_INTERVAL = 5, 0.05  # seconds between attempts
_TOKENS_PER_TURN = 256  # of a prompt that is detokenised: a millisecond or two


PENDING: Final = "pending"
"""The value of the header ``x-quire-journal``, of the gRPC metadata ``quire-journal``, and of the field
``quire_journal`` in the last event with data: the end of the answer could not be stored in time (``Delta.pending``).
"""


@dataclass(slots=True)
class Response:
    """The request starts with the first ``anext`` of ``deltas``; the caller closes them. ``cursor`` is the client's
    position before the first delta that is not replayed, and ``delivered`` what it has of that and the next ones, where
    its format counts that. ``replayed`` says that the request had come before under the same idempotency key.
    """

    prepared: PreparedRequest
    deltas: AsyncGenerator[Delta]
    cursor: StreamCursor
    replayed: bool = False
    delivered: int = 0


class ResponseOpener:
    """Opens responses. Raises ``QuireError`` as ``Runner`` does."""

    def __init__(self, runner: Runner, prompts: MultiPromptRunner, store: RequestStore) -> None:
        self._runner = runner
        self._prompts = prompts
        self._store = store

    async def open(self, prepared: PreparedRequest, caller: Identity) -> Response:
        """Returns the response to a new request, or that of the first request with its idempotency key. Raises
        ``QuireError`` CONFLICT when the first one was another request.
        """
        if not prepared.first.digest:
            deltas = await self.run(prepared.generations)
            return _response(prepared, deltas, StreamCursor(prepared.num_choices))
        for _ in range(_ATTEMPTS):
            new = await self._prompts.run_once(prepared.generations)
            if new is not None:
                return _response(prepared, new, StreamCursor(prepared.num_choices))
            stored = await self._find_existing(prepared)
            if stored is not None:
                return await self._replay(prepared, stored, caller)
            await asyncio.sleep(_RETRY_INTERVAL)  # its record expires just now
        raise key_unavailable()

    async def run(self, generations: Sequence[GenerationRequest]) -> AsyncGenerator[Delta]:
        """Returns the deltas of all prompts of a new request."""
        return self._runner.run(generations[0]) if len(generations) == 1 else await self._prompts.run(generations)

    async def start_background(self, prepared: PreparedRequest) -> tuple[StoredRequest, bool]:
        """Starts a background request, unless its idempotency key came before. Returns the request, and whether it came
        before. Raises as ``open``.
        """
        for _ in range(_ATTEMPTS):
            if await self._runner.start(prepared.first):
                return StoredRequest((RequestRecord(prepared.first, "", 0, []),)), False
            stored = await self._find_existing(prepared)
            if stored is not None:
                return stored, True
            await asyncio.sleep(_RETRY_INTERVAL)
        raise key_unavailable()

    async def resume(
        self, stored: StoredRequest, after: str, caller: Identity, deadline: float | None = None
    ) -> Response:
        """Returns the response to an earlier request from the cursor ``after`` on, empty for the beginning, until
        ``deadline`` by the monotonic clock. Raises ``QuireError`` INVALID for what is no such cursor.
        """
        stored = await self._store.wait_written(stored, caller, all_prompts=True)
        prepared = self._store.prepare(stored)
        cursor = parse_cursor(after, stored, prepared.num_choices)
        return _response(prepared, self._prompts.resume(stored.records, cursor, deadline), cursor)

    async def _find_existing(self, prepared: PreparedRequest) -> StoredRequest | None:
        """Returns the first request with this one's key; None when it is not found (any more). Raises as ``open``."""
        if not prepared.first.digest:
            raise internal()  # a random id that is taken
        stored = await self._store.peek(prepared.first.request_id)
        if stored is None:
            return None
        first, second = stored.first, prepared.first
        if not owns(second.tenant, first.tenant) or first.digest != second.digest:
            raise key_conflict()
        return stored

    async def _replay(self, prepared: PreparedRequest, stored: StoredRequest, caller: Identity) -> Response:
        """Returns the first request's response, in the form and within the time that the second asks for."""
        stored = await self._store.wait_written(stored, caller)
        first = {record.generation.request_id: record.generation for record in stored.records}
        generations = tuple(first.get(each.request_id, each) for each in prepared.generations)
        again = replace(prepared, generations=generations)
        deltas = await self._prompts.replay(generations, stored.records, prepared.first.ends_by)
        answer = _response(again, deltas, StreamCursor(again.num_choices))
        answer.replayed = True
        return answer


def started_choices(cursor: StreamCursor, choices: int) -> frozenset[int]:
    """Returns the choices of which the client has had something."""
    return frozenset(index for index in range(choices) if cursor.started(index))


def _response(prepared: PreparedRequest, deltas: AsyncGenerator[Delta], cursor: StreamCursor) -> Response:
    """Adds the prompt to each choice where it is echoed, and names the schema at fault where the grammar is the
    router's.
    """
    if prepared.first.echo:
        known = started_choices(cursor, prepared.num_choices)
        deltas = OwnedDeltaStream(
            with_prompt_echo(deltas, prepared.generations, prepared.tokenizer, known), deltas.aclose
        )
    structured, options = prepared.first.params.structured, prepared.response_options
    param = "tools" if options.tools else options.structured_param
    if structured is not None and structured.kind is StructuredKind.GRAMMAR and param:
        deltas = OwnedDeltaStream(name_schema_at_fault(deltas, structured.text, param), deltas.aclose)
    return Response(prepared, deltas, cursor)


async def with_prompt_echo(
    deltas: AsyncGenerator[Delta],
    generations: Sequence[GenerationRequest],
    tokenizer: ModelTokenizer,
    started: Container[int] = (),
) -> AsyncGenerator[Delta]:
    """Yields the same deltas, but the first of each choice begins with its prompt, unless the choice is among those
    that the client has had something of (``started``). Closes ``deltas``.
    """
    prompts: dict[int, str] = {}
    opened: set[int] = set()
    n = generations[0].params.n
    async with aclosing(deltas):
        async for delta in deltas:
            if delta.index in opened or delta.index in started:
                yield delta
                continue
            opened.add(delta.index)
            number = delta.index // n
            if number not in prompts:
                prompts[number] = await _prompt_text(generations[number], tokenizer)
            yield replace(delta, text=prompts[number] + delta.text, replayed=False)


async def _prompt_text(generation: GenerationRequest, tokenizer: ModelTokenizer) -> str:
    """Returns the prompt as it was sent, one in tokens detokenised; yields to the event loop every
    ``_TOKENS_PER_TURN``.
    """
    if generation.conversation:
        return generation.conversation
    output = tokenizer.new_output_stream((), (), skip_special_tokens=False)
    parts = []
    for start in range(0, len(generation.prompt_token_ids), _TOKENS_PER_TURN):
        parts.append(output.push(generation.prompt_token_ids[start : start + _TOKENS_PER_TURN]))
        await asyncio.sleep(0)
    return "".join(parts) + withheld(output)


def withheld(output: OutputTextStream) -> str:
    """Ends a prompt's text, without an unfinished character at its end: that belongs to the output."""
    return output.finish().rstrip(REPLACEMENT)
