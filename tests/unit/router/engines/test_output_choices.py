"""What a session promises a request of several choices: each gets its own tokens, and ends by itself."""

from typing import Any

import pytest
from quire.v1 import engine_pb2, types_pb2
from quire_proto.errors import ErrorCode
from quire_proto.sampling import FinishReason, StopToken, TokenLogprobs
from quire_router.engines.attempt import EngineLost, Output
from quire_router.engines.output_stream import ExpectedOutput, OutputStream, max_sequences
from quire_router.engines.session import CommandQueue, Session
from quire_router.engines.settings import ConnectionSettings

from tests.support.batches import take_all
from tests.support.scripted_engine import ABORT, ERROR, LENGTH, STOP, logprobs, output


def submit(n: int = 3, *, delivered: tuple[engine_pb2.Delivered, ...] = (), **sampling: Any) -> engine_pb2.Submit:
    params = types_pb2.SamplingParams(**{"max_tokens": 100, "n": n, **sampling})
    return engine_pb2.Submit(request_id="a", prompt_token_ids=[1, 2, 3, 4], sampling=params, delivered=delivered)


class Wire:
    """A session whose messages the test moves by hand; ``message`` has been sent over it."""

    def __init__(self, message: engine_pb2.Submit) -> None:
        self.session = Session(ConnectionSettings())
        self.session.begin(engine_pb2.Snapshot(generation=1))
        self.stream: OutputStream = self.session.submit(message)
        assert self.sent()[0].WhichOneof("command") == "submit"

    def receive(self, *outputs: engine_pb2.SequenceOutput) -> None:
        take_all(self.session, engine_pb2.StepBatch(sequence=self.session.sequence + 1, outputs=outputs))

    def sent(self) -> list[engine_pb2.SessionRequest]:
        """What has been waiting to be sent to the engine."""
        commands = []
        while (command := self.session.commands._pop()) is not None:
            commands.append(command)
        return commands

    def cancels(self) -> list[tuple[str, list[int]]]:
        return [(command.cancel.request_id, list(command.cancel.indexes)) for command in self.sent()]

    def resume(self) -> None:
        """The stream breaks, and the engine goes on."""
        self.session.begin(engine_pb2.Snapshot(generation=1, resumed=True, sequence=self.session.sequence))


async def read(stream: OutputStream) -> list[Output]:
    """Everything that is there."""
    pieces = []
    while stream._ready:
        pieces.append(await anext(stream))
    return pieces


async def ended(stream: OutputStream) -> bool:
    """Whether all was read, and nothing more is to come."""
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    return True


async def test_the_tokens_of_each_choice_are_merged_in_order() -> None:
    wire = Wire(submit(3))
    wire.receive(output("a", [20], 0, index=2), output("a", [1], 0, index=0))
    wire.receive(output("a", [21, 22], 1, STOP, index=2), output("a", [10], 0, index=1))
    assert await read(wire.stream) == [
        Output([20, 21, 22], 0, FinishReason.STOP, index=2),
        Output([1], 0, index=0),
        Output([10], 0, index=1),
    ]
    wire.receive(output("a", [], 1, STOP, index=0), output("a", [11], 1, LENGTH, index=1))
    assert await read(wire.stream) == [
        Output([], 1, FinishReason.STOP, index=0),
        Output([11], 1, FinishReason.LENGTH, index=1),
    ]
    assert await ended(wire.stream)
    assert wire.session.in_flight == 0
    wire.stream.close()
    assert not wire.sent()


async def test_cancelling_one_choice_does_not_touch_the_others() -> None:
    wire = Wire(submit(2))
    wire.receive(output("a", [1], 0, index=0), output("a", [10], 0, index=1))
    await read(wire.stream)
    wire.stream.cancel(0)
    assert wire.cancels() == [("a", [0])]
    wire.receive(output("a", [2], 1, index=0), output("a", [11], 1, index=1))  # it had not heard yet
    wire.receive(output("a", [], 2, ABORT, index=0), output("a", [12], 2, STOP, index=1))
    assert await read(wire.stream) == [Output([11, 12], 1, FinishReason.STOP, index=1)]
    assert await ended(wire.stream)
    assert wire.session.in_flight == 0
    wire.resume()
    assert not wire.sent()


