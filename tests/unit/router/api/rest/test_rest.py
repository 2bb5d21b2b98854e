"""The REST API over real sockets: OpenAI's shapes, errors, and clients that leave."""

import asyncio
import json
import re
from contextlib import suppress

import openai
import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_router.api.rest.http_server import ConnectionLimits

from tests.support.scripted_api import ANSWER, MAX_MODEL_LEN, MODEL, ask, chat, completion, open_stage, read_answer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = {
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
TEXT = "Hello wörld"


# The answers


async def test_a_chat_is_answered_as_the_openai_client_expects_it():
    async with open_stage() as stage, stage.openai() as api:
        answer = await api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])

    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", MODEL, "chatcmpl-")
    assert answer.choices[0].message.content == TEXT
    assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", "stop")
    prompt_tokens = len(stage.runner.generations[0].prompt_token_ids)
    assert answer.usage.model_dump(exclude_none=True) == {
        **USAGE,
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + 4,
    }


async def test_a_completion_is_answered_as_the_openai_client_expects_it():
    async with open_stage() as stage, stage.openai() as api:
        answer = await api.completions.create(model=MODEL, prompt="hi", max_tokens=5)

    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", MODEL, "cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "stop")
    assert answer.usage.completion_tokens == 4


async def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason():
    async with open_stage() as stage, stage.openai() as api:
        stream = await api.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        chunks = [chunk async for chunk in stream]

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["stop"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_a_completion_stream_has_the_same_text():
    async with open_stage() as stage, stage.openai() as api:
        stream = await api.completions.create(model=MODEL, prompt="hi", stream=True)
        chunks = [chunk async for chunk in stream]

    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, completion())])
async def test_the_usage_comes_in_a_last_chunk_without_choices_when_requested(path, body):
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with open_stage() as stage:
        events = (await ask(stage.port, "POST", path, body)).events

    *others, usage, done = events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in others)


async def test_text_is_escaped_so_that_no_line_reader_splits_it():
    text = 'a"\\\n\r\u2028\x85é😀</script>'
    async with open_stage([text, FinishReason.LENGTH]) as stage:
        answer = await ask(stage.port, "POST", COMPLETIONS, completion(stream=True))

    assert answer.body.isascii()
    assert answer.events[0]["choices"][0]["text"] == text
    assert answer.events[1]["choices"][0]["finish_reason"] == "length"


async def test_models_are_listed_with_their_maximum_length_once_an_engine_reports_it():
    async with open_stage() as stage, stage.openai() as api:
        models = [model async for model in await api.models.list()]
        model = await api.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("other")

    assert [each.id for each in models] == [MODEL]
    assert (model.object, model.owned_by, model.max_model_len) == ("model", "quire", MAX_MODEL_LEN)


async def test_the_request_id_in_the_header_is_ours_and_is_part_of_the_answers_id():
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", CHAT, chat(), {"x-request-id": "mine"})

    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert answer.json["id"] == "chatcmpl-" + answer.headers["x-request-id"]
    assert stage.runner.generations[0].request_id == answer.headers["x-request-id"]


# Health and metrics


async def test_health_lists_the_models_that_have_engines():
    async with open_stage() as stage:
        assert (await ask(stage.port, "GET", "/health")).status == 200
        stage.fleet.engines = 0
        for port in (stage.port, stage.admin_port):
            answer = await ask(port, "GET", "/health")
            assert (answer.status, answer.json["ready_engines"]) == (503, {MODEL: 0})
            assert "retry-after" in answer.headers
            for path in ("/started", "/ready", "/live"):
                assert (await ask(port, "GET", path)).status == 200


async def test_a_router_in_its_shutdown_delay_still_serves_and_closes_connections():
    async with open_stage() as stage:
        stage.service.concurrency.start_draining()
        answer = await ask(stage.port, "POST", CHAT, chat())
        pages = {path: await ask(stage.port, "GET", path) for path in ("/started", "/ready", "/health", "/live")}

    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert [page.status for page in pages.values()] == [200, 503, 503, 200]
    assert "retry-after" in pages["/ready"].headers


@pytest.mark.parametrize("keys", [[], ["a-key-that-is-right"]], ids=["open", "keys"])
async def test_metrics_are_there_on_the_metrics_port_only(keys):
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    async with open_stage(keys=keys) as stage:
        await ask(stage.port, "POST", CHAT, {}, headers)
        answer = await ask(stage.admin_port, "GET", "/metrics")
        assert (await ask(stage.port, "GET", "/metrics", None, headers)).status == 404

    assert answer.headers["content-type"].startswith("text/plain")
    assert b'quire_rejections_total{reason="invalid"}' in answer.body


