"""What an answer holds is let go of however its reader treats it, also where it never began to read."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack

import pytest
from quire_proto.sampling import SamplingParams
from quire_router.api.multi_prompt import MultiPromptRunner
from quire_router.api.prepared_request import PreparedRequest, ResponseOptions
from quire_router.api.request_limits import ConcurrencyLimit
from quire_router.api.responses import ResponseOpener
from quire_router.core.generation import Delta, GenerationRequest, OwnedDeltaStream

from tests.support.letters import TEXT, tokens


class Runner:
    """Runs nothing, and counts what it holds."""

    def __init__(self) -> None:
        self.held = 0

    def run(self, _generation: GenerationRequest) -> AsyncGenerator[Delta, None]:
        return self._hold()

    async def run_once(self, _generation: GenerationRequest, _siblings: object = None) -> AsyncGenerator[Delta, None]:
        return self._hold()

    def _hold(self) -> OwnedDeltaStream:
        self.held += 1
        return OwnedDeltaStream(_two_pieces(self._let_go), self._let_go)

    async def _let_go(self) -> None:
        self.held -= 1


async def _two_pieces(let_go: Callable[[], Awaitable[None]]) -> AsyncGenerator[Delta, None]:
    try:
        yield Delta("a", [97])
        yield Delta("b", [98])
    finally:
        await let_go()


async def _nothing(_answer: AsyncGenerator[Delta, None]) -> None:
    """Its reader never begins."""


async def _first(answer: AsyncGenerator[Delta, None]) -> None:
    await anext(answer)


async def _all(answer: AsyncGenerator[Delta, None]) -> None:
    assert [delta async for delta in answer]


async def _throw(answer: AsyncGenerator[Delta, None]) -> None:
    with pytest.raises(ValueError, match="reader"):
        await answer.athrow(ValueError("the reader failed"))


READERS = pytest.mark.parametrize("read", [_nothing, _first, _all, _throw])


@READERS
async def test_an_answer_lets_go_once(read: Callable[[AsyncGenerator[Delta, None]], Awaitable[None]]) -> None:
    runner = Runner()
    answer = await runner.run_once(_generation())
    await read(answer)
    await answer.aclose()
    await answer.aclose()
    assert runner.held == 0


@READERS
@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("digest", ["", "d"])
@pytest.mark.parametrize("echo", [False, True])
async def test_what_is_made_of_it_lets_go_too(
    read: Callable[[AsyncGenerator[Delta, None]], Awaitable[None]], prompts: int, digest: str, *, echo: bool
) -> None:
    runner, running = Runner(), ConcurrencyLimit(10)
    answers = ResponseOpener(MultiPromptRunner(runner, running), archive=None)
    generations = tuple(_generation(digest=digest, echo=echo) for _ in range(prompts))
    with ExitStack() as place:
        place.enter_context(running.acquire())
        answer = await answers.open(PreparedRequest(generations, ResponseOptions(), TEXT), caller=None)
        assert runner.held == prompts
        assert len(running) == prompts
        await read(answer.deltas)
        await answer.deltas.aclose()
        assert runner.held == 0
        assert len(running) == 1


def _generation(**more: object) -> GenerationRequest:
    return GenerationRequest("r", "m", tokens("hello"), SamplingParams(max_tokens=5), **more)
