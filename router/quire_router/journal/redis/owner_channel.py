"""``OwnerChannel``: how a router that finds a request running in Redis asks the one that runs it whether it has ended.

Each router subscribes to a channel of its own, ``quire:journal:{owner}``, and gets questions and answers there. A
question names requests; the answer says whether what has ended of them is written, so that the record is to be read
again. Nobody depends on an answer: what the record says counts where none comes.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from quire_proto.supervise import Backoff, SupervisedTask
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from quire_router.clients.redis_failure import describe_failure
from quire_router.core.retry import supervise

log = logging.getLogger(__name__)

ASK_TIMEOUT = 0.5  # seconds that a reader waits for the owner's answer
SILENCE = 1.0  # seconds for which an owner that gave none is not asked again
MAX_ANSWERS = 256  # that are under way at once; what is asked beyond is not answered
MAX_IDS = 1_024  # in one question, as a request has so many prompts at most
HEARTBEAT = 2.0  # seconds between two signs of life of a silent channel
FIRST_DELAY, LAST_DELAY = 0.05, 2.0
_ERRORS = (RedisError, OSError, TimeoutError)
FlushEnds = Callable[[Sequence[str]], Awaitable[bool]]


def channel_of(owner: str) -> str:
    """The channel that a router subscribes to."""
    return f"quire:journal:{owner}"


class OwnerChannel:
    """Asks other routers, and answers them with ``flush_ends``, which has the ends of some requests written, and
    returns False if all of them run. ``client`` is used by nothing else.
    """

    def __init__(self, client: Redis, owner: str, flush_ends: FlushEnds, *, timeout: float = ASK_TIMEOUT) -> None:
        self._client = client
        self._owner = owner
        self._flush_ends = flush_ends
        self._timeout = timeout
        self._tried = asyncio.Event()  # to subscribe, for the first time
        self._failing = False
        self._numbers = count()
        self._questions: dict[int, asyncio.Future[bool]] = {}
        self._silent: dict[str, float] = {}  # until when owners are not asked
        self._answers: set[asyncio.Task[None]] = set()
        self._task: SupervisedTask | None = None

    def start(self) -> None:
        """Begins to subscribe; never waits, never fails."""
        if self._task is None:
            self._task = supervise("questions of other routers", self._run)

    async def close(self) -> None:
        """Closes the connections."""
        if self._task is not None:
            await self._task.stop()
        for answer in self._answers:
            answer.cancel()
        await self._client.aclose()

    async def ask(self, owner: str, request_ids: Sequence[str]) -> bool:
        """Returns whether a router has written what has ended of some requests, so that these are to be read again.
        False also where it does not answer.
        """
        loop = asyncio.get_running_loop()
        if self._silent.get(owner, 0.0) > loop.time():
            return False
        number, answer = next(self._numbers), loop.create_future()
        self._questions[number] = answer
        try:
            async with asyncio.timeout(self._timeout):
                await self._tried.wait()
                if self._failing:
                    return False  # no answer would arrive
                question = {"ask": number, "from": self._owner, "ids": list(request_ids[:MAX_IDS])}
                heard = await self._client.publish(channel_of(owner), json.dumps(question))
                return bool(heard) and bool(await answer)
        except _ERRORS:
            self._silent = {each: until for each, until in self._silent.items() if until > loop.time()}
            self._silent[owner] = loop.time() + SILENCE
            return False
        finally:
            del self._questions[number]

    async def _run(self) -> None:
        backoff = Backoff(FIRST_DELAY, LAST_DELAY)
        while True:
            try:
                async with self._client.pubsub() as channel:
                    await channel.subscribe(channel_of(self._owner))
                    await self._receive(channel, backoff)
            except _ERRORS as error:
                self._log_outage(error)
            await asyncio.sleep(backoff.next())

    async def _receive(self, channel: PubSub, backoff: Backoff) -> None:
        """Reads messages until the connection breaks, or is silent although it was asked for a sign of life.

        It is asked at each heartbeat, as sending is what leaves a former primary, which passes on what is published.
        """
        loop = asyncio.get_running_loop()
        waiting, ping_at = True, loop.time() + HEARTBEAT
        while True:
            message = await channel.get_message(timeout=HEARTBEAT)
            if message is None and waiting:
                raise TimeoutError("the channel is silent")
            waiting = message is None
            if waiting or loop.time() >= ping_at:
                ping_at = loop.time() + HEARTBEAT
                await channel.ping()
            if message is None:
                continue
            if message["type"] == "subscribe":
                self._failing = False
                self._tried.set()
                backoff.reset()
            elif message["type"] == "message":
                self._on_message(message["data"])

    def _log_outage(self, error: Exception) -> None:
        if not self._failing:
            why = describe_failure(error)
            log.warning("other routers cannot ask for the ends of requests (%s); they read the journal only", why)
        self._failing = True
        self._tried.set()

    def _on_message(self, data: bytes) -> None:
        with suppress(ValueError, TypeError, KeyError, RecursionError):  # those of a newer router, for example
            fields: dict[str, Any] = json.loads(data)
            if "answer" in fields:
                question = self._questions.get(int(fields["answer"]))
                if question is not None and not question.done():
                    question.set_result(bool(fields["ended"]))
            elif len(self._answers) < MAX_ANSWERS:
                number, asking, request_ids = int(fields["ask"]), str(fields["from"]), list(map(str, fields["ids"]))
                answering = asyncio.create_task(self._answer(number, asking, request_ids[:MAX_IDS]))
                self._answers.add(answering)
                answering.add_done_callback(self._answers.discard)

    async def _answer(self, number: int, asking: str, request_ids: Sequence[str]) -> None:
        with suppress(*_ERRORS):  # then no answer comes, which the other router expects, too
            answer = {"answer": number, "ended": await self._flush_ends(request_ids)}
            await self._client.publish(channel_of(asking), json.dumps(answer))
