"""A delta stream releases its resources once, however it is consumed, also if it is never read."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack

import pytest
from quire_proto.sampling import SamplingParams
from quire_router.api.multi_prompt import MultiPromptRunner
from quire_router.api.prepared_request import PreparedRequest
from quire_router.api.request_limits import ConcurrencyLimit
from quire_router.api.response_opener import ResponseOpener
from quire_router.core.generation import Delta, GenerationRequest, OwnedDeltaStream
from quire_router.core.response_options import ResponseOptions

from tests.support.byte_tokenizer import TOKENIZER, tokens


class Runner:
    """A runner that counts the streams that are not released."""

    def __init__(self) -> None:
        self.active = 0

    def run(self, _generation: GenerationRequest) -> AsyncGenerator[Delta, None]:
        return self._open()

    async def run_once(self, _generation: GenerationRequest, _siblings: object = None) -> AsyncGenerator[Delta, None]:
        return self._open()

    def _open(self) -> OwnedDeltaStream:
        self.active += 1
        return OwnedDeltaStream(_two_pieces(self._release), self._release)

    async def _release(self) -> None:
        self.active -= 1


async def _two_pieces(release: Callable[[], Awaitable[None]]) -> AsyncGenerator[Delta, None]:
    try:
        yield Delta("a", [97])
        yield Delta("b", [98])
    finally:
        await release()


async def _nothing(_stream: AsyncGenerator[Delta, None]) -> None:
    """Its reader never begins."""


async def _first(stream: AsyncGenerator[Delta, None]) -> None:
    await anext(stream)


async def _all(stream: AsyncGenerator[Delta, None]) -> None:
    assert [delta async for delta in stream]


async def _throw(stream: AsyncGenerator[Delta, None]) -> None:
    with pytest.raises(ValueError, match="reader"):
        await stream.athrow(ValueError("the reader failed"))


READERS = pytest.mark.parametrize("read", [_nothing, _first, _all, _throw])


@READERS
async def test_a_stream_is_released_once(read: Callable[[AsyncGenerator[Delta, None]], Awaitable[None]]) -> None:
    runner = Runner()
    stream = await runner.run_once(_generation())
    await read(stream)
    await stream.aclose()
    await stream.aclose()
    assert runner.active == 0


@READERS
@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("digest", ["", "d"])
@pytest.mark.parametrize("echo", [False, True])
async def test_streams_made_of_it_are_released_too(
    read: Callable[[AsyncGenerator[Delta, None]], Awaitable[None]], prompts: int, digest: str, *, echo: bool
) -> None:
    runner, running = Runner(), ConcurrencyLimit(10)
    streams = ResponseOpener(runner, MultiPromptRunner(runner, running), store=None)
    generations = tuple(_generation(digest=digest, echo=echo) for _ in range(prompts))
    with ExitStack() as place:
        place.enter_context(running.acquire())
        stream = await streams.open(PreparedRequest(generations, ResponseOptions(), TOKENIZER), caller=None)
        assert runner.active == prompts
        assert len(running) == prompts
        await read(stream.deltas)
        await stream.deltas.aclose()
        assert runner.active == 0
        assert len(running) == 1


def _generation(**more: object) -> GenerationRequest:
    return GenerationRequest("r", "m", tokens("hello"), SamplingParams(max_tokens=5), **more)