async def test_unread_tokens_of_a_cancelled_choice_are_dropped() -> None:
    wire = Wire(submit(2))
    wire.receive(output("a", [1], 0, index=0), output("a", [10], 0, index=1))
    wire.stream.cancel(0)
    assert await read(wire.stream) == [Output([10], 0, index=1)]


async def test_a_choice_is_cancelled_again_on_the_next_stream_until_the_engine_has_ended_it() -> None:
    wire = Wire(submit(3))
    wire.receive(output("a", [1], 0, index=0))
    wire.stream.cancel(0)
    wire.stream.cancel(2)
    assert wire.cancels() == [("a", [0, 2])]
    wire.receive(output("a", [], 0, ABORT, index=2))
    wire.resume()
    assert wire.cancels() == [("a", [0])]


async def test_cancelling_the_last_choice_ends_the_request_and_keeps_the_others_tokens() -> None:
    wire = Wire(submit(2))
    wire.receive(output("a", [10], 0, STOP, index=1), output("a", [1], 0, index=0))
    wire.stream.cancel(0)
    assert wire.cancels() == [("a", [])]
    assert await read(wire.stream) == [Output([10], 0, FinishReason.STOP, index=1)]
    assert await ended(wire.stream)
    assert wire.session.in_flight == 0


async def test_a_reader_that_leaves_before_a_cancelled_choice_has_ended_cancels_the_request() -> None:
    wire = Wire(submit(2))
    wire.receive(output("a", [1], 0, index=0))
    wire.stream.cancel(0)
    wire.sent()
    wire.receive(output("a", [10], 0, STOP, index=1))
    assert wire.session.in_flight == 1  # the engine has more to say
    wire.stream.close()
    assert wire.cancels() == [("a", [])]
    assert wire.session.in_flight == 0


async def test_a_cancelled_request_is_remembered_until_each_of_its_choices_has_ended() -> None:
    wire = Wire(submit(3))
    wire.receive(output("a", [1], 0, index=0), output("a", [10], 0, STOP, index=1))
    wire.stream.close()
    wire.sent()
    wire.receive(output("a", [2], 1, STOP, index=0))  # by itself, before the engine heard
    wire.resume()
    assert wire.cancels() == [("a", [])]
    wire.receive(output("a", [], 0, ABORT, index=2))
    wire.resume()
    assert not wire.sent()


async def test_aborting_ends_every_choice_after_its_tokens_so_far() -> None:
    wire = Wire(submit(3))
    wire.receive(output("a", [1], 0, index=0), output("a", [10], 0, STOP, index=1))
    wire.stream.abort()
    assert await read(wire.stream) == [
        Output([1], 0, FinishReason.ABORT, index=0),
        Output([10], 0, FinishReason.STOP, index=1),
        Output([], 0, FinishReason.ABORT, index=2),
    ]
    assert await ended(wire.stream)
    assert wire.cancels() == [("a", [])]


@pytest.mark.parametrize("index", [0, 1, 2])
async def test_an_unrequested_abort_of_one_choice_gives_the_request_back(index: int) -> None:
    wire = Wire(submit(3))
    wire.receive(*(output("a", [each], 0, index=each) for each in range(3)))
    wire.receive(output("a", [7], 1, ABORT, index=index))
    assert [len(piece.token_ids) for piece in await read(wire.stream)] == [
        2 if each == index else 1 for each in [0, 1, 2]
    ]
    with pytest.raises(EngineLost):
        await anext(wire.stream)
    assert wire.session.in_flight == 0


@pytest.mark.parametrize("index", [0, 1])
async def test_an_error_ends_the_request_whichever_choice_it_names(index: int) -> None:
    wire = Wire(submit(2))
    wire.receive(output("a", [1], 0, index=0), output("a", [10], 0, index=1))
    wire.stream.cancel(0)
    wire.sent()
    wire.receive(output("a", [], 0, ERROR, types_pb2.Error(code=types_pb2.ERROR_CODE_INTERNAL), index=index))
    pieces = [piece async for piece in wire.stream]
    assert [piece.index for piece in pieces[:-1]] == [1]
    assert pieces[-1].error is not None
    assert wire.session.in_flight == 0
    wire.stream.close()
    assert not wire.sent()


