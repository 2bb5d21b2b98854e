"""``Response``: the deltas that are about to be written, and the three ways to open one: a request is run, is run only
if its idempotency key is new, or is resumed. Where a request asks for it, each choice begins with the prompt's text.
"""

import asyncio
from collections.abc import AsyncGenerator, Container, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from quire_proto.errors import internal
from quire_proto.text.detokenizer import REPLACEMENT, OutputTextStream
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.api.auth import Identity
from quire_router.api.multi_prompt import MultiPromptRunner
from quire_router.api.prepared_request import PreparedRequest, Runner
from quire_router.api.stored_requests import RequestStore, StoredRequest, parse_cursor
from quire_router.api.validation import name_schema_at_fault
from quire_router.core.errors import key_conflict, key_unavailable
from quire_router.core.generation import Delta, GenerationRequest, OwnedDeltaStream, StreamCursor
from quire_router.journal.base import RequestRecord

_ATTEMPTS, _RETRY_INTERVAL = 5, 0.05  # seconds between attempts
_TOKENS_PER_TURN = 256  # of a prompt that is detokenised: a millisecond or two


@dataclass(slots=True)
class Response:
    """The request starts with the first ``anext`` of ``deltas``; the caller closes them. ``cursor`` is the client's
    position before the first delta that is not replayed. ``replayed`` says that the request had come before under the
    same idempotency key.
    """

    prepared: PreparedRequest
    deltas: AsyncGenerator[Delta]
    cursor: StreamCursor
    replayed: bool = False


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
            single = len(prepared.generations) == 1
            deltas = self._runner.run(prepared.first) if single else await self._prompts.run(prepared.generations)
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
        ``deadline`` in seconds since 1970. Raises ``QuireError`` INVALID for what is no such cursor.
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
        if (first.tenant, first.digest) != (second.tenant, second.digest):
            raise key_conflict()
        return stored

    async def _replay(self, prepared: PreparedRequest, stored: StoredRequest, caller: Identity) -> Response:
        """Returns the first request's response, in the form and within the time that the second asks for."""
        stored = await self._store.wait_written(stored, caller)
        first = {record.generation.request_id: record.generation for record in stored.records}
        generations = tuple(first.get(each.request_id, each) for each in prepared.generations)
        again = replace(prepared, generations=generations)
        deltas = await self._prompts.replay(generations, stored.records, prepared.first.deadline)
        answer = _response(again, deltas, StreamCursor(again.num_choices))
        answer.replayed = True
        return answer


def started_choices(cursor: StreamCursor, choices: int) -> Container[int]:
    """Returns the choices of which the client has had something."""
    return frozenset(index for index in range(choices) if cursor.begun(index))


def _response(prepared: PreparedRequest, deltas: AsyncGenerator[Delta], cursor: StreamCursor) -> Response:
    """Adds the prompt to each choice where it is echoed, and names the schema at fault where tools are constrained."""
    if prepared.first.echo:
        known = started_choices(cursor, prepared.num_choices)
        deltas = OwnedDeltaStream(
            with_prompt_echo(deltas, prepared.generations, prepared.tokenizer, known), deltas.aclose
        )
    structured = prepared.first.params.structured
    if prepared.response_options.tools and structured is not None:
        deltas = OwnedDeltaStream(name_schema_at_fault(deltas, structured.text), deltas.aclose)
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
    """Detokenises the prompt; yields to the event loop every ``_TOKENS_PER_TURN``."""
    output = tokenizer.new_output_stream((), (), skip_special_tokens=generation.skip_special_tokens)
    parts = []
    for start in range(0, len(generation.prompt_token_ids), _TOKENS_PER_TURN):
        parts.append(output.push(generation.prompt_token_ids[start : start + _TOKENS_PER_TURN]))
        await asyncio.sleep(0)
    return "".join(parts) + withheld(output)


def withheld(output: OutputTextStream) -> str:
    """Ends a prompt's text, without an unfinished character at its end: that belongs to the output."""
    return output.finish().rstrip(REPLACEMENT)
