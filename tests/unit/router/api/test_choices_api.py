"""Answers with several choices: whole, as a stream, over gRPC, of beams, and of several prompts."""

import asyncio
import json
from collections import defaultdict
from contextlib import aclosing
from itertools import pairwise

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason, SamplingParams
from quire_proto.text.detokenizer import REPLACEMENT
from quire_router.api.multi_prompt import MultiPromptRunner
from quire_router.api.request_limits import ConcurrencyLimit
from quire_router.api.response_opener import with_prompt_echo
from quire_router.core.generation import Delta, GenerationRequest, Usage

from tests.support.scripted_api import (
    MODEL,
    TOKENIZER,
    VOCAB_SIZE,
    ask,
    chat,
    completion,
    events_of,
    open_stage,
    script_of,
    text_of,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "Hello wörld"
BOTH = [(CHAT, chat), (COMPLETIONS, completion)]


def answer_of(*texts: str, reasons=None) -> list[Delta]:
    """A script in which each choice says something of its own, a letter at a time and by turns."""
    reasons = reasons or [FinishReason.STOP] * len(texts)
    turns = [
        Delta(text[at], [at + 1], index=index)
        for at in range(max(map(len, texts)))
        for index, text in enumerate(texts)
        if at < len(text)
    ]
    ends = [Delta("", [], reason, index=index) for index, reason in enumerate(reasons)]
    return [*turns, *ends[:-1], Delta("", [], reasons[-1], Usage(3, len(turns)), index=len(texts) - 1)]


class Verbatim:
    """A runner that gives prepared deltas: those of the script that belongs to the prompt's first token."""

    def __init__(self, *scripts: list[Delta | Exception | asyncio.Event]) -> None:
        self.scripts = scripts
        self.given = 0
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.cancelled: list[str] = []

    async def run(self, generation: GenerationRequest):
        try:
            for step in self.scripts[generation.prompt_token_ids[0]]:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    self.given += 1
                    yield step
                    await asyncio.sleep(0)
        finally:
            self.closed.append(generation.request_id)

    async def run_once(self, generation: GenerationRequest, _siblings=None):
        self.opened.append(generation.request_id)
        return self.run(generation)

    def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        return True


def together(runner: Verbatim, running: ConcurrencyLimit | None = None) -> MultiPromptRunner:
    return MultiPromptRunner(runner, running or ConcurrencyLimit(100))


def generations(prompts: int, n: int = 1) -> list[GenerationRequest]:
    ids = ["r", *(f"r_{number}" for number in range(1, prompts))]
    return [GenerationRequest(name, MODEL, [number], SamplingParams(n=n)) for number, name in enumerate(ids)]


def by_choice(chunks) -> dict[int, list]:
    choices = defaultdict(list)
    for chunk in chunks:
        for choice in chunk["choices"]:
            choices[choice["index"]].append(choice)
    return choices


# n


@pytest.mark.parametrize("n", [1, 2, 7])
async def test_n_choices_come_in_order(n):
    async with open_stage() as stage, stage.openai() as api:
        talk = await api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], n=n)
        text = await api.completions.create(model=MODEL, prompt="hi", n=n)

    assert [choice.index for choice in talk.choices] == [choice.index for choice in text.choices] == [*range(n)]
    assert {choice.message.content for choice in talk.choices} == {choice.text for choice in text.choices} == {TEXT}
    assert talk.usage.completion_tokens == 4 * n


@pytest.mark.parametrize(("path", "build"), BOTH)
async def test_each_choice_of_a_stream_has_its_own_text_and_end(path, build):
    body = build(n=3, stream=True, stream_options={"include_usage": True})
    async with open_stage() as stage:
        *chunks, usage, done = (await ask(stage.port, "POST", path, body)).events

    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 12)
    choices = by_choice(chunks)
    assert sorted(choices) == [0, 1, 2]
    for pieces in choices.values():
        assert "".join(piece.get("text") or piece.get("delta", {}).get("content", "") for piece in pieces) == TEXT
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
        if path == CHAT:
            assert [piece["delta"].get("role") for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)


