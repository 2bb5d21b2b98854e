"""Servers of others that send what is worst to read: metrics and events that are as long as any that are read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from tests.support import http_engines
from tests.support.http_engines import Event, VllmEngine, serving
from tests.support.kv_publisher import KvPublisher, stored

PROMPT_TOKENS = 100_000
VALUES = b'data: {"choices": [], "x": [1' + b",1" * (PROMPT_TOKENS + 16_000) + b"]}\n\n"
"""As many as an answer to such a prompt may have."""
SAMPLES = "".join(f'vllm:num_requests_running{{engine="{number}"}} 1.0\n' for number in range(4_000))
EVENTS = 8_000  # of a batch, which has less than a mebibyte
MODEL_LENGTH = 1 << 20


class HostileServer(VllmEngine):
    """Has as many samples in its metrics, and as many values in the events of its streams, as a router reads."""

    async def _stream(self, request: web.Request, response: web.StreamResponse, body: Event) -> None:
        for _ in range(4):
            await response.write(VALUES)
        await super()._stream(request, response, body)

    async def _metrics(self, request: web.Request) -> web.Response:
        usual = await super()._metrics(request)
        return web.Response(text=f"{usual.text}{SAMPLES}")


@asynccontextmanager
async def serving_on(port: int, model: str, kind: type[VllmEngine]) -> AsyncIterator[None]:
    """A server of this kind runs on the port within the block."""
    http_engines.MODEL_LENGTH = MODEL_LENGTH
    server = kind(model)
    server.port = port
    async with serving(server):
        yield


async def publish_events(port: int) -> None:
    """Publishes batches of events, each of a block that follows none, until it is cancelled."""
    async with KvPublisher(port=port, replays=False) as publisher:
        for first in range(0, 1 << 60, EVENTS):
            events = [stored([first + number], [number % 1000] * 16, arrays=True) for number in range(EVENTS)]
            await publisher.publish(*events, ts=float(first), arrays=True)
            await asyncio.sleep(0.05)
