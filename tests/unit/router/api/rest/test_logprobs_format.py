"""Log-probabilities as the OpenAI API and vLLM write them, over real sockets and read by the real client."""

import asyncio
import json
from collections import defaultdict
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.sampling import FinishReason, TokenLogprobs
from quire_router.api.rest.logprobs import (
    ChatLogprobsFormat,
    CompletionLogprobsFormat,
    PromptLogprobsFormat,
    TextOffsets,
    TokenNames,
)
from quire_router.core.generation import Delta

from tests.support.scripted_api import (
    MODEL,
    TOKENIZER,
    VOCAB_SIZE,
    ask,
    chat,
    completion,
    logprobs_of,
    open_stage,
    script_of,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = "hello wörld 😀€ naïve"
TOKENS = list(TOKENIZER.encode_plain(SAID))
USER = [{"role": "user", "content": "hi"}]
TEXTS = st.text(min_size=1, max_size=30) | st.text("é€😀你 a", min_size=1, max_size=12)
NAMES = TokenNames(TOKENIZER.token_bytes)


def in_chats(token_ids, top=0, names=TOKENIZER):
    """What a chat must show, entry by entry, by the words of the API's documents."""

    def entry(token_id, logprob):
        raw = names.token_bytes(token_id)
        return {"token": plain(token_id), "bytes": [*raw], "logprob": logprob}

    shown = []
    for token_id in token_ids:
        logprobs = logprobs_of(token_id, top)
        others = [entry(*each) for each in logprobs.top]
        shown.append(entry(token_id, logprobs.logprob) | {"top_logprobs": others})
    return shown


# Chats


@pytest.mark.parametrize("top", [0, 1, 5, 20])
async def test_a_chat_shows_each_token_with_its_bytes_and_the_most_probable_ones(top):
    async with open_stage(script_of(SAID)) as stage, stage.openai() as api:
        answer = await api.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=top)

    shown = answer.choices[0].logprobs
    assert [each.model_dump() for each in shown.content] == in_chats(TOKENS, top)
    assert shown.refusal is None
    assert b"".join(bytes(each.bytes) for each in shown.content).decode() == answer.choices[0].message.content == SAID


async def test_a_streamed_chat_has_the_logprobs_of_the_whole_one():
    async with open_stage(script_of(SAID)) as stage, stage.openai() as api:
        stream = await api.chat.completions.create(
            model=MODEL, messages=USER, logprobs=True, top_logprobs=2, stream=True, n=2
        )
        chunks = [chunk async for chunk in stream]

    for index in range(2):
        pieces = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        content = [each for piece in pieces if piece.logprobs for each in piece.logprobs.content]
        assert [each.model_dump() for each in content] == in_chats(TOKENS, 2)
        assert "".join(piece.delta.content or "" for piece in pieces) == SAID


async def test_no_log_probabilities_are_shown_unless_requested():
    async with open_stage() as stage:
        for fields in ({}, {"stream": True}):
            answer = await ask(stage.port, "POST", CHAT, chat(**fields))
            events = answer.events[:-1] if fields else [answer.json]
            assert all(event["choices"][0]["logprobs"] is None for event in events)
            assert not any(event.get("prompt_logprobs") for event in events)


# Completions


def named(token_id: int) -> str:
    """A token's name in completions: OpenAI marks what is not text."""
    raw = TOKENIZER.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" if byte > 127 else chr(byte) for byte in raw)


def plain(token_id: int) -> str:
    """A token's name elsewhere."""
    return named(token_id).removeprefix("bytes:")


def offsets_of(token_ids) -> list[int]:
    """Where each token's text begins: after the last tokens before it that make whole characters."""
    offsets, raw = [], b""
    for token_id in token_ids:
        with suppress(UnicodeDecodeError):
            begin = len(raw.decode())
        offsets.append(begin)
        raw += TOKENIZER.token_bytes(token_id)
    return offsets


