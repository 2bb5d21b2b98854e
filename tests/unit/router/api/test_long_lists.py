"""A list may be as long as is documented, whatever a queue or a limit holds."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import SamplingParams
from quire_router.admission.fair_queue import FairQueue, QueueBounds, QueuedRequest
from quire_router.admission.tenants import Tenant, Tenants
from quire_router.api.pooled_requests import PROMPTS_AT_ONCE, pool_all
from quire_router.api.request_limits import ConcurrencyLimit
from quire_router.core.errors import RefusalReason, queue_full, rate_limit_used_up
from quire_router.core.generation import GenerationRequest, Usage, prompt_request_id


def prompts(count: int) -> list[GenerationRequest]:
    params = SamplingParams(max_tokens=1)
    return [
        GenerationRequest(prompt_request_id("a", number) if number else "a", "m", [number], params)
        for number in range(count)
    ]


class Server:
    """Pools prompts to their first token, so many at a time; refuses more."""

    def __init__(self, capacity: int, error: QuireError | None = None) -> None:
        self.capacity = capacity
        self.error = error or queue_full(RefusalReason.QUEUE_FULL)
        self.running = self.most = 0
        self.calls = Counter[int]()

    async def pool_one(self, generation: GenerationRequest, others: int) -> tuple[bytes, Usage]:
        (number,) = generation.prompt_token_ids
        self.calls[number] += 1
        await asyncio.sleep(0)
        if self.running >= self.capacity:
            raise self.error
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return str(number).encode(), Usage(1, 0)


@given(st.integers(1, 300), st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_any_list_is_pooled_in_order_and_a_few_at_a_time(count: int, capacity: int) -> None:
    server = Server(capacity)
    answer = asyncio.run(pool_all(prompts(count), server.pool_one))

    assert [int(each) for each in answer.pooled] == list(range(count))
    assert answer.usage == Usage(count, 0)
    assert server.most <= min(capacity, PROMPTS_AT_ONCE)


@pytest.mark.parametrize("error", [queue_full(RefusalReason.QUEUE_FULL), QuireError(ErrorCode.INTERNAL, "no")])
async def test_a_list_is_refused_where_none_of_its_prompts_has_room(error: QuireError) -> None:
    server = Server(0, error)
    with pytest.raises(QuireError) as refused:
        await pool_all(prompts(300), server.pool_one)

    assert refused.value is error
    assert max(server.calls.values()) == 1


async def test_a_rate_that_is_used_up_is_not_waited_for() -> None:
    server = Server(3, rate_limit_used_up(RefusalReason.TOKENS_PER_MINUTE, 3, 60))
    with pytest.raises(QuireError, match="a minute"):
        await pool_all(prompts(9), server.pool_one)


def test_a_list_that_is_alone_may_hold_any_number_of_slots_and_another_request_none() -> None:
    limit = ConcurrencyLimit(1)
    with limit.acquire(), limit.acquire(own=1), limit.acquire(own=2):
        with pytest.raises(QuireError), limit.acquire():
            pass
        with pytest.raises(QuireError), limit.acquire(own=1):
            pass


def waiting(request_id: str, tenant: str = "") -> QueuedRequest:
    return QueuedRequest(request_id, "m", tenant, 1, 1)


@pytest.mark.parametrize("tenants", [Tenants(), Tenants([Tenant(max_queued=2)])])
def test_a_list_that_waits_alone_is_never_too_long_for_the_queue(tenants: Tenants) -> None:
    queue = FairQueue(tenants, QueueBounds(2, 100))
    for number in range(50):
        assert queue.add(waiting(prompt_request_id("a", number))) == []

    with pytest.raises(QuireError):
        queue.add(waiting("b"))
    for number in range(49):
        queue.remove(prompt_request_id("a", number))
    assert queue.add(waiting("b")) == []
    with pytest.raises(QuireError):
        queue.add(waiting(prompt_request_id("a", 50)))