async def test_the_admin_port_serves_nothing_else():
    async with open_stage() as stage:
        assert (await ask(stage.admin_port, "GET", "/v1/models")).status == 404


# Errors


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
async def test_unknown_routes_and_methods_are_errors_of_the_same_shape(method, path, status, code):
    async with open_stage() as stage:
        answer = await ask(stage.port, method, path)

    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.error["request_id"] == answer.headers["x-request-id"]
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(("method", "path", "takes"), [("GET", CHAT, ["POST"]), ("POST", "/health", ["GET", "HEAD"])])
async def test_a_405_names_the_allowed_method(method, path, takes):
    async with open_stage() as stage:
        answer = await ask(stage.port, method, path)

    assert answer.error["message"] == f"{path} takes {' and '.join(takes)}, not {method}."
    assert sorted(answer.headers["allow"].split(", ")) == takes


async def test_the_metrics_port_sends_clients_to_the_port_of_the_api():
    async with open_stage() as stage:
        answer = await ask(stage.admin_port, "GET", "/v1/models")

    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert answer.error["message"] == (
        "There is nothing at /v1/models: "
        "this is the metrics port; the API is on the port of --http-port, 8000 by default."
    )


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/conversations", "use POST /v1/responses"),
        ("/messages", "use POST /v1/messages"),
        ("/v1/v1/messages", "the base URL of Anthropic's clients ends without /v1"),
        ("/v1/complete", "use POST /v1/messages"),
        ("/embeddings", "use POST /v1/embeddings"),
        ("/chat/completions", "use POST /v1/chat/completions"),
        ("/v1/v1/completions", "use POST /v1/completions"),
        ("/metrics", "port of --metrics-port, whose address quire serve prints"),
        ("/docs", "GET /openapi.json describes this API"),
        ("/v1/tokenize", "use POST /tokenize"),
        ("/v1/chat/completion", "use POST /v1/chat/completions"),
        ("/generate", "use POST /v1/completions"),
        ("/v1/%3Cscript%3E%C3%A9", "There is nothing at /v1/<script>é"),
        ("/v1/nothing", "GET /openapi.json lists what there is"),
        ("/" + "x" * 4000, "There is nothing at /xxx"),
    ],
)
async def test_an_unknown_path_is_named_with_the_one_to_use_instead(path, words):
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", path, {})

    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert words in answer.error["message"]
    assert len(answer.error["message"]) < 300


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", CHAT, chat() | {"model": "other"}),
        ("POST", "/v1/completions", completion() | {"model": "other"}),
        ("POST", "/tokenize", {"model": "other", "prompt": "x"}),
        ("GET", "/v1/models/other", None),
    ],
)
async def test_an_unknown_model_has_a_code_of_its_own_and_a_message_for_both_apis(method, path, body):
    async with open_stage() as stage:
        answer = await ask(stage.port, method, path, body)

    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert answer.error["message"] == f"There is no model named 'other' here, only {MODEL!r}."


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"model":', b"[" * 50_000])
async def test_a_body_that_is_no_json_object_is_refused(body):
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", CHAT, body)

    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_another_content_type_is_refused(kind):
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", CHAT, chat(), {"content-type": kind})

    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


async def test_a_charset_beside_the_content_type_is_fine():
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", CHAT, chat(), {"content-type": "Application/JSON; charset=utf-8"})

    assert answer.status == 200


async def test_a_body_over_the_limit_is_refused_with_the_limit():
    async with open_stage(max_body_bytes=1000) as stage:
        answer = await ask(stage.port, "POST", CHAT, chat("x" * 1000))

    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert "1000" in answer.error["message"]


async def test_a_refused_body_is_the_last_of_its_connection_and_never_read_as_requests():
    body = b"GET /live HTTP/1.1\r\n\r\n" * 100_000
    async with open_stage(max_body_bytes=1000) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await read_answer(reader)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        rest = await reader.read()
        writer.close()

    assert (answer.status, answer.headers["connection"], rest) == (413, "close", b"")


async def test_a_body_without_a_stated_length_is_bounded_while_it_arrives():
    async with open_stage(max_body_bytes=1000) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        writer.write(head.encode() + (b"200\r\n" + b"x" * 512 + b"\r\n") * 3)
        answer = await read_answer(reader)  # the body never ends, the answer comes all the same
        writer.close()

    assert answer.status == 413


async def test_a_body_that_does_not_arrive_times_out():
    async with open_stage(patience=0.05) as stage:
        answer = await ask(stage.port, "POST", CHAT, b"{", {"content-length": "50"})

    assert (answer.status, answer.error["code"]) == (408, "body_too_slow")
    assert len(stage.service.concurrency) == 0


