"""Commands and outputs cross the link between a server and its core as they are."""

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.config import EngineConfig
from quire_engine.core.block_pool import BlockStored, Tier
from quire_engine.core.engine_core import AddRequest, Command, EngineCoreOutputs, GetSnapshot, Sleep, StepTrace
from quire_engine.core.lora import LoRARequest
from quire_engine.core.outputs import EngineCoreOutput, EngineLoad, SchedulerStats, TokenColumns
from quire_engine.core.request import Request, ResumedOutput, SequenceEvent, SequenceTimings
from quire_engine.core.step import StepTimings
from quire_engine.core_client import core_messages
from quire_engine.core_client.codec import Codec
from quire_engine.core_client.core_messages import (
    FromCore,
    Link,
    Published,
    RemoteError,
    Start,
    ToCore,
    make_codecs,
    not_sent,
)
from quire_engine.core_client.core_process import RemoteGrammar
from quire_engine.errors import LoRAError, LoRANotFoundError
from quire_engine.structured_output.llguidance import RejectedError
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.pooling import PoolingParams, Task
from quire_proto.sampling import FinishReason, SamplingParams, StopToken, TokenLogprobs
from quire_proto.structured_output import Structured, StructuredKind

LOAD = EngineLoad(1, 2, 3, 4, 5, 6, 7, 8)
TRACE = StepTrace(1, 2, StepTimings(), 0.1, 0.2, 0.3, 1, 2, 3, 0, 0, False, ["7"])


def no_replies(arguments: Sequence[Codec]) -> Codec:
    return Codec(not_sent, not_sent)


def linked(sent: Any, codec: Codec | None = None, replies: Callable[[Sequence[Codec]], Codec] = no_replies) -> Any:
    """Two ends of a link, of which the first sends messages of this type."""
    codecs = make_codecs(codec or Codec(not_sent, not_sent), replies)
    ends = [Link(end, codecs, sent, sent) for end in socket.socketpair()]
    for end in ends:
        end.socket.settimeout(20)
    return ends


def sent_over(link: Any, message: Any) -> Any:
    sender, receiver = link
    sender.socket.sendall(sender.to_bytes(message))
    while not (received := receiver.receive()):
        pass
    (one,) = received
    return one


LOGPROBS = st.builds(TokenLogprobs, st.floats(max_value=0), st.just(((1, -0.5), (2, float("-inf")))))
OUTPUTS = st.builds(
    EngineCoreOutput,
    st.text(max_size=3),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    timings=st.builds(SequenceTimings, st.integers(), events=st.lists(st.builds(SequenceEvent), max_size=2)),
    logprobs=st.lists(LOGPROBS, max_size=2).map(tuple),
    prompt_logprobs=st.lists(LOGPROBS, max_size=2).map(tuple),
    score=st.none() | st.floats(allow_nan=False),
    stop_token=st.none() | st.builds(StopToken, st.integers(), st.none() | LOGPROBS),
    pooled=st.binary(max_size=9),
    ends_request=st.booleans(),
)


@given(
    outputs=st.lists(OUTPUTS, max_size=6),
    events=st.lists(st.builds(BlockStored, st.binary(), st.just(Tier.HOST))),
)
@settings(deadline=None)
def test_outputs_of_a_step_arrive_as_they_were_and_in_order(outputs: list[EngineCoreOutput], events: Any) -> None:
    link = linked(FromCore)
    message = Published(EngineCoreOutputs(outputs, LOAD, events, TRACE), SchedulerStats(generated_tokens=7))
    assert sent_over(link, message) == message


def test_columns_of_tokens_arrive_as_they_were() -> None:
    columns = TokenColumns(["a", "b"], [0, 2], [5, 6], [7, 8])
    message = Published(EngineCoreOutputs([], LOAD, [], TRACE, tokens=columns), SchedulerStats())
    assert sent_over(linked(FromCore), message) == message


def test_an_error_keeps_everything_that_a_client_gets() -> None:
    error = QuireError(ErrorCode.OVERLOADED, "Too many.", param="n", retry_after=1.5, reason="queue")
    output = EngineCoreOutput("a", finish_reason=FinishReason.ERROR, error=error)
    received = sent_over(linked(FromCore), Published(EngineCoreOutputs([output], LOAD, [], TRACE), SchedulerStats()))
    (arrived,) = received.outputs.outputs
    assert vars(arrived.error) == vars(error)
    assert str(arrived.error) == "Too many."