async def test_missing_tokens_of_one_choice_lose_the_request() -> None:
    wire = Wire(submit(2))
    wire.receive(output("a", [1], 0, index=0), output("a", [11], 1, index=1))
    assert await read(wire.stream) == [Output([1], 0)]
    with pytest.raises(EngineLost):
        await anext(wire.stream)
    assert wire.cancels() == [("a", [])]


async def test_each_choice_resumes_at_its_position_and_a_finished_one_is_not_awaited() -> None:
    wire = Wire(
        submit(
            4,
            delivered=(
                engine_pb2.Delivered(index=0, token_ids=[1, 2], finished=True),
                engine_pb2.Delivered(index=1, token_ids=[10]),
                engine_pb2.Delivered(index=3, finished=True),
            ),
        )
    )
    wire.receive(output("a", [10, 11], 0, STOP, index=1), output("a", [20], 0, STOP, index=2))
    assert await read(wire.stream) == [
        Output([11], 1, FinishReason.STOP, index=1),
        Output([20], 0, FinishReason.STOP, index=2),
    ]
    assert await ended(wire.stream)
    assert wire.session.in_flight == 0


@pytest.mark.parametrize("index", [0, 9])
async def test_an_output_of_a_choice_that_does_not_run_is_ignored(index: int) -> None:
    wire = Wire(submit(2, delivered=(engine_pb2.Delivered(index=0, token_ids=[1], finished=True),)))
    wire.receive(output("a", [5], 0, STOP, index=index))
    wire.receive(output("a", [10], 0, STOP, index=1))
    assert await read(wire.stream) == [Output([10], 0, FinishReason.STOP, index=1)]
    assert await ended(wire.stream)


async def test_one_choice_with_more_tokens_than_max_tokens_fails_the_request() -> None:
    wire = Wire(submit(2, max_tokens=2))
    wire.receive(output("a", [1, 2], 0, index=0), output("a", [10, 11, 12], 0, index=1))
    (last,) = [piece async for piece in wire.stream]
    assert last.error is not None
    assert last.error.code is ErrorCode.INTERNAL
    assert wire.cancels() == [("a", [])]


# Log-probabilities


def values(entries: list[Any]) -> list[float]:
    return [entry.logprob for entry in entries]


async def test_log_probabilities_stay_with_their_tokens_whatever_is_repeated() -> None:
    wire = Wire(submit(2, logprobs=1))
    top = types_pb2.TokenLogprobs(logprob=-1, top_token_ids=[7, 8], top_logprobs=[-1, -2])
    wire.receive(output("a", [1], 0, index=0, logprobs=[top]))
    wire.receive(output("a", [1, 2, 3], 0, index=0, logprobs=logprobs(-9, -2, -3)))
    (piece,) = await read(wire.stream)
    assert (piece.token_ids, values(piece.logprobs)) == ([1, 2, 3], [-1, -2, -3])
    assert piece.logprobs[0].top == ((7, -1), (8, -2))


STOPPED = types_pb2.StopToken(token_id=7, logprobs=types_pb2.TokenLogprobs(logprob=-4))


async def test_the_token_that_ended_a_choice_comes_with_its_end_also_where_it_was_unread() -> None:
    wire = Wire(submit(2, logprobs=0))
    wire.receive(output("a", [1], 0, index=0, logprobs=logprobs(-1)))
    wire.receive(output("a", [2], 1, STOP, index=0, logprobs=logprobs(-2), stop_token=STOPPED))
    wire.receive(output("a", [], 0, STOP, index=1, stop_token=STOPPED))
    stopped = StopToken(7, TokenLogprobs(-4))
    assert [(piece.token_ids, piece.stop_token) for piece in await read(wire.stream)] == [
        ([1, 2], stopped),
        ([], stopped),
    ]


@pytest.mark.parametrize(("asked", "reason"), [({}, STOP), ({"logprobs": 0}, LENGTH)])
async def test_a_stop_token_is_dropped_where_it_was_not_requested_or_did_not_stop(asked: Any, reason: Any) -> None:
    wire = Wire(submit(1, **asked))
    wire.receive(output("a", [], 0, reason, stop_token=STOPPED))
    (piece,) = await read(wire.stream)
    assert piece.stop_token is None