@pytest.mark.parametrize(("path", "build"), BOTH)
@pytest.mark.parametrize("more", [{}, {"include_usage": True}, {"include_event_ids": True}])
@pytest.mark.parametrize("shown", [{}, {"logprobs": True}])
async def test_continuous_usage_puts_the_usage_so_far_into_each_event(path, build, more, shown):
    shown = {"logprobs": 1} if shown and path != CHAT else shown
    body = build(n=2, stream=True, stream_options={"continuous_usage_stats": True, **more}, **shown)
    async with open_stage() as stage:
        *chunks, usage, done = (await ask(stage.port, "POST", path, body)).events

    assert (done, usage["choices"], usage["usage"]["completion_tokens"]) == ("[DONE]", [], 8)
    prompt = usage["usage"]["prompt_tokens"]
    for index in (0, 1):
        so_far = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        tokens = [each["completion_tokens"] for each in so_far]
        assert tokens == sorted(tokens)
        assert (tokens[0], tokens[-1]) == (0 if path == CHAT else 1, 4)
        assert all(each["prompt_tokens"] == prompt for each in so_far)
        assert all(each["total_tokens"] == prompt + each["completion_tokens"] for each in so_far)


async def test_no_event_has_the_usage_so_far_where_it_was_refused():
    body = chat(stream=True, stream_options={"continuous_usage_stats": True, "include_usage": False})
    async with open_stage() as stage:
        *chunks, _ = (await ask(stage.port, "POST", CHAT, body)).events

    assert all("usage" not in chunk for chunk in chunks)


async def test_the_openai_clients_own_accumulator_reads_the_stream():
    async with open_stage() as stage, stage.openai() as api:
        messages = [{"role": "user", "content": "hi"}]
        async with api.chat.completions.stream(model=MODEL, messages=messages, n=2, logprobs=True) as stream:
            completed = await stream.get_final_completion()

    assert [choice.message.content for choice in completed.choices] == [TEXT, TEXT]
    assert [len(choice.logprobs.content) for choice in completed.choices] == [4, 4]


async def test_choices_over_grpc_have_an_index_and_the_usage_comes_with_the_last_end():
    request = pb.GenerateRequest(model=MODEL, text="hi", sampling=types_pb2.SamplingParams(n=3))
    async with open_stage() as stage, stage.channel() as channel:
        answers = [answer async for answer in InferenceStub(channel).Generate(request)]

    texts = defaultdict(str)
    for answer in answers:
        texts[answer.index] += answer.text
    assert dict(texts) == dict.fromkeys(range(3), TEXT)
    ends = [(answer.index, answer.HasField("usage")) for answer in answers if answer.finish_reason]
    assert ends == [(0, False), (1, False), (2, True)]


async def test_a_response_with_an_unfinished_choice_is_never_passed_on_as_complete():
    script = [Delta("one", [1]), Delta("", [], FinishReason.STOP, Usage(3, 1))]
    async with open_stage(runner=Verbatim(script)) as stage:
        whole = await ask(stage.port, "POST", COMPLETIONS, completion([0], n=2))

    assert whole.status == 500


# Selected outputs


@pytest.mark.parametrize("fields", [{"n": 2, "best_of": 4}, {"best_of": 4}])
async def test_only_the_best_are_shown_with_log_probabilities_only_if_requested(fields):
    async with open_stage() as stage, stage.channel() as channel:
        answer = await ask(stage.port, "POST", COMPLETIONS, completion(**fields))
        request = pb.GenerateRequest(model=MODEL, text="hi", sampling=types_pb2.SamplingParams(**fields))
        pieces = [piece async for piece in InferenceStub(channel).Generate(request)]

    assert [choice["logprobs"] for choice in answer.json["choices"]] == [None] * fields.get("n", 1)
    assert not any(piece.logprobs for piece in pieces)


async def test_beams_come_with_their_scores():
    async with open_stage() as stage, stage.channel() as channel:
        answers = [
            await ask(stage.port, "POST", path, build(**fields))
            for path, build in BOTH
            for fields in ({"n": 2, "beam_width": 3}, {"n": 2, "use_beam_search": True})
        ]
        request = pb.GenerateRequest(model=MODEL, text="hi", sampling=types_pb2.SamplingParams(n=2, beam_width=3))
        pieces = [piece async for piece in InferenceStub(channel).Generate(request)]

    for answer in answers:
        assert [choice["score"] for choice in answer.json["choices"]] == [0.5, 0.5]
    assert [piece.score for piece in pieces if piece.finish_reason] == [0.5, 0.5]
    assert not any(piece.HasField("score") for piece in pieces if not piece.finish_reason)