def test_a_request_arrives_with_all_its_fields() -> None:
    request = Request(
        "7",
        tuple(range(1000)),
        SamplingParams(
            temperature=0.3,
            logit_bias=((3, -1.5),),
            bad_words=((1, 2), (3,)),
            seed=2**64 - 1,
            structured=Structured(StructuredKind.CHOICE, '["a", "ü"]'),
        ),
        output_token_ids=(4, 5),
        cache_salt=bytes(range(32)),
        traceparent="00-1",
        resumed_outputs=(ResumedOutput(0, (4, 5), True),),
        priority=-3,
        grammar=RemoteGrammar(12),
        lora=LoRARequest("a", 3, "/folder", b"\x80digest"),
        pooling=PoolingParams(Task.CLASSIFY, use_activation=False),
    )
    grammars = {12: request.grammar}
    link = linked(ToCore, Codec(attrgetter("grammar_id"), grammars.__getitem__))
    received = sent_over(link, AddRequest(request)).request
    for each in fields(Request):
        if each.name != "lora":  # its path is a Path then
            assert getattr(received, each.name) == getattr(request, each.name)
    assert (received.lora.lora_name, str(received.lora.lora_path)) == ("a", "/folder")
    assert received.lora.digest == b"\x80digest"


def test_replies_are_numbered() -> None:
    arguments: list[Sequence[Codec]] = []

    def number(codecs: Sequence[Codec]) -> Codec:
        arguments.append(codecs)
        return Codec(lambda reply: reply(), lambda call_id: call_id)

    link = linked(Command, replies=number)
    assert sent_over(link, GetSnapshot(lambda: 3)).reply == 3  # type: ignore[misc, arg-type]
    assert sent_over(link, Sleep(lambda: 4)).reply == 4  # type: ignore[misc, arg-type]


@pytest.mark.parametrize("kind", [LoRAError, LoRANotFoundError, RejectedError, OSError])
def test_expected_errors_keep_their_kind(kind: type[Exception]) -> None:
    raised = RemoteError.of(kind("It is bad.")).to_exception()
    assert (type(raised), str(raised)) == (kind, "It is bad.")


def test_other_errors_are_those_of_the_program() -> None:
    assert RemoteError.of(PermissionError(13, "no")).to_exception().args == ("[Errno 13] no",)
    assert type(RemoteError.of(KeyError("x")).to_exception()) is RuntimeError


def test_a_message_arrives_whole_however_it_is_cut() -> None:
    sender, receiver = linked(FromCore)
    stats = [SchedulerStats(generated_tokens=number) for number in range(3)]
    data = b"".join(sender.to_bytes(Published(EngineCoreOutputs([], LOAD, [], TRACE), each)) for each in stats)
    received = []
    for byte in range(0, len(data), 7):
        sender.socket.sendall(data[byte : byte + 7])
        received += receiver.receive()
    assert [each.stats for each in received] == stats
    sender.socket.close()
    assert receiver.receive() is None


def test_a_message_that_is_too_long_is_neither_sent_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = linked(FromCore)
    message = Published(EngineCoreOutputs([], LOAD, [], TRACE), SchedulerStats())
    data = sender.to_bytes(message)
    monkeypatch.setattr(core_messages, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="has more than 100"):
        sender.to_bytes(message)
    sender.socket.sendall(data)
    with pytest.raises(ValueError, match="has more than 100"):
        receiver.receive()


def test_settings_arrive_as_they_were(tmp_path: Path) -> None:
    settings = {"enable_lora": True, "lora_modules": ["a=/x", "b=/y"], "swap_space": 0.5, "served_model_name": "m,n"}
    config = EngineConfig(model=tmp_path, shutdown_timeout=math.inf, max_step_seconds=None, **settings)
    received = sent_over(linked(ToCore), Start(config.model_dump(mode="json"), 1.5, True))
    assert EngineConfig.model_validate(received.config) == config
