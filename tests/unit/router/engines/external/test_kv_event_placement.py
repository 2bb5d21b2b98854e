"""Requests go where servers of vLLM report what is cached, whoever had it computed there."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic
from typing import Any

import pytest
from quire.v1 import engine_pb2
from quire_proto.hashing import extra_key, hash_chain, pack
from quire_proto.sampling import SamplingParams
from quire_router.core.generation import GenerationRequest
from quire_router.discovery.base import Endpoint
from quire_router.engines.cache_events import CacheEvents
from quire_router.engines.external.client import ExternalEngine
from quire_router.engines.external.vllm_server import VllmServer
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ConnectionSettings
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.placer import Placer
from quire_router.placement.policies import PlacementSettings
from quire_router.placement.prefix_index import PrefixIndex

from tests.support.http_engines import VllmEngine, demo_tokenizer, serving
from tests.support.kv_publisher import AllBlocksCleared, KvPublisher, removed, stored
from tests.support.scripted_discovery import ScriptedDiscovery
from tests.support.waiting import until
from tests.unit.router.engines.external.test_client import LIMITS, address_of, connected, idle, read, submit

PROMPT = list(range(3, 331))
BLOCKS = len(PROMPT) // 16


def hashes(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    return list(hash_chain(pack(tokens), 16 * 4, extra_key("vllm:/models/m", salt)))


class Fleet:
    """Servers of vLLM that publish their KV events, and a router's index and placement."""

    def __init__(self, pool: EnginePool, index: PrefixIndex, publishers: dict[str, KvPublisher]) -> None:
        self.pool = pool
        self.index = index
        self.publishers = publishers
        self._placer = Placer(pool.table, index, PlacementSettings(), pool.namespace, monotonic)
        self._placed = 0

    async def has_cached(self, address: str, blocks: int) -> None:
        """Returns when the router takes so many blocks of the prompt for cached there."""
        await until(lambda: self.cached(address) == blocks)

    def cached(self, address: str, tokens: list[int] = PROMPT) -> int:
        """How many blocks of the prompt the router takes for cached there, without what is merely speculative."""
        matches = self.index.match(hashes(tokens), monotonic() + 1e6, len(self.pool.table))
        return int(matches.device[self.pool.table.row_of(address)])

    def place(self) -> str:
        """Where a request with the prompt would go."""
        self._placed += 1
        request = GenerationRequest(
            request_id=f"r{self._placed}", model="m", prompt_token_ids=array("i", PROMPT), params=SamplingParams()
        )
        decision = self._placer.place(request, self.pool.rows("m"))
        assert decision is not None
        return decision.engine_id


@asynccontextmanager
async def fleet(count: int) -> AsyncIterator[Fleet]:
    """So many servers, each with an address of its own and the same ports."""
    async with AsyncExitStack() as stack:
        engines = [VllmEngine(host=f"127.0.0.{number + 1}") for number in range(count)]
        first = await stack.enter_async_context(KvPublisher())
        others = [
            await stack.enter_async_context(KvPublisher(engine.host, first.port, first.replay_port))
            for engine in engines[1:]
        ]
        settings = ConnectionSettings(
            poll_silence=600, stall=600, kv_events_port=first.port, kv_events_replay_port=first.replay_port
        )
        discovery, table, index = ScriptedDiscovery(), EngineTable(), PrefixIndex()
        tokenizers = {"m": demo_tokenizer()}
        pool = EnginePool(
            discovery,
            ["m"],
            settings,
            on_kv_event=CacheEvents(index, table),
            table=table,
            assumed={"m": LIMITS},
            tokenizers=tokenizers,
        )
        await stack.enter_async_context(serving(*engines))
        await pool.start()
        stack.push_async_callback(pool.close)
        discovery.publish(*(Endpoint(address_of(engine)) for engine in engines))
        await until(lambda: pool.ready("m") == count)
        publishers = {address_of(engine): each for engine, each in zip(engines, [first, *others], strict=True)}
        for publisher in publishers.values():
            await publisher.subscribed()
        yield Fleet(pool, index, publishers)


