"""Requests that outlive a connection, and state that routers share: resuming, keys, limits, load, the cache."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from time import sleep
from typing import Any

import grpc
import httpx
import openai
import pytest
from openai import Stream
from openai.types import Completion
from quire.v1 import inference_pb2 as pb
from quire_proto.errors import ErrorCode

from tests.service.conftest import DEMO
from tests.support.processes import eventually
from tests.support.replicas import FEW, MODEL, Replicas, RouterClients, replicas

_prompts = count()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with replicas(DEMO, tmp_path_factory.mktemp("replicas")) as stack:
        yield stack


@pytest.fixture
def clients(stack: Replicas) -> Iterator[list[RouterClients]]:
    with stack.clients() as clients:
        yield clients


@pytest.fixture(scope="module")
def waiting(stack: Replicas) -> Iterator[Any]:
    """The response to a request sent before its router had an engine; it waits while the other tests run."""
    client = RouterClients(stack.late)
    pool = ThreadPoolExecutor(1)
    yield pool.submit(client.http.post, "/v1/completions", json=ask(**STREAM, max_tokens=8))
    pool.shutdown(wait=False)


@pytest.fixture(scope="module", autouse=True)
def _waits_from_the_beginning(waiting: Any) -> None:
    """So that its heartbeats cost no time."""


def ask(**fields: Any) -> dict[str, Any]:
    """A request with a new prompt, whose output ends only at ``max_tokens``."""
    return {"model": MODEL, "prompt": f"{next(_prompts)}: once", "max_tokens": 200, "temperature": 0} | fields | ENDLESS


ENDLESS = {"ignore_eos": True}
STREAM = {"stream": True, "stream_options": {"include_event_ids": True}}


def whole(client: RouterClients, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The body of a response over REST."""
    answer = client.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


@contextmanager
def started_stream(client: RouterClients, body: dict[str, Any], **headers: str) -> Iterator[tuple[str, Iterator[str]]]:
    """A stream after its first event: the request's id, and the lines that follow. Leaving it disconnects."""
    with client.http.stream("POST", "/v1/completions", json={**body, **STREAM}, headers=headers) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        assert next(line for line in lines if line.startswith("data:"))
        yield response.headers["x-request-id"], lines


def is_idle(stack: Replicas) -> bool:
    return stack.running() == 0


def test_the_openai_client_reads_on_at_the_other_router(clients: list[RouterClients]) -> None:
    body = ask(max_tokens=300)
    text = text_of(whole(clients[0], body))
    body["stop"] = text[-30:-20]
    undisturbed = text.partition(body["stop"])[0]
    create = clients[0].openai.completions.with_streaming_response.create
    fields = {name: value for name, value in body.items() if name not in ENDLESS}
    text, event_id, chunk_id = "", "", ""
    with create(**fields, stream=True, extra_body=ENDLESS | STREAM) as response:
        for line in response.iter_lines():
            if line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                text, chunk_id = text + text_of(chunk), chunk["id"]
            if len(text) > 40:
                break
    rest = clients[1].openai.get(
        f"/requests/{chunk_id}/events",
        options={"headers": {"Last-Event-ID": event_id}},
        cast_to=Completion,
        stream=True,
        stream_cls=Stream[Completion],
    )
    pieces = list(rest)
    assert len(text) < len(undisturbed), "the stream was broken off, not read to its end"
    assert text + "".join(piece.choices[0].text for piece in pieces) == undisturbed
    assert {piece.id for piece in pieces} == {chunk_id}
    assert pieces[-1].choices[0].stop_reason == body["stop"]


