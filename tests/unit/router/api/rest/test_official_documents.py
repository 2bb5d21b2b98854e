"""Answers are as the official documents have them, null where there is nothing, and the oracle sees what is not."""

from typing import Any

import pytest
from quire_proto.sampling import FinishReason

from tests.support.official_documents import ANSWERS, EXTRA_FIELDS, problems, problems_of_answer
from tests.support.scripted_api import ask, chat, completion, open_stage

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(logprobs=True, top_logprobs=2),
    COMPLETIONS: completion(logprobs=2, echo=True),
    MESSAGES: chat(max_tokens=9),
    RESPONSES: {"model": "tiny", "input": "hello"},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_answers_whole_and_streamed_are_as_the_documents_say(path: str, reason: FinishReason) -> None:
    async with open_stage(("one ", "two", reason)) as stage:
        for stream in (False, True):
            answer = await ask(stage.port, "POST", path, {**BODIES[path], "stream": stream})  # which compares it
            assert answer.status == 200


@pytest.mark.parametrize("path", BODIES)
async def test_errors_are_as_the_documents_say(path: str) -> None:
    async with open_stage(keys=["k" * 16]) as stage:
        key = {"authorization": f"Bearer {'k' * 16}"}
        for body, headers, status in (
            (b"{", key, 400),
            ({**BODIES[path], "model": "other"}, key, 404),
            ({**BODIES[path], "temperature": 9}, key, 400),
            (BODIES[path], {}, 401),
            (BODIES[path], {**key, "content-type": "text/plain"}, 415),
            (b"x" * 200_000, key, 413),
        ):
            assert (await ask(stage.port, "POST", path, body, headers)).status == status
        assert (await ask(stage.port, "PUT", path, None, key)).status == 405
        again = {**key, "idempotency-key": "once"}
        await ask(stage.port, "POST", path, BODIES[path], again)
        assert (await ask(stage.port, "POST", path, {**BODIES[path], "temperature": 0.5}, again)).status == 409


async def test_an_answer_without_reasoning_calls_and_refusal_has_null_there() -> None:
    async with open_stage() as stage:
        client = stage.openai()
        whole = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
        text = await client.completions.create(model="tiny", prompt="hello")
    message: Any = whole.choices[0].message
    assert message.reasoning is message.reasoning_content is message.refusal is message.tool_calls is None
    assert message.audio is message.annotations is message.function_call is None
    choices: tuple[Any, Any] = (whole.choices[0], text.choices[0])
    assert [choice.token_ids for choice in choices] == [None, None]
    answers: tuple[Any, Any] = (whole, text)
    assert whole.prompt_logprobs is choices[1].prompt_logprobs is None  # type: ignore[attr-defined]
    assert [answer.kv_transfer_params for answer in answers] == [None, None]
    assert [answer.system_fingerprint for answer in answers] == [None, None]


async def test_a_message_that_comes_back_as_it_was_sent_has_no_ignored_part() -> None:
    async with open_stage() as stage:
        whole = await ask(stage.port, "POST", CHAT, chat())
        asked = chat()
        history: list[Any] = [*asked["messages"], whole.json["choices"][0]["message"]]  # type: ignore[misc]
        answer = await ask(stage.port, "POST", CHAT, {**asked, "messages": [*history, *asked["messages"]]})  # type: ignore[misc]
    assert answer.status == 200
    assert "x-ignored-parameters" not in answer.headers


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda answer: answer.update(own=1), "own: Extra inputs"),
        (lambda answer: answer["choices"][0]["message"].update(own=1), "message.own: Extra inputs"),
        (lambda answer: answer.pop("created"), "created: Field required"),
        (lambda answer: answer.update(created="1"), "created: Input should be a valid integer"),
        (lambda answer: answer["choices"][0].update(finish_reason="abort"), "finish_reason: Input should be"),
        (lambda answer: answer["choices"][0]["message"].pop("reasoning"), "message.reasoning: it is missing"),
    ],
)
async def test_the_oracle_sees_what_differs(change: Any, expected: str) -> None:
    async with open_stage() as stage:
        answer = (await ask(stage.port, "POST", CHAT, chat())).json
    model, _ = ANSWERS["POST", CHAT]
    assert problems(model, answer) == []
    change(answer)
    assert expected in "\n".join(problems(model, answer))


def test_the_oracle_reads_every_event_of_a_stream() -> None:
    stream = b'data: {"id":"x"}\n\ndata: [DONE]\n\n'
    assert "created: Field required" in "\n".join(
        problems_of_answer("POST", COMPLETIONS, 200, "text/event-stream", stream)
    )
    assert "error: Field required" in "\n".join(
        problems_of_answer("GET", "/v1/models", 404, "application/json", b'{"message":"no"}')
    )


def test_every_extra_field_has_its_reason() -> None:
    reasons = [reason for fields in EXTRA_FIELDS.values() for reason in fields.values()]
    assert all(": " in reason and len(reason) > 15 for reason in reasons)
