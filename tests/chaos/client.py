"""Clients that mean to get their whole answer: they turn to any router, again and again, and go on where they were."""

import asyncio
import json
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any, ClassVar

import httpx

from tests.chaos.answer import Answer
from tests.chaos.stack import Stack
from tests.chaos.workload import Request

PAUSE = 0.2
LATER = 6.0  # seconds
BUSY = (429, 503)
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class Broken(Exception):  # noqa: N818 - the client goes on after it
    """This connection did not bring the answer to its end."""


@dataclass(frozen=True)
class Manners:
    """How clients behave; times in seconds. ``cut`` is the chance to hang up after an event. They turn elsewhere after
    ``silence`` without a byte, and count as hung after ``patience`` without any news, or after ``limit`` in all.
    """

    cut: float = 0.0
    silence: float = 7.0
    patience: float = 120.0
    limit: float = 400.0


class Client(ABC):
    """Sends one request with an idempotency key."""

    def __init__(self, stack: Stack, http: httpx.AsyncClient, key: str, chance: random.Random, manners: Manners):
        self.answer = Answer()
        self._stack = stack
        self._http = http
        self._key = key
        self._chance = chance
        self._manners = manners
        self._id = ""
        self._last = ""
        self._heard = monotonic()

    async def run(self, request: Request) -> Answer:
        """The whole answer, however often the connection breaks."""
        self._heard = monotonic()
        try:
            async with asyncio.timeout(self._manners.limit):
                await self._insist(request)
        except TimeoutError:
            self.answer.hung = True
        if self.answer.error is not None:
            self.answer.known_after_all = await self._is_known()
        return self.answer

    async def _insist(self, request: Request) -> None:
        """Returns once the client has its answer, or an error. Raises ``TimeoutError`` when it has lost patience."""
        while not await self._complete(request):
            self.answer.resumed += 1
            if monotonic() > self._heard + self._manners.patience:
                raise TimeoutError
            await asyncio.sleep(PAUSE * self._chance.uniform(0.5, 1.5))

    async def _complete(self, request: Request) -> bool:
        """One try; whether the client is done."""
        try:
            done = await self._try(request)
        except (httpx.HTTPError, Broken, TimeoutError):
            self._miss()
            return False
        return done

    @abstractmethod
    async def _try(self, request: Request) -> bool:
        """As far as one connection goes. Raises ``Broken`` and what the connection raises."""

    async def _is_known(self) -> bool:
        """Whether a router knows the request after all, some time later."""
        await asyncio.sleep(LATER)
        for url in self._stack.urls if self._id else ():
            try:
                if (await self._http.get(f"{url}/v1/requests/{self._id}")).status_code == 200:
                    return True
            except httpx.HTTPError:
                continue
        return False

    def _hear(self) -> None:
        """A router is at work for this client."""
        self._heard = monotonic()
        if self._is_away:
            self.answer.away[-1] = (self.answer.away[-1][0], self._heard)

    def _miss(self) -> None:
        """From the last word on no router was."""
        if not self._is_away:
            self.answer.away.append((self._heard, inf))

    @property
    def _is_away(self) -> bool:
        return bool(self.answer.away) and self.answer.away[-1][1] == inf

    def _fail(self, error: str, *, typed: bool = True) -> bool:
        if typed:
            self.answer.error, self.answer.failed_at = error, monotonic()
        else:
            self.answer.untyped = error
        return True

    def _refused(self, status: int, text: str) -> bool:
        """An answer that is none: whether there is nothing more to try. Raises ``Broken`` where there is."""
        if status in BUSY:
            raise Broken
        try:
            error = json.loads(text)["error"]["code"]
        except (ValueError, KeyError, TypeError):
            return self._fail(f"{status}: {text[:200]}", typed=False)
        return self._fail(f"{status} {error}: {text[:300]}")

    def _url(self) -> str:
        return self._chance.choice(self._stack.urls)

    def _hangs_up(self) -> bool:
        return self._chance.random() < self._manners.cut


class StreamClient(Client):
    """Server-sent events, and ``Last-Event-ID``."""

    async def _try(self, request: Request) -> bool:
        if not self._id:
            body = {**request.body, **STREAMED}
            headers = {"Idempotency-Key": self._key}
            attempt = self._http.stream("POST", self._url() + request.path, json=body, headers=headers)
        else:
            headers = {"Last-Event-ID": self._last} if self._last else {}
            attempt = self._http.stream("GET", f"{self._url()}/v1/requests/{self._id}/events", headers=headers)
        async with attempt as response:
            if response.status_code != 200:
                return self._refused(response.status_code, (await response.aread()).decode())
            return await self._read(response)

    async def _read(self, response: httpx.Response) -> bool:
        self._id = self._id or response.headers["x-request-id"]
        self._hear()
        event_id = self._last
        async for line in response.aiter_lines():
            self._hear()
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif name == "data" and (value == "[DONE]" or self._take(json.loads(value), event_id)):
                return True
        raise Broken

    def _take(self, event: dict[str, Any], event_id: str) -> bool:
        """Whether the event was the last."""
        if "error" in event:
            if event["error"].get("resumable"):
                raise Broken
            return self._fail(json.dumps(event["error"]))
        self.answer.take(event)
        self._last = event_id
        if self._hangs_up():
            raise Broken
        return False


class WholeClient(Client):
    """One answer in one piece; the same request again until it comes."""

    async def _try(self, request: Request) -> bool:
        headers = {"Idempotency-Key": self._key}
        timeout = 4 * self._manners.silence * (self._chance.uniform(0.02, 0.2) if self._is_hasty() else 1)
        attempt = self._http.post(self._url() + request.path, json=request.body, headers=headers, timeout=timeout)
        response = await attempt
        self._hear()
        if response.status_code != 200:
            return self._refused(response.status_code, response.text)
        self.answer.take(response.json())
        return True

    def _is_hasty(self) -> bool:
        return self._manners.cut > 0 and self._chance.random() < 0.3


class BackgroundClient(StreamClient):
    """Leaves its request alone for a while, and then attaches to it."""

    _form: ClassVar[dict[str, Any]] = STREAMED

    async def _try(self, request: Request) -> bool:
        if self._id:
            return await self._fetch(request)
        headers = {"Idempotency-Key": self._key}
        body = {**request.body, **self._form, "background": True}
        response = await self._http.post(self._url() + request.path, json=body, headers=headers)
        if response.status_code != 202:
            return self._refused(response.status_code, response.text)
        self._hear()
        self._id = response.json()["id"]
        await asyncio.sleep(self._chance.uniform(0.0, 4.0))
        raise Broken

    async def _fetch(self, request: Request) -> bool:
        return await super()._try(request)


class PollingClient(BackgroundClient):
    """As the background client, but asks how its request is until it has its answer."""

    _form: ClassVar[dict[str, Any]] = {}

    async def _fetch(self, request: Request) -> bool:
        response = await self._http.get(f"{self._url()}/v1/requests/{self._id}")
        if response.status_code != 200:
            return self._refused(response.status_code, response.text)
        self._hear()
        seen = response.json()
        if seen["status"] == "running":
            raise Broken
        if seen["status"] != "completed":
            return self._fail(f"{seen['status']}: {seen.get('error')}")
        self.answer.take(seen["response"])
        return True