def test_a_background_request_is_polled_and_fetched_at_the_other_router(clients: list[RouterClients]) -> None:
    body = ask(max_tokens=300)
    started = clients[0].http.post("/v1/completions", json={**body, "background": True})
    assert started.status_code == 202
    seen = [clients[1].http.get(started.headers["location"]).json() for _ in range(2)]
    assert seen[0]["status"] == "running"
    assert seen[0]["background"]
    eventually(lambda: clients[1].http.get(started.headers["location"]).json()["status"] == "completed")
    shown = clients[1].http.get(started.headers["location"]).json()
    assert text_of(shown["response"]) == text_of(whole(clients[0], body))
    assert shown["usage"]["completion_tokens"] == 300


def test_a_request_is_cancelled_from_the_other_router(stack: Replicas, clients: list[RouterClients]) -> None:
    with started_stream(clients[0], ask(max_tokens=1900)) as (request_id, lines):
        assert clients[1].http.post(f"/v1/requests/{request_id}/cancel").json()["status"] == "running"
        rest = list(lines)
    assert '"code":"cancelled"' in "".join(rest)
    assert "abort" not in "".join(rest)
    eventually(lambda: is_idle(stack), message="the engine still runs the request")
    eventually(lambda: clients[1].http.get(f"/v1/requests/{request_id}").json()["status"] == "cancelled")


def test_two_with_one_key_at_two_routers_run_once(stack: Replicas, clients: list[RouterClients]) -> None:
    body, before = ask(max_tokens=250, temperature=1.5), stack.generated()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda client: whole(client, body, **{"Idempotency-Key": "once"}), clients)
    third = clients[1].http.post("/v1/completions", json=body, headers={"Idempotency-Key": "once"})
    assert first == second == third.json()
    assert third.headers["x-quire-idempotent-replay"] == "true"
    assert stack.generated() - before == first["usage"]["completion_tokens"] == 250
    other = clients[1].http.post("/v1/completions", json=ask(), headers={"Idempotency-Key": "once"})
    assert (other.status_code, other.json()["error"]["param"]) == (409, "idempotency-key")
    assert stack.generated() - before == 250


def test_a_rest_request_is_polled_resumed_and_cancelled_over_grpc(
    stack: Replicas, clients: list[RouterClients]
) -> None:
    body = ask(max_tokens=1500)
    with started_stream(clients[0], body) as (request_id, lines):
        name, metadata = pb.GetRequestRequest(request_id=f"cmpl-{request_id}"), clients[1].metadata
        assert clients[1].grpc.GetRequest(name, metadata=metadata).status == pb.REQUEST_STATUS_RUNNING
        read = "".join(line for line in lines if line.startswith("id: 20"))
        resumed = clients[1].grpc.Resume(pb.ResumeRequest(request_id=request_id, after="20"), metadata=metadata)
    assert read  # the whole stream was read before the disconnect
    pieces = [message.generate for message in resumed]
    assert sum(len(piece.token_ids) for piece in pieces) == 1480
    assert pieces[-1].usage.completion_tokens == 1500
    with started_stream(clients[0], {**body, "max_tokens": 1900}) as (request_id, lines):
        clients[1].grpc.Cancel(pb.CancelRequest(request_id=request_id), metadata=metadata)
        assert '"code":"cancelled"' in "".join(lines)
    eventually(lambda: is_idle(stack))


