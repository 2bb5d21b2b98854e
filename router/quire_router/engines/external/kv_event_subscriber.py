"""Subscribes to the KV events of a server of vLLM (``--kv-events-config``) over ZeroMQ.

A message is a topic, a number that rises by one (8 bytes, big endian), and a batch of events. Messages may be lost: a
publisher waits for nobody. On the replay endpoint the server repeats the last ones from a number on (``buffer_steps``,
10,000), then the number -1; so a gap is filled, and a router that comes later learns what is cached. Where that is not
possible, all that was known is forgotten.

Anyone who reaches the router's network may pretend to be the publisher. So what a feed can use is bounded: memory by
the size and number of messages that wait, time to a part of the router's.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import Any

import zmq
import zmq.asyncio
from quire_proto.cli import join_host_port

from quire_router.core import metrics
from quire_router.engines.base import Offload, offload_long, on_any_thread
from quire_router.engines.external.kv_events import BadEventError, EventBatch, ReportedCache, read_batch

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 20
MAX_WAITING = 128  # messages
MAX_REPLAYED = 20_000  # messages
REPLAY_TIMEOUT = 5.0  # seconds, until the next message

_END = (1 << 64) - 1  # -1
_SEQUENCE_BYTES = 8
_EVENTS_PER_TURN = 128  # about a millisecond
_REST = 4.0
"""Seconds of rest for each second that messages took: at most a fifth of the router's time."""
_RECONNECT_INTERVAL = 0.1  # seconds
_HEARTBEAT = 5_000  # milliseconds


class KvEventSubscriber:
    """Reads the KV events of the server at ``host`` into ``cache``; ``address`` is how logs name it.

    The number of the next message is ``_next``. One that is lower was repeated, or the server has started again: its
    clock tells which. Of a server that started again nothing is known any more. Long batches are read through
    ``offload``, in the server's turn.
    """

    def __init__(
        self,
        address: str,
        host: str,
        port: int,
        replay_port: int | None,
        cache: ReportedCache,
        *,
        offload: Offload = on_any_thread,
    ) -> None:
        self._address = address
        self._offload = offload
        self._endpoint = f"tcp://{join_host_port(host, port)}"
        self._replay_endpoint = None if replay_port is None else f"tcp://{join_host_port(host, replay_port)}"
        self._cache = cache
        self._next = 0
        self._last_ts = 0.0
        self._reads = self._has_complained = self._was_silent = False

    async def run(self) -> None:
        """Reads until it is cancelled. Connects again as often as needed, which ZeroMQ does not where a message was
        too large.
        """
        while True:
            with self._socket(zmq.SUB) as socket:
                monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                try:
                    socket.setsockopt(zmq.SUBSCRIBE, b"")
                    socket.connect(self._endpoint)
                    await self._replay()
                    await self._read(socket, monitor)
                finally:
                    socket.disable_monitor()
            await asyncio.sleep(_RECONNECT_INTERVAL)

    async def _read(self, socket: Any, monitor: Any) -> None:
        """Reads until the server has disconnected."""
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while socket in dict(await poller.poll()):
            frames = await socket.recv_multipart()
            began = monotonic()
            await self._on_message(frames)
            await asyncio.sleep(_REST * (monotonic() - began))

    async def _on_message(self, frames: Sequence[bytes]) -> None:
        try:
            sequence, batch = await self._parse(frames[1:])
        except BadEventError as error:
            self._on_bad(error)
            return
        if sequence < self._next and batch.ts > self._last_ts:
            log.info("engine %s restarted: reading its cache contents again", self._address)
            self._forget()
            self._next = 0
        if sequence > self._next:
            await self._replay()
        await self._take(sequence, batch)

    async def _take(self, sequence: int, batch: EventBatch) -> None:
        """Applies a batch, unless it was applied before. Of a gap before it nothing can be known any more."""
        if sequence < self._next:
            return
        if sequence == 0 or sequence > self._next:
            self._forget()
        self._cache.complete = sequence == 0 or self._cache.complete
        self._next, self._last_ts = sequence + 1, batch.ts
        if not self._reads:
            self._reads = True
            log.info("reading the KV events of engine %s", self._address)
        if batch.bad:
            self._on_bad(BadEventError("an event is damaged"), batch.bad)
        dropped = self._cache.dropped
        for number, event in enumerate(batch.events, 1):
            if number % _EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)
            try:
                self._cache.apply(event)
            except BadEventError as error:
                self._on_bad(error)
        metrics.INDEX_DROPPED.labels("full").inc(self._cache.dropped - dropped)

    def _forget(self) -> None:
        self._cache.complete = False
        self._cache.clear()

    def _on_bad(self, error: BadEventError, count: int = 1) -> None:
        """Counts what cannot be read. It may have said anything, so what is known is not complete any more."""
        self._cache.complete = False
        metrics.INDEX_DROPPED.labels("damaged").inc(count)
        if not self._has_complained:
            self._has_complained = True
            log.error("engine %s publishes KV events that cannot be read: %s", self._address, error)

    async def _replay(self) -> None:
        """Asks for all messages from the next one on, and applies those that the server still has."""
        if self._replay_endpoint is None:
            return
        try:
            await self._read_replay(self._replay_endpoint)
        except TimeoutError:
            if not self._was_silent:
                self._was_silent = True
                log.warning("engine %s does not repeat KV events at %s", self._address, self._replay_endpoint)
        except BadEventError as error:
            self._on_bad(error)

    async def _read_replay(self, endpoint: str) -> None:
        with self._socket(zmq.DEALER) as socket:
            socket.connect(endpoint)
            await socket.send_multipart([b"", self._next.to_bytes(_SEQUENCE_BYTES, "big")])
            for _ in range(MAX_REPLAYED):
                async with asyncio.timeout(REPLAY_TIMEOUT):
                    frames = await socket.recv_multipart()
                began = monotonic()
                frames = frames[-2:]  # behind an empty one, and in newer versions the topic
                if frames[0] == _END.to_bytes(_SEQUENCE_BYTES, "big"):
                    return
                await self._take(*await self._parse(frames))
                await asyncio.sleep(_REST * (monotonic() - began))

    async def _parse(self, frames: Sequence[bytes]) -> tuple[int, EventBatch]:
        """Number and batch of a message. Raises ``BadEventError`` if it is none."""
        if len(frames) != 2 or len(frames[0]) != _SEQUENCE_BYTES:
            raise BadEventError("a message has other parts than a number and a batch")
        sequence = int.from_bytes(frames[0], "big")
        if sequence == _END:
            raise BadEventError("a message has no number")
        read = partial(read_batch, frames[1])
        return sequence, await offload_long(self._offload, self._address, len(frames[1]), read)

    def _socket(self, kind: int) -> Any:
        socket = zmq.asyncio.Context.instance().socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _HEARTBEAT)
        return socket
