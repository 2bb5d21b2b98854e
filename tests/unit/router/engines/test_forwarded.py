"""``Forwarded``: a request that a gateway sends to a server counts there for as long as it lasts, and what is seen of
its answer says how fast the server is and what it has cached.
"""

import asyncio

import pytest
from quire.v1 import engine_pb2
from quire_router.engines.forwarded import Forwarded
from quire_router.engines.load import EngineLoad, LoadLedger
from quire_router.placement.engine_table import EngineTable

HASHES = [b"a" * 16, b"b" * 16]


class Connection:
    """What a server is told of requests that others send there."""

    def __init__(self) -> None:
        self.cached: list[bytes] = []
        self.gaps: list[int] = []
        self.prompts: list[int] = []

    def expect_cached(self, hashes: list[bytes]) -> None:
        self.cached += hashes

    def on_forwarded_gap(self, seconds: float, sequences: int) -> None:
        assert seconds >= 0
        self.gaps.append(sequences)

    def on_forwarded_prompt(self, seconds: float, tokens: int) -> None:
        assert seconds >= 0
        self.prompts.append(tokens)


class Server:
    def __init__(self) -> None:
        table = EngineTable()
        self.ledger = LoadLedger(table)
        self.load: EngineLoad = self.ledger.add("a", reports_tokens=False)
        self.connection = Connection()
        self.released = 0

    def forward(self, tokens: int = 100, sequences: int = 1) -> Forwarded:
        def release() -> None:
            self.released += 1

        return Forwarded(
            self.connection,  # type: ignore[arg-type]
            self.load,
            lambda: self.ledger.begin("a", pending_tokens=tokens, sequences=sequences),
            release,
            uncached_tokens=tokens,
            sequences=sequences,
            block_hashes=iter(HASHES),
        )


@pytest.fixture
def server() -> Server:
    return Server()


async def test_it_counts_until_it_is_left(server: Server) -> None:
    with server.forward(sequences=3) as request:
        assert server.load.local == (1, 100, 0)
        request.on_events(1)
        assert server.load.local == (1, 0, 3)
    assert (server.load.local, server.released) == ((0, 0, 0), 1)


async def test_it_counts_no_more_after_an_error(server: Server) -> None:
    with pytest.raises(RuntimeError), server.forward():
        raise RuntimeError
    assert (server.load.local, server.released) == ((0, 0, 0), 1)


async def test_what_a_stream_shows_is_learned(server: Server) -> None:
    with server.forward() as request:
        request.on_events(0)  # a comment
        assert server.connection.cached == []
        request.on_events(1)
        assert (server.connection.prompts, server.connection.cached) == ([100], HASHES)
        request.on_events(1)
        request.on_events(2)  # two at once say nothing of the time between them
        assert server.connection.gaps == [1]
        request.on_computed()
    assert server.connection.cached == HASHES


async def test_a_prompt_that_was_not_alone_says_nothing_of_its_time(server: Server) -> None:
    with server.forward() as first, server.forward() as second:
        first.on_events(1)
        second.on_events(1)
    assert server.connection.prompts == [100]


async def test_neither_do_several_sequences(server: Server) -> None:
    with server.forward(sequences=2) as request:
        request.on_events(1)
        request.on_events(1)
    assert (server.connection.prompts, server.connection.gaps) == ([], [])


async def test_a_prompt_whose_answer_comes_in_one_piece_counts_as_computed_after_its_time(server: Server) -> None:
    pace = engine_pb2.Pace(step_seconds=1e-6, token_seconds=1e-6, sequence_seconds=0)
    server.load.report(engine_pb2.Load(pace=pace))
    with server.forward():
        assert server.load.local == (1, 100, 0)
        async with asyncio.timeout(10):
            while server.load.local != (1, 0, 1):  # noqa: ASYNC110 - a timer's
                await asyncio.sleep(0.001)
    assert server.connection.prompts == []
