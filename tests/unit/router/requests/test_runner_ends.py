"""What is left of a request that has ended, or that its client left: no memory, and nothing to be had for free."""

import asyncio
import gc
from collections.abc import Iterator

import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import SamplingParams
from quire_router.admission.fair_queue import QueuedRequest
from quire_router.admission.limits import RateLimiter
from quire_router.admission.queue import AdmissionQueue
from quire_router.admission.tenants import Tenant, Tenants
from quire_router.core.generation import GenerationRequest, StreamCursor
from quire_router.engines.output_stream import OutputStream
from quire_router.requests.state import RequestState

from tests.support.byte_tokenizer import tokens
from tests.support.runner_harness import open_runner, started
from tests.support.scripted_engine import LENGTH, output
from tests.support.waiting import until


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Memory is given back only by who lets go of it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def request(request_id: str = "r", digest: str = "") -> GenerationRequest:
    params = SamplingParams(max_tokens=3)
    return GenerationRequest(request_id, "m", tokens("hello"), params, stream=True, tenant="t", digest=digest)


@pytest.mark.usefixtures("uncollected")
async def test_a_request_that_has_ended_leaves_nothing_for_the_collector():
    async with open_runner() as place:
        task, submit = await started(place, place.lifecycle.run(request()))
        place.engine.send(output(submit.request_id, tokens("abc"), 0, LENGTH))
        await task
        del task
        await until(lambda: not any(isinstance(each, RequestState | OutputStream) for each in gc.get_objects()))


async def test_disconnecting_and_resuming_gives_no_tokens_for_free():
    limits = RateLimiter(Tenants([Tenant("t", tokens_per_minute=14)]))
    async with open_runner(limits=limits) as place:
        answer = await place.lifecycle.run_once(request(digest="d"))
        assert answer is not None
        await answer.aclose()
        with pytest.raises(QuireError) as refused:
            await place.lifecycle.run_once(request("another", digest="e"))
        assert refused.value.code is ErrorCode.OVERLOADED


async def test_a_resumed_request_without_a_delta_queues_for_admission(monkeypatch: pytest.MonkeyPatch):
    turns: list[str] = []
    acquire = AdmissionQueue.acquire

    async def noted(self: AdmissionQueue, waiting: QueuedRequest) -> None:
        turns.append(waiting.request_id)
        await acquire(self, waiting)

    monkeypatch.setattr(AdmissionQueue, "acquire", noted)
    async with open_runner() as place:
        answer = await place.lifecycle.run_once(request(digest="d"))
        assert answer is not None
        await answer.aclose()
        for told in range(2):
            record = await place.lifecycle.record("r")
            assert record is not None
            resumed = place.lifecycle.resume(record, StreamCursor(1))
            for _ in range(told):
                await anext(resumed)
            reading = asyncio.ensure_future(anext(resumed))
            submit = await place.engine.submit()
            place.engine.send(output(submit.request_id, tokens("abc")[told : told + 1], told))
            await reading
            await resumed.aclose()
            assert turns == ["r"]