def test_a_request_of_another_tenant_is_not_found(stack: Replicas, clients: list[RouterClients]) -> None:
    with stack.clients("stranger") as strange, started_stream(clients[0], ask(max_tokens=1000)) as (request_id, _):
        for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("DELETE", "")):
            there, nowhere = (
                strange[1].http.request(method, f"/v1/requests/{each}{path}") for each in (request_id, "f" * 32)
            )
            assert there.status_code == nowhere.status_code == 404
            assert _without_ids(there) == _without_ids(nowhere)
        for call, message in (
            (strange[1].grpc.GetRequest, pb.GetRequestRequest(request_id=request_id)),
            (strange[1].grpc.Cancel, pb.CancelRequest(request_id=request_id)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(message, metadata=strange[1].metadata)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        same_key = whole(strange[0], ask(prompt="mine", max_tokens=4), **{"Idempotency-Key": "once"})
        assert same_key["usage"]["completion_tokens"] == 4
        assert clients[1].http.get(f"/v1/requests/{request_id}").json()["status"] in ("running", "completed")


def _without_ids(answer: httpx.Response) -> str:
    return re.sub(r'"request_id":"[^"]*"', "", answer.text)


def test_limits_are_those_of_both_routers_in_both_apis(stack: Replicas) -> None:
    small = ask(max_tokens=2)
    with stack.clients("elsewhere") as clients:
        assert _refusal(clients[0], small) == (403, "model")
        assert _refusal_over_grpc(clients[1], small) == (grpc.StatusCode.PERMISSION_DENIED, "model")
        assert clients[0].openai.models.list().data == []
    with stack.clients("short") as clients:
        whole(clients[0], ask(max_tokens=80))
        for client in clients:
            eventually(
                lambda client=client: _is_used_up(client), message="more tokens were used than the limit per minute"
            )
    with stack.clients("single") as clients:
        eventually(lambda: _is_alone(clients), message="two of a tenant run that may run one")
        eventually(lambda: clients[1].http.post("/v1/completions", json=small).status_code == 200)


def _is_used_up(client: RouterClients) -> bool:
    """Whether no tokens are left, as both APIs say it: not when a router counts alone, and has not seen all of it."""
    large = ask(max_tokens=80)
    is_refused = _refusal(client, large) == (429, "tokens_per_minute")
    return is_refused and _refusal_over_grpc(client, large)[1] == "tokens_per_minute"


def _is_alone(clients: list[RouterClients]) -> bool:
    """Whether the second router refuses a request beyond the limit that the first one's uses up: not when one of them
    counts alone, because Redis did not answer within 50 ms, nor while the request of an earlier try is running.
    """
    small, long = ask(max_tokens=1), ask(max_tokens=1900, stream=True)
    with clients[0].http.stream("POST", "/v1/completions", json=long) as response:
        if response.status_code != 200 or _refusal(clients[1], small) != (429, "max_concurrent"):
            return False
        return _refusal_over_grpc(clients[1], small)[1] == "max_concurrent"


def test_requests_a_minute_are_those_of_both_routers(stack: Replicas) -> None:
    admitted = []
    for number in range(FEW):
        with stack.clients(f"few-{number}") as clients:
            answers = [client.http.post("/v1/completions", json=ask(max_tokens=1)) for client in clients * 3]
            admitted.append(sum(answer.status_code == 200 for answer in answers))
            # A router that Redis does not answer within 50 ms counts alone for a second.
            if all(router.metric("quire_limits_shared") == 1 for router in stack.routers) and admitted[-1] == 3:
                assert _refusal(clients[0], ask()) == _refusal(clients[1], ask()) == (429, "requests_per_minute")
                return
        sleep(1)
    pytest.fail(f"the routers admitted {admitted} together, and not 3")


def _refusal(client: RouterClients, body: dict[str, Any]) -> tuple[int, str]:
    """The status and the reason, in the words of the header and of the error, and again as the OpenAI client has it;
    no reason where these differ, as when the second of two requests was let in.
    """
    answer = client.http.post("/v1/completions", json=body)
    if answer.status_code == 200:
        return 200, ""
    assert ("retry-after" in answer.headers) == (answer.status_code in (429, 503))
    fields = {name: value for name, value in body.items() if name not in ENDLESS}
    reasons = {answer.headers.get("x-quire-reason"), answer.json()["error"]["code"]}
    try:
        client.openai.completions.create(**fields)
    except openai.APIStatusError as error:
        reasons.add(error.code)
        return answer.status_code, "".join(map(str, reasons)) if len(reasons) == 1 else ""
    return answer.status_code, ""


def _refusal_over_grpc(client: RouterClients, body: dict[str, Any]) -> tuple[grpc.StatusCode, str]:
    request = pb.GenerateRequest(model=MODEL, text=body["prompt"])
    request.sampling.max_tokens = body["max_tokens"]
    call = client.grpc.Generate(request, metadata=client.metadata)
    with suppress(grpc.RpcError):
        list(call)
        return call.code(), ""
    metadata = dict(call.trailing_metadata())
    is_passing = call.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    assert ("retry-after" in metadata) == is_passing
    return call.code(), str(metadata.get("quire-reason", ""))


def test_a_request_beyond_its_deadline_is_504_or_ends_with_an_error_event(
    stack: Replicas, clients: list[RouterClients]
) -> None:
    body = ask(max_tokens=1900)
    late = clients[0].http.post("/v1/completions", json=body, headers={"x-request-timeout": "0.3"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, ErrorCode.DEADLINE.name.lower())
    with started_stream(clients[1], body, **{"x-request-timeout": "1"}) as (_, lines):
        last = [line for line in lines if line][-1]
    assert '"code":"deadline"' in last
    assert '"resumable":false' in last
    eventually(lambda: is_idle(stack))


def test_a_long_prompt_goes_where_it_is_cached_from_both_routers_and_for_its_tenant_alone(
    stack: Replicas, clients: list[RouterClients]
) -> None:
    prompt = "Once upon a time there was a fox that could not sleep. " * 20
    places = [_placed(clients[0], prompt)]
    assert places[0][1:] == (0, 0)
    sleep(0.3)  # the engine publishes its cache events with its next step or soon after it
    places += [_placed(clients[number % 2], prompt) for number in range(1, 7)]
    assert len({engine for engine, _, _ in places}) == 1
    assert all(expected >= 100 and expected == found for _, expected, found in places[1:]), places
    with stack.clients("stranger") as strange:
        assert {_placed(client, prompt)[1:] for client in strange[:1]} == {(0, 0)}


def _placed(client: RouterClients, prompt: str, **headers: str) -> tuple[str, int, int]:
    """Where a request ran, how many tokens the router took for cached there, and how many were."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    answer = client.http.post("/v1/completions", json=body, headers=headers)
    route = re.match(r"(\S+); policy=cost; cached=([0-9]+)", answer.headers["x-quire-route"])
    assert route is not None
    return route[1], int(route[2]), answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_router_counts_requests_placed_by_another(stack: Replicas, clients: list[RouterClients]) -> None:
    filled, *_ = _placed(clients[0], f"{next(_prompts)}", **{"x-session-id": "one"})
    body = ask(max_tokens=1900)
    eventually(lambda: _busy(clients[1], stack) == [], message="earlier requests are still counted")
    with started_stream(clients[0], body, **{"x-session-id": "one"}):
        eventually(lambda: _busy(clients[1], stack) == [filled], message="the other router does not count it")
    eventually(lambda: _busy(clients[1], stack) == [], message="its end is not published")


def _busy(client: RouterClients, stack: Replicas) -> list[str]:
    """The engines where decoding neighbours would cost a request anything, as its router sees it."""
    answer = client.http.post("/v1/completions", json={"model": MODEL, "prompt": "?", "max_tokens": 2})
    route = answer.headers["x-quire-route"]
    found = (re.search(rf"{engine.address}:[^,]*neighbours=([0-9.e-]+)", route) for engine in stack.engines)
    return [engine.address for engine, match in zip(stack.engines, found, strict=True) if match and float(match[1]) > 0]


def test_a_request_waits_with_heartbeats_until_there_is_an_engine(stack: Replicas, waiting: Any) -> None:
    assert not waiting.done(), waiting.result().text
    assert stack.late.metric("quire_parked_requests") == 1
    stack.late_port.open()
    lines = waiting.result(60).text.splitlines()
    assert lines[0].startswith("retry:")
    assert lines[1] == ": waiting"
    assert lines[-2:] == ["data: [DONE]", ""]
    assert sum(line.startswith("data: {") for line in lines) >= 8