@pytest.mark.parametrize("top", [0, 1, 5, 20])
async def test_a_completion_shows_four_lists_side_by_side(top):
    async with open_stage(script_of(SAID)) as stage, stage.openai() as api:
        answer = await api.completions.create(model=MODEL, prompt="hi", logprobs=top)

    shown = answer.choices[0].logprobs
    assert shown.tokens == [named(each) for each in TOKENS]
    assert any(name.startswith("bytes:\\x") for name in shown.tokens), "no token is a part of a character"
    assert shown.token_logprobs == [logprobs_of(each, top).logprob for each in TOKENS]
    assert shown.text_offset == offsets_of(TOKENS)
    for token_id, others in zip(TOKENS, shown.top_logprobs, strict=True):
        logprobs = logprobs_of(token_id, top)
        expected = {named(token_id): logprobs.logprob}  # it is there where it is not among the most probable, too
        expected |= {named(each): value for each, value in reversed(logprobs.top)}
        assert others == expected
        assert next(iter(others)) == named(token_id)
        assert len(others) in (top, top + 1)


@pytest.mark.parametrize("echo", [False, True])
async def test_a_streamed_completion_has_the_logprobs_of_the_whole_one(echo):
    body = completion("how are you", logprobs=3, echo=echo, n=2)
    async with open_stage(script_of(SAID)) as stage:
        whole = (await ask(stage.port, "POST", COMPLETIONS, body)).json["choices"]
        events = (await ask(stage.port, "POST", COMPLETIONS, body | {"stream": True})).events[:-1]

    for index in range(2):
        pieces = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        lists = defaultdict(list)
        for piece in pieces:
            for name, values in (piece["logprobs"] or {}).items():
                lists[name] += values
        assert lists == whole[index]["logprobs"]
        assert "".join(piece["text"] for piece in pieces) == whole[index]["text"]


async def test_an_echoed_prompt_comes_first_and_nothing_predicts_its_first_token():
    prompt = TOKENIZER.encode("how are you é")
    async with open_stage(script_of(SAID)) as stage, stage.openai() as api:
        answer = await api.completions.create(model=MODEL, prompt=prompt, logprobs=2, echo=True)

    shown, text = answer.choices[0].logprobs, answer.choices[0].text
    begin = named(prompt[0])  # without text where special tokens are skipped, as they are not in a prompt
    assert text == begin + "how are you é" + SAID
    assert shown.tokens == [named(each) for each in [*prompt, *TOKENS]]
    expected = [logprobs_of(each, 2).logprob for each in [*prompt[1:], *TOKENS]]
    assert shown.token_logprobs == [None, *expected]
    assert shown.top_logprobs[0] is None
    assert shown.top_logprobs[1][named(prompt[1])] == expected[0]
    assert shown.text_offset == [0, *(len(begin) + offset for offset in offsets_of([*prompt[1:], *TOKENS]))]
    assert stage.runner.generations[0].params.prompt_logprobs == 2


async def test_a_prompt_of_one_token_can_be_echoed():
    async with open_stage(script_of("x")) as stage, stage.openai() as api:
        answer = await api.completions.create(model=MODEL, prompt=[TOKENS[0]], logprobs=0, echo=True)

    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert len(answer.choices[0].logprobs.tokens) == 2


async def test_an_output_without_tokens_still_shows_its_prompt():
    async with open_stage([FinishReason.STOP]) as stage:
        body = completion("how are you", logprobs=1, echo=True)
        whole = (await ask(stage.port, "POST", COMPLETIONS, body)).json["choices"][0]
        events = (await ask(stage.port, "POST", COMPLETIONS, body | {"stream": True})).events

    assert len(whole["logprobs"]["tokens"]) == len(stage.runner.generations[0].prompt_token_ids)
    assert events[0]["choices"][0]["logprobs"] == whole["logprobs"]
    assert whole["text"] == events[0]["choices"][0]["text"] == "how are you"