async def test_a_response_without_beam_search_has_no_scores():
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", COMPLETIONS, completion())

    assert "score" not in answer.json["choices"][0]


async def test_a_priority_goes_to_the_engines_where_the_router_takes_it():
    async with open_stage(allow_priority=True) as stage, stage.channel() as channel:
        await ask(stage.port, "POST", COMPLETIONS, completion(priority=-5))
        await ask(stage.port, "POST", CHAT, chat(priority=7))
        await InferenceStub(channel).Generate(pb.GenerateRequest(model=MODEL, text="x", priority=9)).read()

    assert [generation.priority for generation in stage.runner.generations] == [-5, 7, 9]


# Several prompts


@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[5], [6, 7], [8]]])
@pytest.mark.parametrize("n", [1, 2])
async def test_the_choices_of_a_list_of_prompts_are_numbered_through(prompts, n):
    async with open_stage() as stage, stage.openai() as api:
        answer = await api.completions.create(model=MODEL, prompt=prompts, n=n, echo=True)
        seen = {each.request_id: each for each in stage.runner.generations}

    texts = [text_of(each.prompt_token_ids) for each in seen.values() for _ in range(n)]
    assert [choice.index for choice in answer.choices] == [*range(3 * n)]
    assert [choice.text for choice in answer.choices] == [text + TEXT for text in texts]
    assert answer.usage.prompt_tokens == sum(len(each.prompt_token_ids) for each in seen.values())
    assert answer.usage.completion_tokens == 3 * n * 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 6
    assert len(seen) == 3


async def test_a_list_of_prompts_can_be_streamed():
    body = completion(["a", "b"], n=2, stream=True, stream_options={"include_usage": True})
    async with open_stage() as stage:
        *chunks, usage, done = (await ask(stage.port, "POST", COMPLETIONS, body)).events

    choices = by_choice(chunks)
    assert done == "[DONE]"
    assert {index: "".join(piece["text"] for piece in pieces) for index, pieces in choices.items()} == dict.fromkeys(
        range(4), TEXT
    )
    assert all(pieces[-1]["finish_reason"] == "stop" for pieces in choices.values())
    assert usage["usage"]["completion_tokens"] == 16


async def test_an_error_of_one_prompt_ends_the_request_and_the_other_prompts():
    never = asyncio.Event()
    runner = Verbatim([never], [QuireError(ErrorCode.OVERLOADED, "Full.", retry_after=1)], [never])
    async with open_stage(runner=runner) as stage:
        answer = await ask(stage.port, "POST", COMPLETIONS, completion([[0], [1], [2]]))

    assert (answer.status, answer.error["message"]) == (429, "Full.")
    assert len(runner.closed) == 3


async def test_a_client_that_leaves_cancels_every_prompt():
    never = asyncio.Event()
    runner = Verbatim([Delta("x", [1]), never], [never], [never])
    async with open_stage(runner=runner) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        body = json.dumps(completion([[0], [1], [2]], stream=True)).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: test\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b'"text":"x"')
        writer.close()
        async with asyncio.timeout(10):
            while len(runner.closed) < 3:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.001)


async def test_cancelling_a_request_cancels_every_prompt():
    async with open_stage(["one", asyncio.Event()]) as stage, stage.channel() as channel:
        asking = asyncio.create_task(ask(stage.port, "POST", COMPLETIONS, completion([[1], [2], [3]])))
        async with asyncio.timeout(10):
            while len(stage.runner.aborts) < 3:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.001)
        request_id = next(iter(stage.runner.generations)).request_id
        await InferenceStub(channel).Cancel(pb.CancelRequest(request_id=f"cmpl-{request_id}"))
        answer = await asking

    assert (answer.status, answer.json["error"]["code"]) == (409, "cancelled")


async def test_each_prompt_takes_a_place_among_the_requests_in_progress():
    async with open_stage(concurrent=3) as stage:
        with stage.service.concurrency.acquire():
            fits = await ask(stage.port, "POST", COMPLETIONS, completion(["a"] * 2))
            refused = await ask(stage.port, "POST", COMPLETIONS, completion(["a"] * 3))
        alone = await ask(stage.port, "POST", COMPLETIONS, completion(["a"] * 4))
        assert len(stage.service.concurrency) == 0

    assert (fits.status, refused.status, alone.status) == (200, 429, 200)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.text("abc", min_size=1, max_size=4), min_size=2, max_size=2), min_size=1, max_size=5))