async def test_a_stop_token_that_the_model_lacks_is_an_internal_error() -> None:
    wire = Wire(submit(1, logprobs=0))
    wire.receive(output("a", [], 0, STOP, stop_token=types_pb2.StopToken(token_id=-7)))
    (last,) = [piece async for piece in wire.stream]
    assert last.error is not None
    assert last.error.code is ErrorCode.INTERNAL


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_log_probabilities_that_do_not_match_their_tokens_are_an_internal_error(count: int) -> None:
    wire = Wire(submit(1, logprobs=0))
    wire.receive(output("a", [1, 2], 0, logprobs=logprobs(*[-1.0] * count)))
    (last,) = [piece async for piece in wire.stream]
    assert last.error is not None
    assert last.error.code is ErrorCode.INTERNAL


async def test_unrequested_log_probabilities_are_dropped() -> None:
    wire = Wire(submit(1))
    wire.receive(output("a", [1], 0, logprobs=logprobs(-1), prompt_logprobs=logprobs(-1), prompt_position=1))
    (piece,) = await read(wire.stream)
    assert (piece.token_ids, piece.logprobs, piece.prompt_logprobs) == ([1], [], [])


@pytest.mark.parametrize("index", [0, 1, 2])
async def test_all_prompt_log_probabilities_come_with_the_first_delta_of_any_choice(index: int) -> None:
    finished = engine_pb2.Delivered(index=2, finished=True)
    wire = Wire(submit(3, prompt_logprobs=0, delivered=(finished,)))
    wire.receive(output("a", prompt_logprobs=logprobs(-1, -2), prompt_position=1, index=index))
    wire.receive(output("a", prompt_logprobs=logprobs(-2, -3), prompt_position=2, index=index))
    assert not await read(wire.stream)
    wire.receive(output("a", [10], 0, index=1))
    wire.receive(output("a", [1], 0, index=0), output("a", [11], 1, index=1))
    pieces = await read(wire.stream)
    assert [values(piece.prompt_logprobs) for piece in pieces] == [[-1, -2, -3], []]


@pytest.mark.parametrize(
    "received",
    [
        output("a", [1], 0, prompt_logprobs=logprobs(-1, -2), prompt_position=1),
        output("a", [1], 0),
        output("a", [], 0, STOP),
        output("a", prompt_logprobs=logprobs(-2, -3), prompt_position=2),
    ],
    ids=["the last", "all", "all of an empty output", "the first"],
)
async def test_missing_log_probabilities_of_the_prompt_lose_the_request(received: engine_pb2.SequenceOutput) -> None:
    wire = Wire(submit(1, prompt_logprobs=0))
    wire.receive(received)
    with pytest.raises(EngineLost):
        await anext(wire.stream)


async def test_a_request_aborted_during_prefill_gets_no_prompt_log_probabilities() -> None:
    wire = Wire(submit(1, prompt_logprobs=0))
    wire.receive(output("a", prompt_logprobs=logprobs(-1, -2), prompt_position=1))
    wire.stream.abort()
    assert await read(wire.stream) == [Output([], 0, FinishReason.ABORT)]


# What is asked


@pytest.mark.parametrize(
    ("sampling", "delivered", "made"),
    [({}, 1, 1), ({"n": 3}, 3, 3), ({"n": 2, "best_of": 5}, 5, 5), ({"n": 2, "beam_width": 4}, 2, 4)],
)
def test_n_choices_are_delivered_and_best_of_are_counted(sampling: dict[str, int], delivered: int, made: int) -> None:
    message = submit(**{"n": 0, **sampling})
    assert ExpectedOutput.of(message).positions == dict.fromkeys(range(delivered), 0)
    assert max_sequences(message) == made


def test_candidates_come_with_log_probabilities() -> None:
    assert ExpectedOutput.of(submit(1, best_of=2)).logprobs
    assert not ExpectedOutput.of(submit(2, best_of=2)).logprobs
    assert ExpectedOutput.of(submit(2, logprobs=0)).logprobs


async def test_cancels_of_choices_are_merged_and_superseded_by_one_of_the_request() -> None:
    outbox = CommandQueue(10)
    outbox.cancel("a", 1)
    outbox.cancel("a", 0, 1)
    outbox.cancel("b", 2)
    outbox.cancel("b")
    outbox.cancel("b", 3)
    commands = [(await outbox.next()).cancel for _ in range(2)]
    assert [(command.request_id, list(command.indexes)) for command in commands] == [("a", [1, 0]), ("b", [])]
