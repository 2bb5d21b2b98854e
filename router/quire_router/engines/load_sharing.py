"""Shares load between routers through Redis: publishes what this router has in flight, with the blocks that it expects
engines to have soon, and passes the other routers' messages to the ledger and the prefix index.

Each message is published on a channel, and stored as this router's record in the ``PeerRegister``, for routers that
start later. Between messages a router expires the others' by counting its own ticks, so one that was frozen does not
take the others for dead.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

from quire_proto.supervise import Backoff, SupervisedTask, forget_cancellations
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from quire_router.clients.membership import CHANNEL, PeerRegister
from quire_router.clients.redis_client import RedisAccess, redis_client
from quire_router.clients.redis_failure import describe_failure
from quire_router.core import metrics
from quire_router.core.retry import PublishRate, supervise, wait_at_most
from quire_router.engines.load import MAX_PEERS, LoadLedger
from quire_router.engines.load_messages import (
    MAX_PAYLOAD_BYTES,
    InvalidLoadMessageError,
    LoadMessage,
    RouterLoad,
    SpeculativeBlocks,
)

log = logging.getLogger(__name__)

FIRST_DELAY, LAST_DELAY = 0.05, 2.0
MAX_SILENT_POLLS = 4


@dataclass(frozen=True, slots=True)
class LoadSharingSettings:
    """Times in seconds. A router's load is published when it changed, at once or at the ``PublishRate`` of
    ``interval``, and at least every ``heartbeat``; a router that is silent for ``lease`` is taken for dead, counted in
    ticks of ``tick``. Redis has to answer within ``timeout``.

    Where prompts are computed in some tens of milliseconds, a share that is a tenth of a second old costs half as much
    waiting again (``docs/benchmarks.md``).
    """

    interval: float = 0.01
    tick: float = 0.1
    heartbeat: float = 1.0
    lease: float = 3.0
    timeout: float = 1.0


class LoadSharing:
    """Shares the load in ``ledger`` and the ``expectations`` of one router, through the Redis at ``place``. While Redis
    is unavailable, this router's own counts continue and the others' expire. Raises ``ValueError``, without the
    password, if ``place`` is no URL.
    """

    def __init__(
        self,
        place: RedisAccess | str,
        ledger: LoadLedger,
        expectations: SpeculativeBlocks,
        *,
        router_id: str | None = None,
        settings: LoadSharingSettings | None = None,
    ) -> None:
        self.router_id = router_id or uuid4().hex
        self.available = False
        self._ledger = ledger
        self._speculative = expectations
        self._settings = settings or LoadSharingSettings()
        # Without repeats: a channel that broke has missed messages, and what is stored is to be read again.
        self._client = redis_client(place, timeout=self._settings.timeout, repeats=0)
        self._register = PeerRegister(self._client, self._settings.lease)
        self._closing = False
        self._published = False
        self._connected = False
        self._sequence = 0
        self._changed = asyncio.Event()
        self._backoff = Backoff(FIRST_DELAY, LAST_DELAY)
        self._failing = False
        self._tasks: list[SupervisedTask] = []
        ledger.on_change = self._changed.set

    def start(self) -> None:
        """Begins to connect; never waits, never fails."""
        self._tasks = [supervise("load shared with routers", self._run), supervise("leases of routers", self._tick)]

    async def close(self) -> None:
        """Publishes that nothing is in flight here any more, if Redis is available."""
        introduced = self._published  # even if the other routers' messages have not been read yet
        self._closing, self._connected = True, False
        await asyncio.gather(*(task.stop() for task in self._tasks))
        with suppress(RedisError, OSError, TimeoutError):
            if introduced:
                await self._register.leave(self.router_id, self._message(RouterLoad()).encode())
        self._on_disconnected()
        await self._client.aclose()

    # Connecting

    async def _run(self) -> None:
        while not self._closing:  # a time limit that passes at the same moment can swallow the cancellation
            try:
                await self._run_connection()
            except* (RedisError, OSError, TimeoutError) as errors:
                self._log_outage(errors)
            except* Exception:  # whatever went wrong with one message, the next one may pass
                log.exception("sharing the load with the other routers failed")
            if not self._closing:
                forget_cancellations()
            self._on_disconnected()
            self._failing = True
            await asyncio.sleep(self._backoff.next())

    async def _run_connection(self) -> None:
        async with self._client.pubsub() as channel:
            # Subscribes before it reads what is stored, so that no message between the two is missed.
            await channel.subscribe(CHANNEL)
            self._speculative.pop_all()  # too old: engines have reported these blocks by now, or will never have them
            await self._publish()
            for record, seconds in await self._register.read(MAX_PEERS + 1, MAX_PAYLOAD_BYTES):
                self._receive(record, seconds)
            self._on_connected()
            self._connected = not self._closing
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive_messages(channel))
                tasks.create_task(self._publish_changes())

    def _on_connected(self) -> None:
        log.info("sharing the load with %d other routers", len(self._ledger))
        self.available, self._failing = True, False
        self._backoff.reset()
        metrics.LOAD_SHARED.set(1)

    def _on_disconnected(self) -> None:
        self._published = False
        self._connected = False
        self.available = False
        metrics.LOAD_SHARED.set(0)

    def _log_outage(self, errors: BaseExceptionGroup) -> None:
        if not self._closing and not self._failing:
            why = describe_failure(errors)
            log.warning("cannot share the load with other routers (%s); requests continue", why)

    # Publishing

    async def _publish_changes(self) -> None:
        loop = asyncio.get_running_loop()
        cadence = PublishRate(self._settings.interval)
        while self._connected:
            await wait_at_most(self._changed, self._settings.heartbeat)
            await asyncio.sleep(cadence.next_at(loop.time()) - loop.time())
            cadence.on_published(loop.time(), await self._publish(), len(self._ledger))

    async def _publish(self) -> int:
        """Publishes this router's load; returns how many engines are in it."""
        self._published = True
        self._changed.clear()
        share = self._ledger.local_load()
        message = self._message(share)
        self._ledger.unseen.on_published(message.sequence)
        kept = message.encode_load()
        await self._register.renew(self.router_id, kept, kept + message.encode_speculative())
        return len(share.engines)

    def _message(self, share: RouterLoad) -> LoadMessage:
        self._sequence += 1
        return LoadMessage(self.router_id, self._sequence, share, self._speculative.pop_all())

    # Receiving

    async def _receive_messages(self, channel: PubSub) -> None:
        # This router receives its own messages as well, so a channel that stays silent is broken. Polls are counted
        # instead of seconds, so that a router that was frozen itself does not take the channel for broken.
        # A ping leaves a former primary, which passes on what is published at the new one.
        silence, patience = 0, (self._settings.heartbeat + self._settings.timeout) / MAX_SILENT_POLLS
        loop = asyncio.get_running_loop()
        ping_at = loop.time() + self._settings.heartbeat
        while self._connected and silence <= MAX_SILENT_POLLS:
            message = await channel.get_message(ignore_subscribe_messages=True, timeout=patience)
            is_told = message is not None and message["type"] == "message"
            silence = 0 if is_told else silence + (message is None)
            if is_told:
                self._receive(message["data"], self._settings.lease)
            if loop.time() >= ping_at:
                ping_at = loop.time() + self._settings.heartbeat
                await channel.ping()
        self._connected = False
        raise TimeoutError("the channel is silent")

    def _receive(self, payload: bytes, seconds: float) -> None:
        try:
            message = LoadMessage.decode(payload)
        except InvalidLoadMessageError:
            metrics.LOAD_SHARES_IGNORED.inc()
            return
        if message.router_id == self.router_id:
            self._ledger.unseen.on_received(message.sequence)
            return
        if self._ledger.on_message(message, max(1, round(seconds / self._settings.tick))):
            self._speculative.apply_remote(message.speculative)
        else:
            metrics.LOAD_SHARES_IGNORED.inc()
        metrics.LOAD_ROUTERS.set(len(self._ledger))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._settings.tick)
            self._ledger.tick()
            metrics.LOAD_ROUTERS.set(len(self._ledger))
