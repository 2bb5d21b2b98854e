"""``Response``: an answer that is about to be written, and the three ways to come by one: a request is run, is run only
if it did not come before, or is resumed.
"""

import asyncio
from collections.abc import AsyncGenerator, Container, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.text.detokenizer import REPLACEMENT, OutputTextStream
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.api.auth import Identity
from quire_router.api.multi_prompt import MultiPromptRunner
from quire_router.api.prepared_request import PreparedRequest, Runner
from quire_router.api.stored_requests import RequestStore, StoredRequest, parse_cursor
from quire_router.api.validation import naming_schema_at_fault
from quire_router.core.generation import Delta, GenerationRequest, OwnedDeltaStream, StreamCursor
from quire_router.journal.base import RequestRecord

# The prompt's text before each choice's own, where a request asks for it back.


_TOKENS_PER_TURN = 256  # tokens: a millisecond or two


async def with_prompt_echo(
    deltas: AsyncGenerator[Delta],
    generations: Sequence[GenerationRequest],
    text: ModelTokenizer,
    begun: Container[int] = (),
) -> AsyncGenerator[Delta]:
    """The same pieces, but the first of each choice begins with its prompt, unless the reader of the answer has
    ``begun`` it. Closes ``deltas``.
    """
    prompts: dict[int, str] = {}
    opened: set[int] = set()
    n = generations[0].params.n
    async with aclosing(deltas):
        async for delta in deltas:
            if delta.index in opened or delta.index in begun:
                yield delta
                continue
            opened.add(delta.index)
            number = delta.index // n
            if number not in prompts:
                prompts[number] = await _prompt_text(generations[number], text)
            yield replace(delta, text=prompts[number] + delta.text, replayed=False)


async def _prompt_text(generation: GenerationRequest, text: ModelTokenizer) -> str:
    """What the tokens of the prompt say. Lets other work go on meanwhile."""
    output = text.new_output_stream((), (), skip_special_tokens=generation.skip_special_tokens)
    parts = []
    for start in range(0, len(generation.prompt_token_ids), _TOKENS_PER_TURN):
        parts.append(output.push(generation.prompt_token_ids[start : start + _TOKENS_PER_TURN]))
        await asyncio.sleep(0)
    return "".join(parts) + withheld(output)


def withheld(output: OutputTextStream) -> str:
    """The end of a prompt's text, but for a character that it ends inside of: that is the output's."""
    return output.finish().rstrip(REPLACEMENT)


_ATTEMPTS, _RETRY_INTERVAL = 5, 0.05  # seconds between attempts
_RETRY_AFTER = 1.0  # seconds


@dataclass(slots=True)
class Response:
    """``deltas`` are the answer's pieces, which begin to be made when the first is asked for; whoever is given them
    closes them. ``mark`` is where its reader stands before the first that is not told. It is
    ``replayed`` where the request had come before under the same key.
    """

    prepared: PreparedRequest
    deltas: AsyncGenerator[Delta]
    cursor: StreamCursor
    replayed: bool = False


class ResponseOpener:
    """Makes answers. Raises ``QuireError`` as ``Runner`` does."""

    def __init__(self, runner: Runner, multi_prompt: MultiPromptRunner, archive: RequestStore) -> None:
        self._single_prompt = runner
        self._runner = multi_prompt
        self._store = archive

    async def open(self, admitted: PreparedRequest, caller: Identity) -> Response:
        """The answer to a new request, or, if it has a key and came before, the first one's. Raises ``QuireError``
        CONFLICT when another request had the key.
        """
        if not admitted.first.digest:
            alone = len(admitted.generations) == 1
            answer = self._single_prompt.run(admitted.first) if alone else await self._runner.run(admitted.generations)
            return _response(admitted, answer, StreamCursor(admitted.num_choices))
        for _ in range(_ATTEMPTS):
            deltas = await self._runner.run_once(admitted.generations)
            if deltas is not None:
                return _response(admitted, deltas, StreamCursor(admitted.num_choices))
            earlier = await self._find_existing(admitted)
            if earlier is not None:
                return await self._replay(admitted, earlier, caller)
            await asyncio.sleep(_RETRY_INTERVAL)  # it is forgotten just now
        raise _key_unavailable()

    async def start_background(self, admitted: PreparedRequest) -> tuple[StoredRequest, bool]:
        """Begins a background request, unless it came before under its key; how it is with it, and whether it came
        before. Raises as ``open``.
        """
        for _ in range(_ATTEMPTS):
            if await self._runner.start(admitted.first):
                return StoredRequest((RequestRecord(admitted.first, "", 0, []),)), False
            earlier = await self._find_existing(admitted)
            if earlier is not None:
                return earlier, True
            await asyncio.sleep(_RETRY_INTERVAL)
        raise _key_unavailable()

    async def resume(
        self, earlier: StoredRequest, after: str, caller: Identity, deadline: float | None = None
    ) -> Response:
        """The answer to an earlier request from where the mark ``after`` says, empty for the beginning, until
        ``deadline``. Raises ``QuireError`` INVALID for what is no such mark.
        """
        earlier = await self._store.whole(earlier, caller)
        admitted = self._store.prepare(earlier)
        mark = parse_cursor(after, earlier, admitted.num_choices)
        return _response(admitted, self._runner.resume(earlier.records, mark, deadline), mark)

    async def _find_existing(self, admitted: PreparedRequest) -> StoredRequest | None:
        """The request that came first under the key of this one; None when it cannot be found (any more)."""
        if not admitted.first.digest:
            raise internal()  # an id of chance that is taken
        earlier = await self._store.peek(admitted.first.request_id)
        if earlier is None:
            return None
        first, second = earlier.first, admitted.first
        if (first.tenant, first.digest) != (second.tenant, second.digest):
            message = "This idempotency key came with another request before."
            raise QuireError(ErrorCode.CONFLICT, message, param="idempotency-key")
        return earlier

    async def _replay(self, admitted: PreparedRequest, earlier: StoredRequest, caller: Identity) -> Response:
        """The first one's answer, in the form and within the time that the second asks for."""
        earlier = await self._store.settled(earlier, caller)
        first = {record.generation.request_id: record.generation for record in earlier.records}
        generations = tuple(first.get(each.request_id, each) for each in admitted.generations)
        again = replace(admitted, generations=generations)
        deltas = await self._runner.replay(generations, earlier.records, admitted.first.deadline)
        answer = _response(again, deltas, StreamCursor(again.num_choices))
        answer.replayed = True
        return answer


def begun_choices(mark: StreamCursor, choices: int) -> Container[int]:
    """The choices of which something was told before ``mark``."""
    return frozenset(index for index in range(choices) if mark.begun(index))


def _response(admitted: PreparedRequest, deltas: AsyncGenerator[Delta], mark: StreamCursor) -> Response:
    """Choices begin with their prompt where it is echoed."""
    if admitted.first.echo:
        known = begun_choices(mark, admitted.num_choices)
        deltas = OwnedDeltaStream(with_prompt_echo(deltas, admitted.generations, admitted.text, known), deltas.aclose)
    structured = admitted.first.params.structured
    if admitted.response_options.tools and structured is not None:
        deltas = OwnedDeltaStream(naming_schema_at_fault(deltas, structured.text), deltas.aclose)
    return Response(admitted, deltas, mark)


def _key_unavailable() -> QuireError:
    message = "The request of this idempotency key is neither to be begun nor to be found now."
    return QuireError(ErrorCode.UNAVAILABLE, message, retry_after=_RETRY_AFTER)