async def test_each_prompt_of_a_list_is_echoed_with_its_own():
    prompts = [TOKENIZER.encode("how"), TOKENIZER.encode("hello world")]
    async with open_stage(script_of("x")) as stage, stage.openai() as api:
        answer = await api.completions.create(model=MODEL, prompt=prompts, logprobs=0, echo=True, n=2)

    for choice in answer.choices:
        prompt = prompts[choice.index // 2]
        assert choice.logprobs.tokens == [named(each) for each in [*prompt, *TOKENIZER.encode_plain("x")]]


# The token that ends an output

END = 2  # <|end|>


@pytest.mark.parametrize("said", ["", SAID, "wör"])
@pytest.mark.parametrize("echo", [False, True])
async def test_a_completion_ends_with_the_token_that_stopped_it(said, echo):
    body = completion("how are you", logprobs=2, echo=echo, n=2)
    async with open_stage(script_of(said)) as stage:
        before = (await ask(stage.port, "POST", COMPLETIONS, body)).json
        stage.runner.stop_token_id = END
        after = (await ask(stage.port, "POST", COMPLETIONS, body)).json

    logprobs = logprobs_of(END, 2)
    for without, choice in zip(before["choices"], after["choices"], strict=True):
        shown = choice["logprobs"]
        assert shown["tokens"].pop() == "<|end|>"
        assert shown["token_logprobs"].pop() == logprobs.logprob
        assert shown["top_logprobs"].pop() == {named(each): value for each, value in logprobs.top}
        assert shown["text_offset"].pop() == len(choice["text"])
        assert choice == without
    assert after["usage"] == before["usage"]


async def test_the_token_that_stopped_it_begins_behind_a_character_that_was_never_ended():
    euro = list(TOKENIZER.encode_plain("€"))[:-1]
    assert euro, "the character is one token"
    async with open_stage([Delta("", euro), Delta("\ufffd", []), FinishReason.STOP]) as stage:
        stage.runner.stop_token_id = END
        answer = (await ask(stage.port, "POST", COMPLETIONS, completion(logprobs=0))).json["choices"][0]

    assert answer["text"] == "\ufffd"
    assert answer["logprobs"]["text_offset"] == [0] * len(euro) + [1]


@pytest.mark.parametrize("said", ["", SAID])
async def test_a_chat_ends_with_the_token_that_stopped_it(said):
    async with open_stage(script_of(said)) as stage, stage.openai() as api:
        stage.runner.stop_token_id = END
        answer = await api.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2)

    shown = [each.model_dump() for each in answer.choices[0].logprobs.content]
    assert shown == in_chats([*TOKENIZER.encode_plain(said), END], 2)
    assert answer.choices[0].message.content == said


@pytest.mark.parametrize(("path", "build", "shown"), [(CHAT, chat, True), (COMPLETIONS, completion, 2)])
@pytest.mark.parametrize("said", ["", SAID])
async def test_a_streamed_or_resumed_answer_ends_with_it_once(path, build, shown, said):
    body = build(logprobs=shown, n=2)
    async with open_stage(script_of(said)) as stage:
        stage.runner.stop_token_id = END
        whole = (await ask(stage.port, "POST", path, body)).json["choices"]
        options = {"stream": True, "stream_options": {"include_event_ids": True}}
        events = (await ask(stage.port, "POST", path, body | options)).sse
        answers = [events]
        for cut in range(len(events) - 1):
            place = f"/v1/requests/{events[0][1]['id']}/events?after={events[cut][0] or ''}"
            rest = (await ask(stage.port, "GET", place)).sse
            answers.append([*events[: cut + 1], *rest] if events[cut][0] else rest)

    for answer in answers:
        for index in range(2):
            lists = defaultdict(list)
            for _, event in answer[:-1]:
                for choice in event["choices"]:
                    if choice["index"] == index:
                        for name, values in (choice["logprobs"] or {}).items():
                            lists[name] += values or []
            assert lists == {name: values or [] for name, values in whole[index]["logprobs"].items()}


async def test_over_grpc_it_comes_with_the_end_where_log_probabilities_are_requested():
    async with open_stage(script_of(SAID)) as stage, stage.channel() as channel:
        stage.runner.stop_token_id = END
        stub, sampling = InferenceStub(channel), types_pb2.SamplingParams(logprobs=2, n=2)
        request = pb.GenerateRequest(model=MODEL, text="how are you", sampling=sampling)
        answers = [answer async for answer in stub.Generate(request)]
        sampling.ClearField("logprobs")
        request = pb.GenerateRequest(model=MODEL, text="how are you", sampling=sampling)
        plain = [answer async for answer in stub.Generate(request)]

    assert [each.HasField("stop_token") for each in answers] == [bool(each.finish_reason) for each in answers]
    for answer in filter(lambda each: each.finish_reason, answers):
        assert answer.stop_token.token_id == END
        assert answer.stop_token.logprobs.logprob == logprobs_of(END, 2).logprob
        assert list(answer.stop_token.logprobs.top_token_ids) == [each for each, _ in logprobs_of(END, 2).top]
    assert not any(each.HasField("stop_token") for each in plain)


