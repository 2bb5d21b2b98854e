"""Each API says of an answer whose end is not stored yet that it is not: in a header, or in the last event's data."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_router.core.generation import Delta, GenerationRequest

from tests.support.both_apis import as_proto
from tests.support.scripted_api import MODEL, ScriptedRunner, Stage, ask, chat, completion, open_stage

MESSAGE = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
RESPONSE = {"model": MODEL, "input": "hello"}
BODIES = {
    "/v1/chat/completions": chat(),
    "/v1/completions": completion(),
    "/v1/completions of a list": completion(["hello", "you"]),
    "/v1/messages": MESSAGE,
    "/v1/responses": RESPONSE,
}


class PendingRunner(ScriptedRunner):
    """Its journal has the end of no answer in time."""

    pending = True

    async def _play(self, generation: GenerationRequest) -> AsyncIterator[Delta]:
        async for delta in super()._play(generation):
            if delta.usage is None:
                yield delta
                continue
            yield replace(delta, usage=None)
            yield Delta("", [], usage=delta.usage, index=delta.index, pending=self.pending)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    runner = PendingRunner()
    async with open_stage(runner=runner) as stage:
        stage.runner = runner
        yield stage


def events_in(body: bytes) -> list[dict[str, Any]]:
    """The data of the events, without the end mark."""
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def path_of(kind: str) -> str:
    return kind.partition(" ")[0]


@pytest.mark.parametrize("pending", [True, False])
@pytest.mark.parametrize("kind", BODIES)
async def test_a_whole_answer_says_it_in_a_header(stage: Stage, kind: str, *, pending: bool) -> None:
    assert isinstance(stage.runner, PendingRunner)
    stage.runner.pending = pending
    answer = await ask(stage.port, "POST", path_of(kind), BODIES[kind])
    assert answer.status == 200
    assert answer.headers.get("x-quire-journal") == ("pending" if pending else None)


async def test_a_header_says_it_once() -> None:
    async with open_stage(runner=PendingRunner(), durable=lambda _ids: False) as stage:
        answer = await ask(stage.port, "POST", "/v1/chat/completions", chat())
        assert answer.headers["x-quire-journal"] == "pending"


STREAMED: Sequence[tuple[str, dict[str, object]]] = [
    *((kind, {}) for kind in BODIES),
    ("/v1/chat/completions", {"stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"stream_options": {"include_event_ids": True}}),
    ("/v1/chat/completions", {"n": 2}),
]


@pytest.mark.parametrize("pending", [True, False])
@pytest.mark.parametrize(("kind", "fields"), STREAMED)
async def test_the_last_event_of_a_stream_says_it(
    stage: Stage, kind: str, fields: dict[str, object], *, pending: bool
) -> None:
    assert isinstance(stage.runner, PendingRunner)
    stage.runner.pending = pending
    answer = await ask(stage.port, "POST", path_of(kind), {**BODIES[kind], **fields, "stream": True})
    events = events_in(answer.body)
    assert [event.get("quire_journal") for event in events] == [
        *([None] * (len(events) - 1)),
        "pending" if pending else None,
    ]


async def test_a_chunk_that_says_it_has_a_choice_for_clients_that_expect_one(stage: Stage) -> None:
    """It adds nothing to that, and does not take its reason away."""
    answer = await ask(stage.port, "POST", "/v1/chat/completions", {**chat(), "stream": True})
    *_, last = events_in(answer.body)
    (choice,) = last["choices"]
    assert (choice["delta"], choice["finish_reason"]) == ({"content": ""}, None)
    async with stage.openai().chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "hello"}]
    ) as stream:
        async for _ in stream:
            pass
        completion = await stream.get_final_completion()
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].message.content == "Hello wörld"


async def test_grpc_says_it_in_the_trailing_metadata(stage: Stage) -> None:
    assert isinstance(stage.runner, PendingRunner)
    async with stage.channel() as channel:
        for pending in (True, False):
            stage.runner.pending = pending
            call = InferenceStub(channel).Chat(as_proto(chat()))
            async for _ in call:
                pass
            assert dict(await call.trailing_metadata()).get("quire-journal") == ("pending" if pending else None)