def test_however_the_deltas_of_several_prompts_interleave_every_choice_is_complete(texts):
    runner, running = Verbatim(*(answer_of(*each) for each in texts)), ConcurrencyLimit(100)

    async def collect():
        return [delta async for delta in await together(runner, running).run(generations(len(texts), n=2))]

    deltas = asyncio.run(collect())
    said = ["".join(delta.text for delta in deltas if delta.index == index) for index in range(2 * len(texts))]
    assert said == [text for each in texts for text in each]
    ends = [delta.index for delta in deltas if delta.finish_reason]
    assert sorted(ends) == [*range(2 * len(texts))]
    assert [delta.usage for delta in deltas if delta.usage] == [deltas[-1].usage]
    tokens = sum(len(text) for each in texts for text in each)
    assert deltas[-1].usage == Usage(3 * len(texts), tokens)
    assert len(runner.closed) == len(texts)
    assert len(running) == 0


async def test_all_prompts_are_in_the_journal_before_the_first_event():
    runner = Verbatim(*[answer_of("x")] * 3)
    async with aclosing(await together(runner).run(generations(3))):
        assert (runner.opened, runner.given) == (["r", "r_1", "r_2"], 0)


async def test_a_slow_reader_holds_back_the_generation_of_deltas():
    runner = Verbatim(*[[Delta("x", [1])] * 1000] * 2)
    run = await together(runner).run(generations(2))
    await anext(run)
    for _ in range(500):
        await asyncio.sleep(0)
    assert runner.given < 10, "pieces are collected"
    await run.aclose()
    assert sorted(runner.closed) == ["r", "r_1"]


# Errors before the first piece


@pytest.mark.parametrize(("path", "build"), BOTH)
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3, "stream": True}, {"n": 2}])
async def test_a_grammar_that_the_engine_refuses_is_400_also_for_streams(path, build, fields):
    refusal = QuireError(ErrorCode.INVALID, "This regular expression is not valid.", param="regex")
    async with open_stage([refusal]) as stage, stage.channel() as channel:
        answer = await ask(stage.port, "POST", path, build(guided_regex="(", **fields))
        sampling = types_pb2.SamplingParams(structured=types_pb2.Structured(regex="("))
        with pytest.raises(grpc.aio.AioRpcError) as over_grpc:
            await InferenceStub(channel).Generate(pb.GenerateRequest(model=MODEL, text="x", sampling=sampling)).read()

    assert (answer.status, answer.error["param"], answer.error["message"]) == (400, "regex", refusal.message)
    assert over_grpc.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_grammar_that_dies_in_the_middle_ends_its_own_stream_with_an_error_event():
    async with open_stage(["one", QuireError(ErrorCode.INTERNAL, "It died.")]) as stage:
        answer = await ask(stage.port, "POST", COMPLETIONS, completion(guided_regex="a", stream=True, n=2))

    assert answer.status == 200
    assert answer.events[-1]["error"]["message"] == "It died."


@pytest.mark.parametrize("stream", [True, False])
async def test_a_whole_answer_may_be_long(stream):
    async with open_stage(["x" * 300_000] * 4 + [FinishReason.STOP]) as stage:
        answer = await ask(stage.port, "POST", COMPLETIONS, completion(stream=stream))

    texts = (
        [event["choices"][0]["text"] for event in answer.events[:-1]] if stream else [answer.json["choices"][0]["text"]]
    )
    assert "".join(texts) == "x" * 1_200_000


# Echoed prompts


async def played(deltas):
    for delta in deltas:
        yield delta


def echo_of(token_ids, cut, **rules) -> str:
    """The answer to the first tokens that says the others."""
    output = TOKENIZER.new_output_stream(token_ids[:cut], (), **rules)
    pieces = [Delta(output.push([each]), [each]) for each in token_ids[cut:]]
    pieces.append(Delta(output.finish(), [], FinishReason.STOP, Usage(1, 1)))
    generation = GenerationRequest("r", MODEL, token_ids[:cut], SamplingParams(), echo=True, **rules)

    async def collect():
        return [delta.text async for delta in with_prompt_echo(played(pieces), [generation], TOKENIZER)]

    return "".join(asyncio.run(collect()))