# Prompts, as vLLM has them


def in_vllm(prompt, top):
    shown = [None]
    for token_id in prompt[1:]:
        logprobs = logprobs_of(token_id, top)
        entries = {str(token_id): {"logprob": logprobs.logprob, "rank": None, "decoded_token": plain(token_id)}}
        for rank, (each, logprob) in enumerate(logprobs.top, 1):
            entries[str(each)] = {"logprob": logprob, "rank": rank, "decoded_token": plain(each)}
        shown.append(entries)
    return shown


@pytest.mark.parametrize("top", [0, 1, 3])
async def test_a_prompts_log_probabilities_are_beside_its_choices_in_completions(top):
    body = completion(["how are you", "hello"], prompt_logprobs=top, n=2)
    async with open_stage() as stage:
        choices = (await ask(stage.port, "POST", COMPLETIONS, body)).json["choices"]
        prompts = [each.prompt_token_ids for each in stage.runner.generations]

    for choice in choices:
        assert choice["prompt_logprobs"] == in_vllm(prompts[choice["index"] // 2], top)
        assert choice["logprobs"] is None


async def test_a_prompts_log_probabilities_are_beside_the_choices_in_chats():
    async with open_stage() as stage:
        answer = (await ask(stage.port, "POST", CHAT, chat(prompt_logprobs=2, n=2))).json
        prompt = stage.runner.generations[0].prompt_token_ids

    assert answer["prompt_logprobs"] == in_vllm(prompt, 2)
    assert not any("prompt_logprobs" in choice for choice in answer["choices"])


async def test_a_long_prompt_is_shown_whole():
    prompt = [each % VOCAB_SIZE for each in range(1000)]
    async with open_stage() as stage:
        stage.fleet.model_limits = type(stage.fleet.model_limits)(max_model_len=2000)
        body = completion(prompt, prompt_logprobs=1, logprobs=1, echo=True)
        choice = (await ask(stage.port, "POST", COMPLETIONS, body)).json["choices"][0]

    assert choice["prompt_logprobs"] == in_vllm(prompt, 1)
    assert choice["logprobs"]["tokens"][:1000] == [named(token_id) for token_id in prompt]


async def test_a_prompt_whose_log_probabilities_do_not_come_is_an_error_and_not_an_empty_list():
    async with open_stage([Delta("x", [1]), FinishReason.STOP]) as stage:
        stage.runner.returns_prompt_logprobs = False
        answer = await ask(stage.port, "POST", COMPLETIONS, completion(prompt_logprobs=1))

    assert answer.status == 500


async def test_a_request_that_is_cancelled_before_its_prompt_was_computed_still_ends_well():
    async with open_stage([asyncio.Event()]) as stage, stage.channel() as channel:
        body = completion("how are you", prompt_logprobs=1, logprobs=1, echo=True)
        asking = asyncio.create_task(ask(stage.port, "POST", COMPLETIONS, body))
        await stage.runner.started.wait()
        request_id = stage.runner.generations[0].request_id
        await InferenceStub(channel).Cancel(pb.CancelRequest(request_id=request_id))
        answer = await asking

    assert (answer.status, answer.json["error"]["code"]) == (409, "cancelled")


# gRPC


async def test_over_grpc_they_are_numbers_beside_the_tokens():
    sampling = types_pb2.SamplingParams(logprobs=2, prompt_logprobs=1)
    async with open_stage(script_of(SAID)) as stage, stage.channel() as channel:
        request = pb.GenerateRequest(model=MODEL, text="how are you", sampling=sampling, echo=True)
        answers = [answer async for answer in InferenceStub(channel).Generate(request)]
        prompt = stage.runner.generations[0].prompt_token_ids

    shown = [each for answer in answers for each in answer.logprobs]
    assert [each.logprob for each in shown] == [logprobs_of(each, 2).logprob for each in TOKENS]
    assert [list(each.top_token_ids) for each in shown] == [[i for i, _ in logprobs_of(t, 2).top] for t in TOKENS]
    assert [each.logprob for each in answers[0].prompt_logprobs] == [logprobs_of(t, 1).logprob for t in prompt[1:]]
    assert not any(answer.prompt_logprobs for answer in answers[1:])
    assert "".join(answer.text for answer in answers) == "how are you" + SAID


# Properties of the shapes


def lists_of(shape, token_ids, logprobs, offsets) -> dict[str, list]:
    contents = shape.write(token_ids, logprobs, offsets)
    return json.loads(shape.object_of(contents))


@settings(deadline=None)
@given(TEXTS, st.integers(0, 3), st.integers(0, 1 << 20))
@example("\U0001477c×", 0, 0)  # one token ends the first character and begins the second
def test_the_bytes_are_the_text_and_the_offsets_point_into_it(text, top, place):
    tokens = list(TOKENIZER.encode_plain(text))
    cut = place % (len(tokens) + 1)
    logprobs = [logprobs_of(each, top) for each in tokens]
    offsets = TextOffsets(TOKENIZER.new_output_stream([], ()))
    shape, whole = CompletionLogprobsFormat(NAMES, top), defaultdict(list)
    for part in (slice(0, cut), slice(cut, None)):
        for name, values in lists_of(shape, tokens[part], logprobs[part], offsets).items():
            whole[name] += values

    # Where one token ends a character and begins the next, those that are whole may be out already.
    before = [b"".join(map(TOKENIZER.token_bytes, tokens[:at])).decode(errors="ignore") for at in range(len(tokens))]
    for least, told, most in zip(offsets_of(tokens), whole["text_offset"], map(len, before), strict=True):
        assert least <= told <= most
    for at, (token_id, offset) in enumerate(zip(tokens, whole["text_offset"], strict=True)):
        if offset > max(whole["text_offset"][:at], default=-1) and not whole["tokens"][at].startswith("bytes:"):
            assert text[offset:].startswith(TOKENIZER.token_bytes(token_id).decode())
    content = lists_of(ChatLogprobsFormat(NAMES, top), tokens, logprobs, offsets)["content"]
    assert b"".join(bytes(each["bytes"]) for each in content) == text.encode()


@pytest.mark.parametrize("logprob", [float("-inf"), -1e30, float("nan")])
def test_numbers_that_json_lacks_are_written_as_openai_does(logprob):
    logprobs = [TokenLogprobs(logprob, ((5, logprob),))]
    offsets = TextOffsets(TOKENIZER.new_output_stream([], ()))

    assert lists_of(ChatLogprobsFormat(NAMES, 1), [5], logprobs, offsets)["content"][0]["logprob"] == -9999.0
    assert lists_of(CompletionLogprobsFormat(NAMES, 1), [5], logprobs, offsets)["token_logprobs"] == [-9999.0]
    assert json.loads(f"[{PromptLogprobsFormat(NAMES).write([5], logprobs)}]") == [
        {"5": {"logprob": -9999.0, "rank": 1, "decoded_token": plain(5)}}
    ]


def test_a_token_that_the_tokenizer_does_not_have_has_no_bytes():
    unknown = [TokenLogprobs(-1.0)]
    entry = lists_of(
        ChatLogprobsFormat(NAMES, 0), [VOCAB_SIZE + 1], unknown, TextOffsets(TOKENIZER.new_output_stream([], ()))
    )["content"][0]

    assert (entry["token"], entry["bytes"]) == ("", None)


def test_lists_that_do_not_belong_together_are_never_shown():
    for shape in (ChatLogprobsFormat(NAMES, 0), CompletionLogprobsFormat(NAMES, 0)):
        with pytest.raises(ValueError, match="shorter"):
            shape.write([5, 6], [TokenLogprobs(-1.0)], TextOffsets(TOKENIZER.new_output_stream([], ())))
