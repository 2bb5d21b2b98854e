"""Bytes of bodies are reserved before they are read, and given back once their requests wait in the queue or end."""

import asyncio
import gc
import json
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_router.admission.fair_queue import QueuedRequest
from quire_router.admission.queue import AdmissionQueue
from quire_router.api.request_limits import INITIAL_RESERVATION, BodyBudget
from quire_router.api.rest.http_server import LimitedHttpProtocol

from tests.support.scripted_api import ANSWER, MODEL, ask, chat, open_stage, read_answer
from tests.support.waiting import until

CHAT, LIMIT, LONG = "/v1/chat/completions", 8_000, 20
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
KEYS = ["the-key-of-one-tenant", "the-key-of-another-one"]


async def holding(port: int, size: int, headers: str = "", sent: int | None = None) -> asyncio.StreamWriter:
    """A client that says its body has ``size`` bytes, and sends all but the last, or so many."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"{HEAD}{headers}content-length: {size}\r\n\r\n".encode() + b" " * (size - 1 if sent is None else sent)
    )
    return writer


async def test_a_body_is_reserved_before_it_is_read_and_released_when_its_client_disconnects():
    budget = BodyBudget(LIMIT)
    async with open_stage(bodies=budget) as stage:
        writer = await holding(stage.port, LIMIT - 100)
        await until(lambda: budget.used == LIMIT - 100)
        refused = await ask(stage.port, "POST", CHAT, chat("x" * 200))
        writer.close()
        await until(lambda: budget.used == 0)
        again = await ask(stage.port, "POST", CHAT, chat())

    assert (refused.status, refused.error["code"]) == (429, "body_bytes")
    assert "memory" in refused.error["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert again.status == 200


async def test_heads_without_their_bodies_reserve_nothing_from_other_tenants():
    budget = BodyBudget(8 * INITIAL_RESERVATION)
    async with open_stage(bodies=budget) as stage:
        writers = [await holding(stage.port, 4 * INITIAL_RESERVATION, sent=0) for _ in range(4)]
        await until(lambda: budget.used == 4 * INITIAL_RESERVATION)
        assert (await ask(stage.port, "POST", CHAT, chat())).status == 200
        writers[0].write(b" " * INITIAL_RESERVATION)
        await until(lambda: budget.used == 6 * INITIAL_RESERVATION)
        assert (await ask(stage.port, "POST", CHAT, chat("x" * 3 * INITIAL_RESERVATION))).status == 429
        for writer in writers:
            writer.close()
        await until(lambda: budget.used == 0)


async def test_a_pipelined_request_reserves_nothing_while_an_earlier_response_is_read():
    budget, release = BodyBudget(LIMIT), asyncio.Event()
    async with open_stage(["one", release, *ANSWER], bodies=budget) as stage:
        body, key = json.dumps(chat(stream=True)).encode(), {"idempotency-key": "k"}
        first = asyncio.ensure_future(ask(stage.port, "POST", CHAT, body, key))
        await asyncio.wait_for(stage.runner.started.wait(), LONG)
        second = asyncio.ensure_future(ask(stage.port, "POST", CHAT, body + b" " * 500, key))
        await until(lambda: len(stage.service.concurrency) == 2 and budget.used == len(body))
        release.set()
        assert [(await each).status for each in (first, second)] == [200, 200]


async def test_a_body_without_a_stated_length_is_counted_as_it_comes():
    budget = BodyBudget(LIMIT)
    async with open_stage(bodies=budget) as stage:
        writer = await holding(stage.port, LIMIT - 1_000)
        await until(lambda: budget.used == LIMIT - 1_000)
        reader, chunked = await asyncio.open_connection("127.0.0.1", stage.port)
        chunked.write(f"{HEAD}transfer-encoding: chunked\r\n\r\n".encode() + b"200\r\n" + b"x" * 512 + b"\r\n")
        await until(lambda: budget.used == LIMIT - 488)
        chunked.write(b"200\r\n" + b"x" * 512 + b"\r\n")
        answer = await asyncio.wait_for(read_answer(reader), LONG)
        await until(lambda: budget.used == LIMIT - 1_000)
        chunked.close()
        writer.close()

    assert (answer.status, answer.error["code"]) == (429, "body_bytes")


async def test_a_reservation_is_released_when_the_request_waits_in_the_queue():
    budget, release = BodyBudget(LIMIT), asyncio.Event()
    async with open_stage(["one", release, *ANSWER], bodies=budget) as stage:
        body = json.dumps(chat(stream=True)).encode()
        asking = asyncio.ensure_future(ask(stage.port, "POST", CHAT, body))
        await asyncio.wait_for(stage.runner.started.wait(), LONG)
        assert budget.used == len(body)
        budget.release_queued(stage.runner.generations[0].request_id)
        assert budget.used == 0
        release.set()
        assert (await asking).status == 200
        assert budget.used == 0


async def test_the_queue_reports_the_bytes_that_wait_in_it():
    class Full:
        def has_capacity(self, _model: str) -> bool:
            return False

        has_spare_capacity = has_capacity

        def ready(self, _model: str) -> int:
            return 1

    queue, told = AdmissionQueue([MODEL], Full()), []
    queue.on_queued = told.append
    turn = asyncio.ensure_future(queue.acquire(QueuedRequest("r", MODEL, "", tokens=1, bytes=1)))
    await asyncio.sleep(0)
    assert told == ["r"]
    queue.abandon("r")
    await turn


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [{}, chat("x" * 3_000), b"{", chat()], ids=["none", "long", "no JSON", "right"])
async def test_nothing_stays_reserved_whatever_the_answer_is(path, body):
    budget = BodyBudget(LIMIT)
    async with open_stage(bodies=budget) as stage:
        assert (await ask(stage.port, "POST", path, body)).status in (200, 400)
        await until(lambda: budget.used == 0)


async def test_one_tenant_leaves_half_to_the_others():
    budget = BodyBudget(LIMIT)
    one, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    async with open_stage(keys=KEYS, bodies=budget) as stage:
        writer = await holding(stage.port, LIMIT // 2, f"authorization: Bearer {KEYS[0]}\r\n")
        await until(lambda: budget.used == LIMIT // 2)
        assert (await ask(stage.port, "POST", CHAT, chat(), one)).status == 429
        assert (await ask(stage.port, "POST", CHAT, chat(), other)).status == 200
        writer.close()


async def test_a_message_over_grpc_is_counted_while_its_call_lasts():
    budget, release = BodyBudget(LIMIT), asyncio.Event()
    async with open_stage(["one", release, FinishReason.STOP], bodies=budget) as stage, stage.channel() as channel:
        request = pb.GenerateRequest(model=MODEL, text="hello")
        call = InferenceStub(channel).Generate(request)
        await asyncio.wait_for(stage.runner.started.wait(), LONG)
        assert budget.used == request.ByteSize()
        with budget.reserve("", LIMIT - budget.used):
            refused = InferenceStub(channel).Generate(request)
            assert "memory" in (await refused.details())
        release.set()
        async for _ in call:
            pass
        await until(lambda: budget.used == 0)


async def test_bytes_that_came_with_a_refused_head_do_not_stay_while_its_connection_idles():
    async with open_stage(max_body_bytes=1_000) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(f"{HEAD}content-length: 50000\r\n\r\n".encode() + b"x" * 50_000)
        assert (await asyncio.wait_for(read_answer(reader), LONG)).status == 413
        kept = [
            len(each.cycle.body) for each in gc.get_objects() if isinstance(each, LimitedHttpProtocol) and each.cycle
        ]
        writer.close()

    assert set(kept) == {0}


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 60), st.lists(st.integers(1, 30), max_size=3))),
    st.randoms(use_true_random=False),
)
def test_the_budget_is_never_exceeded_but_by_a_body_that_is_alone(bodies, random):
    budget, open_bodies, refusals = BodyBudget(100), [], set()
    for tenant, stated, parts in bodies:
        with ExitStack() as holding:
            try:
                body = holding.enter_context(budget.reserve(tenant, stated))
                for part in parts:
                    body.append(b"x" * part)
            except QuireError as error:
                refusals.add((error.code, error.reason))
            else:
                assert budget.used <= 100 or budget.used == max(stated, sum(parts))
                open_bodies.append((holding.pop_all(), body, tenant, max(stated, sum(parts))))
        if open_bodies and random.random() < 0.4:
            held, body, _, _ = open_bodies.pop(random.randrange(len(open_bodies)))
            if random.random() < 0.5:
                body.hold_until_queued("r")
                budget.release_queued("r")
            held.close()
        assert budget.used == sum(size for *_, size in open_bodies)
    assert refusals <= {(ErrorCode.OVERLOADED, "body_bytes")}
    for held, *_ in open_bodies:
        held.close()
    assert budget.used == 0