@settings(deadline=None, max_examples=40)
@given(st.text("é😀a", min_size=1), st.data())
def test_an_echo_and_its_output_are_one_text_also_where_a_character_lies_across_them(text, data):
    token_ids = list(TOKENIZER.encode_plain(text))
    assert echo_of(token_ids, data.draw(st.integers(1, len(token_ids)))) == text


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40), st.booleans(), st.data())
def test_an_echo_of_any_tokens_has_all_text_of_theirs(token_ids, skip_special_tokens, data):
    cut = data.draw(st.integers(1, len(token_ids)))
    prompt = TOKENIZER.new_output_stream([], (), skip_special_tokens=False)
    output = TOKENIZER.new_output_stream(token_ids[:cut], (), skip_special_tokens=skip_special_tokens)
    text = prompt.push(token_ids[:cut]) + prompt.finish() + output.push(token_ids[cut:]) + output.finish()

    echo = echo_of(token_ids, cut, skip_special_tokens=skip_special_tokens)
    assert echo.replace(REPLACEMENT, "") == text.replace(REPLACEMENT, "")  # of parts of characters that never meet


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("skip_special_tokens", [None, False])
@pytest.mark.parametrize("prompt", ["<|start|>user\nhi<|end|>\n", "hello <|end|>", "<|start|><|start|>", "é\u0301 x"])
async def test_an_echo_is_the_prompt_as_it_was_sent_with_offsets_into_it(prompt, skip_special_tokens, as_tokens):
    token_ids = TOKENIZER.encode(prompt)
    sent, shown = (token_ids, TOKENIZER.decode(token_ids)) if as_tokens else (prompt, prompt)
    asked = completion(sent, echo=True, logprobs=0, skip_special_tokens=skip_special_tokens)
    async with open_stage(script_of("hello wor")) as stage:
        whole = await ask(stage.port, "POST", COMPLETIONS, asked)
        stream = await ask(stage.port, "POST", COMPLETIONS, {**asked, "stream": True})
    choice = whole.json["choices"][0]
    assert choice["text"] == shown + "hello wor"
    offsets = choice["logprobs"]["text_offset"]
    pieces = [choice["text"][first:last] for first, last in pairwise([*offsets, len(choice["text"])])]
    assert "".join(pieces[: len(token_ids)]) == shown
    chunks = [
        event["choices"][0] for _, event in events_of(stream.body) if isinstance(event, dict) and event["choices"]
    ]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    streamed = [offset for chunk in chunks for offset in (chunk["logprobs"] or {"text_offset": ()})["text_offset"]]
    assert streamed == offsets


@pytest.mark.parametrize(("path", "body"), BOTH, ids=["chat", "completion"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_an_answer_shows_its_tokens_where_they_are_asked_for(path, body, streamed):
    async with open_stage(script_of(TEXT)) as stage:
        request = body("hello", n=2, stream=streamed, return_token_ids=True)
        answer = await ask(stage.port, "POST", path, request)
        whole = answer.json if not streamed else None
        chunks = [chunk for _, chunk in events_of(answer.body)[:-1]] if streamed else [whole]
        tokenized = await ask(stage.port, "POST", "/tokenize", body("hello"))

    prompts, tokens = defaultdict(list), defaultdict(list)
    for chunk in chunks:
        for choice in chunk["choices"]:
            shown = (choice if path == COMPLETIONS else chunk).get("prompt_token_ids")
            prompts[choice["index"]] += [shown] if shown else []
            tokens[choice["index"]] += choice.get("token_ids") or []
    prompt = tokenized.json["tokens"]
    assert prompts == {0: [prompt], 1: [prompt]}
    assert tokens == dict.fromkeys((0, 1), TOKENIZER.encode_plain(TEXT))


@pytest.mark.parametrize(("path", "body"), BOTH, ids=["chat", "completion"])
async def test_log_probabilities_name_tokens_by_their_ids_where_that_is_asked_for(path, body):
    logprobs = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    async with open_stage(script_of(TEXT)) as stage:
        answer = await ask(stage.port, "POST", path, body("hello", return_tokens_as_token_ids=True, **logprobs))

    shown = answer.json["choices"][0]["logprobs"]
    names = [each["token"] for each in shown["content"]] if path == CHAT else shown["tokens"]
    assert names == [f"token_id:{each}" for each in TOKENIZER.encode_plain(TEXT)]
    top = shown["content"][0]["top_logprobs"][0]["token"] if path == CHAT else next(iter(shown["top_logprobs"][0]))
    assert top.startswith("token_id:")