@pytest.mark.parametrize("where", ["header", "target"])
async def test_a_request_head_over_the_limit_is_refused(where):
    path, header = ("/v1/models", "x" * 17_000) if where == "header" else ("/v1/models?" + "x" * 17_000, "")
    async with open_stage() as stage:
        answer = await ask(stage.port, "GET", path, None, {"x-long": header})

    assert (answer.status, answer.error["code"]) == (431, "headers_too_large")


async def test_headers_that_never_end_are_not_collected():
    async with open_stage() as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(b"GET /live HTTP/1.1\r\nx-long: ")
        with suppress(ConnectionError):  # the server may be gone before it has read all of this
            for _ in range(10_000):
                writer.write(b"x" * 1000)
                await writer.drain()
            pytest.fail("the server read ten megabytes of one header")
        with suppress(ConnectionError):
            await reader.read()
        writer.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET /live HTTP/1.1\r\nx-slow: ", b"\r\n"], ids=["nothing", "half a head", "a line"]
)
@pytest.mark.parametrize("before", [b"", b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["first", "next"])
async def test_a_head_that_does_not_arrive_times_out(before, sent):
    async with open_stage(limits=ConnectionLimits(head=0.05, idle=0.05)) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(before)
        if before:
            assert (await read_answer(reader)).status == 200
        writer.write(sent)
        if sent.startswith(b"GET"):
            answer = await read_answer(reader)
            assert (answer.status, answer.error["code"]) == (408, "headers_too_slow")
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_a_head_that_arrives_byte_by_byte_times_out_too():
    async with open_stage(limits=ConnectionLimits(head=0.1)) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        reading = asyncio.create_task(read_answer(reader))
        writer.write(b"GET /live HTTP/1.1\r\nx-slow: ")
        async with asyncio.timeout(10):
            while not reading.done():
                writer.write(b"x")
                await asyncio.sleep(0.01)
        writer.close()

    assert (await reading).status == 408


async def test_the_rest_of_a_refused_body_does_not_hold_a_connection():
    async with open_stage(max_body_bytes=10, limits=ConnectionLimits(head=0.1)) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n".encode())
        writer.write(b"content-type: application/json\r\ncontent-length: 1000000\r\n\r\n")
        assert (await read_answer(reader)).status == 413
        reading = asyncio.create_task(reader.read())
        async with asyncio.timeout(10):
            with suppress(ConnectionError):
                while not reading.done():
                    writer.write(b"x")
                    await asyncio.sleep(0.01)
                await reading
        writer.close()


async def test_an_answer_that_takes_longer_than_a_head_may_is_not_cut_off():
    release = asyncio.Event()
    async with open_stage(["one", release, *ANSWER], limits=ConnectionLimits(head=0.05, idle=0.05)) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        body = json.dumps(chat(stream=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: test\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body + b"GET /live HTTP/1.1\r\n")
        await asyncio.sleep(0.2)
        release.set()
        assert (await read_answer(reader)).events[-1] == "[DONE]"
        assert (await read_answer(reader)).status == 408  # only now it is the next request's turn
        writer.close()


async def test_more_connections_than_allowed_are_refused_with_an_error():
    release, body = asyncio.Event(), json.dumps(chat()).encode()
    sent = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    async with open_stage(["one", release], limits=ConnectionLimits(connections=2)) as stage:
        held = [await asyncio.open_connection("127.0.0.1", stage.port) for _ in range(2)]
        for number, (_, each) in enumerate(held, 1):
            each.write(sent.encode() + body)
            async with asyncio.timeout(10):
                while len(stage.runner.generations) < number:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.01)
        refused, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        answer = await read_answer(refused)
        assert await refused.read() == b""
        for each in (writer, held[0][1]):
            each.close()
            await each.wait_closed()
        async with asyncio.timeout(10):
            while (again := await ask(stage.port, "GET", "/live")).status != 200:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        held[1][1].close()

    assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
    assert "retry-after" in answer.headers
    assert again.json == {"status": "ok"}


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"])
async def test_malformed_http_is_refused_with_an_error_of_the_same_shape(sent):
    async with open_stage() as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(sent)
        answer = await read_answer(reader)
        assert await reader.read() == b""
        writer.close()

    assert (answer.status, answer.error["code"]) == (400, "malformed_request")
    assert answer.error["request_id"] == answer.headers["x-request-id"]


async def test_a_body_whose_content_length_is_too_large_is_not_awaited():
    async with open_stage(max_body_bytes=1000) as stage:
        answer = await ask(stage.port, "POST", CHAT, b"", {"content-length": "1001"})

    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("code", list(ErrorCode))
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_token_has_its_own_status(code, stream):
    error = QuireError(code, "It is so.", param="model", retry_after=1.5)
    async with open_stage([error]) as stage:
        answer = await ask(stage.port, "POST", CHAT, chat(stream=stream))

    assert answer.status == error.status.http
    assert answer.error == {
        "message": "It is so.",
        "type": error.status.kind,
        "param": "model",
        "code": code.name.lower(),
        "request_id": answer.headers["x-request-id"],
    }
    assert answer.headers["retry-after"] in ("2", "3")


async def test_an_error_in_the_middle_of_a_stream_is_its_last_event():
    error = QuireError(ErrorCode.UNAVAILABLE, "The engines went away.")
    async with open_stage(["one", error]) as stage:
        answer = await ask(stage.port, "POST", CHAT, chat(stream=True))

    assert answer.status == 200
    assert answer.events[-1]["error"]["type"] == "service_unavailable_error"
    assert answer.events[-1]["error"]["request_id"] == answer.headers["x-request-id"]
    assert "[DONE]" not in answer.events


async def test_the_openai_client_raises_the_error_in_the_middle_of_a_stream():
    async with open_stage(["one", QuireError(ErrorCode.UNAVAILABLE, "Gone.")]) as stage, stage.openai() as api:
        stream = await api.completions.create(model=MODEL, prompt="hi", stream=True)
        with pytest.raises(openai.APIError, match=r"Gone\."):
            [chunk async for chunk in stream]


@pytest.mark.parametrize("script", [["one"], []], ids=["after a piece", "before any"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_without_a_finish_reason_is_never_passed_on_as_complete(script, stream):
    async with open_stage(script) as stage:
        answer = await ask(stage.port, "POST", CHAT, chat(stream=stream))

    last = answer.events[-1] if answer.status == 200 else answer.json
    assert last["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_internal_error_is_logged_and_its_reason_not_sent(stream, caplog):
    async with open_stage(["one", RuntimeError("the secret /path")]) as stage:
        answer = await ask(stage.port, "POST", CHAT, chat(stream=stream))

    assert b"secret" not in answer.body
    assert b"server_error" in answer.body
    record = next(record for record in caplog.records if record.exc_info)
    assert answer.headers["x-request-id"] in record.getMessage()
    assert "the secret" in str(record.exc_info[1])


async def test_more_requests_than_allowed_get_429_with_retry_after():
    release = asyncio.Event()
    async with open_stage([release, *ANSWER], concurrent=1) as stage:
        first = asyncio.create_task(ask(stage.port, "POST", CHAT, chat()))
        await stage.runner.started.wait()
        refused = await ask(stage.port, "POST", COMPLETIONS, completion())
        assert (await ask(stage.port, "GET", "/health")).status == 200
        release.set()
        assert (await first).status == 200
        again = await ask(stage.port, "POST", COMPLETIONS, completion())

    assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
    assert int(refused.headers["retry-after"]) >= 1
    assert again.status == 200


async def test_a_stopping_router_finishes_running_requests_and_refuses_new_ones():
    release = asyncio.Event()
    async with open_stage([release, *ANSWER]) as stage:
        first = asyncio.create_task(ask(stage.port, "POST", CHAT, chat()))
        await stage.runner.started.wait()
        stage.service.concurrency.close()
        refused = await ask(stage.port, "POST", CHAT, chat())
        health = await ask(stage.port, "GET", "/health")
        release.set()
        assert (await first).status == 200

    assert (refused.status, health.status) == (503, 503)


async def test_no_engine_yet_is_503_with_retry_after():
    async with open_stage() as stage:
        stage.fleet.model_limits = None
        answer = await ask(stage.port, "POST", CHAT, chat())

    assert answer.status == 503
    assert "retry-after" in answer.headers


# Clients that leave


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pieces", [[], ["one"]], ids=["before the first piece", "after it"])
async def test_a_client_that_leaves_cancels_its_request_at_once(stream, pieces):
    never = asyncio.Event()
    async with open_stage([*pieces, never]) as stage:
        _, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        body = json.dumps(chat(stream=stream)).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await stage.runner.started.wait()
        writer.close()
        async with asyncio.timeout(10):
            await stage.runner.abandoned.wait()
            while len(stage.service.concurrency):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.001)


async def test_a_client_that_does_not_read_is_given_up():
    endless = ["x" * 100_000] * 1000
    async with open_stage([*endless, FinishReason.STOP], patience=0.1) as stage:
        _reader, writer = await asyncio.open_connection("127.0.0.1", stage.port, limit=1024)
        body = json.dumps(chat(stream=True)).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        async with asyncio.timeout(30):
            await stage.runner.abandoned.wait()
        writer.transport.abort()


async def test_one_connection_carries_many_requests():
    async with open_stage() as stage, stage.openai() as api:
        answers = [await api.completions.create(model=MODEL, prompt="hi") for _ in range(3)]

    assert len({answer.id for answer in answers}) == 3
