"""What an engine sends of a prompt that is pooled is whole numbers, once, or an error of this router."""

import asyncio

import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.pooling import MAX_DIMENSIONS
from quire_proto.sampling import FinishReason
from quire_router.engines.attempt import Output, StreamEnd
from quire_router.engines.output_stream import ExpectedOutput, OutputStream

EXPECTED = ExpectedOutput({0: 0}, 0, pooled=True)


def end_of(output: Output) -> tuple[StreamEnd | None, Output]:
    """How the stream ends with this output of the engine, and what its reader gets."""

    async def read() -> tuple[StreamEnd | None, Output]:
        stream = OutputStream("r", EXPECTED, on_cancel=lambda *_: None, slow_client_timeout=1.0)
        stream.push(output)
        return stream.end, await anext(stream)

    return asyncio.run(read())


def test_the_numbers_reach_the_reader() -> None:
    end, got = end_of(Output([], 0, FinishReason.STOP, pooled=bytes(8)))
    assert (end, got.pooled) == (StreamEnd.COMPLETED, bytes(8))


@pytest.mark.parametrize(
    "output",
    [
        Output([], 0, FinishReason.STOP),
        Output([], 0, FinishReason.STOP, pooled=bytes(7)),
        Output([], 0, FinishReason.STOP, pooled=bytes(4 * MAX_DIMENSIONS + 4)),
        Output([5], 0, FinishReason.LENGTH),
    ],
)
def test_what_cannot_be_is_an_error(output: Output) -> None:
    end, got = end_of(output)
    assert end is StreamEnd.FAILED
    assert isinstance(got.error, QuireError)
    assert got.error.code is ErrorCode.INTERNAL