async def test_a_request_goes_where_others_had_its_prefix_computed_until_it_is_evicted_there() -> None:
    async with fleet(3) as servers:
        numbers: list[int | bytes] = [*range(BLOCKS)]
        for address, publisher in servers.publishers.items():
            await publisher.publish(stored(numbers, PROMPT[: 16 * BLOCKS]))
            await servers.has_cached(address, BLOCKS)
            assert {servers.place() for _ in range(9)} == {address}
            await publisher.publish(removed(numbers[1:]))
            await servers.has_cached(address, 1)
            await publisher.publish(AllBlocksCleared())
            await servers.has_cached(address, 0)
        assert len({servers.place() for _ in range(100)}) > 1


async def test_what_a_server_does_not_report_is_not_expected_there() -> None:
    async with fleet(1) as servers:
        [(address, publisher)] = servers.publishers.items()
        await publisher.publish(stored([1], PROMPT[:16]))
        await servers.has_cached(address, 1)
        with servers.pool.dispatch(address, submit(prompt=PROMPT), pending_tokens=3) as outputs:
            await read(outputs)
        servers.pool.expect_cached(address, hashes(PROMPT))
        assert servers.cached(address) == 1


async def test_a_server_that_publishes_nothing_is_predicted() -> None:
    async with fleet(1) as servers:
        [(address, _)] = servers.publishers.items()
        with servers.pool.dispatch(address, submit(prompt=PROMPT), pending_tokens=3) as outputs:
            await read(outputs)
        await servers.has_cached(address, BLOCKS)


async def test_the_connection_ends_with_the_engine() -> None:
    async with KvPublisher() as publisher:
        settings = ConnectionSettings(poll_silence=600, stall=600, kv_events_port=publisher.port)
        stored_there: list[bytes] = []

        def listen(change: engine_pb2.Snapshot | engine_pb2.KvEvent) -> None:
            if isinstance(change, engine_pb2.KvEvent):
                stored_there.extend(change.stored.block_hashes)

        before = asyncio.all_tasks()
        async with connected(VllmEngine(), settings, on_kv_event=listen) as client:
            await publisher.subscribed()
            await read(client.submit(submit(cache_salt=b"tenant")))
            await idle(client)
            await publisher.publish(stored([1], PROMPT[16:32], extra_keys=None), stored([2], PROMPT[:16]))
            await until(lambda: bool(stored_there))  # of the first it is not known whose it is
        assert stored_there == hashes(PROMPT[:16])
        assert await publisher._pub.recv() == b"\0"  # unsubscribed
        assert asyncio.all_tasks() <= before | publisher_tasks(publisher)


def publisher_tasks(publisher: KvPublisher) -> set[asyncio.Task[Any]]:
    return set() if publisher._task is None else {publisher._task}


@pytest.mark.parametrize(("engines", "enabled", "publishes"), [(1, True, True), (2, True, False), (1, False, False)])
async def test_events_of_one_cache_are_read(engines: int, enabled: bool, publishes: bool) -> None:
    class Http:
        async def get(self, _: str) -> bytes:
            labels = f'block_size="16",enable_prefix_caching="{enabled}",num_gpu_blocks="9"'
            return "".join(f'vllm:cache_config_info{{engine="{n}",{labels}}} 1.0\n' for n in range(engines)).encode()

        async def get_json(self, path: str) -> dict[str, Any]:
            return {"version": "0.32.0"} if path == "/version" else {"data": [{"id": "m"}]}

        async def parse(self, payload: bytes, parse: Callable[[bytes], Any]) -> Any:
            return parse(payload)

    kind = VllmServer()
    await kind.describe(Http(), {"m": object()})  # type: ignore[arg-type, dict-item]
    assert kind.publishes_kv_events is publishes


def test_no_other_server_publishes_kv_events() -> None:
    client = ExternalEngine("a", url="http://h", kind="sglang", models={})
    assert not client._kind.publishes_kv_events
