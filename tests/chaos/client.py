"""Clients that mean to get their whole answer: they turn to any router, again and again, and go on where they were."""

import asyncio
import json
import random
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any, ClassVar

import httpx
from quire_proto.errors import ErrorCode

from tests.chaos.answer import Answer
from tests.chaos.events import DONE, Event, events_of
from tests.chaos.failure import Failure, UntypedError, of_rest
from tests.chaos.stack import Stack
from tests.chaos.workload import Request

PAUSE = 0.2
RUNNING = "running", "queued", "in_progress"
STREAMED = {"stream": True, "stream_options": {"include_usage": True, "include_event_ids": True}}


class Pause(Exception):  # noqa: N818 - the client goes on after it
    """The client itself leaves this connection before its answer is complete."""


class Broken(Exception):  # noqa: N818 - the client goes on after it
    """This connection did not bring the answer to its end."""


@dataclass(frozen=True)
class Manners:
    """How clients behave; times in seconds. ``cut`` is the chance to hang up after an event. They turn elsewhere after
    ``silence`` without a byte, and count as hung after ``patience`` without an event, or after ``limit`` in all. They
    do not poll background requests for ``absence`` at most, and read an unknown request again after ``later``.
    """

    cut: float = 0.0
    silence: float = 7.0
    patience: float = 120.0
    limit: float = 400.0
    absence: float = 4.0
    later: float = 6.0


class Client(ABC):
    """Sends one request, with the idempotency key ``key`` where the request is one that has such."""

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
        if self.answer.failure is not None:
            self.answer.known_after_all = await self._is_known(request)
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
            return await self._try(request)
        except (httpx.TransportError, Broken, TimeoutError):
            self.answer.broke += 1
        except Pause:
            pass
        except (UntypedError, LookupError, TypeError, ValueError, AttributeError) as error:
            return self._give_up(f"{type(error).__name__}: {error}")
        self._miss()
        return False

    @abstractmethod
    async def _try(self, request: Request) -> bool:
        """As far as one connection goes. Raises ``Pause``, ``Broken``, what the connection raises, and whatever
        reading something raises that is neither an answer nor an error.
        """

    async def _is_known(self, request: Request) -> bool:
        """Whether a router finds the request after all, some time later."""
        await asyncio.sleep(self._manners.later if self._id else 0)
        for url in self._stack.urls if self._id else ():
            with suppress(httpx.HTTPError):
                found = await self._http.get(f"{url}/v1/requests/{self._id}", headers=request.credentials)
                if found.status_code == 200:
                    return True
        return False

    async def _read_back(self, request: Request, path: str) -> None:
        """Reads what has just ended at every router: none may say that it runs."""
        ended = monotonic()
        for url in self._stack.urls:
            with suppress(httpx.TransportError, ValueError):
                found = await self._http.get(url + path, headers=request.credentials)
                status = found.json()["status"] if found.status_code == 200 else "unknown"
                if status in RUNNING:
                    self.answer.unended.append((ended, monotonic(), f"{path} is {status} at {url}"))

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

    def _fail(self, failure: Failure) -> bool:
        """An error that no other try cures. Raises ``Pause`` where there is too much just now, and ``Broken`` for
        another one that may pass.
        """
        if failure.passes:
            raise Pause if failure.code is ErrorCode.OVERLOADED else Broken
        self.answer.failure, self.answer.failed_at = failure, monotonic()
        return True

    def _give_up(self, why: str) -> bool:
        """An end that is no answer and no error either."""
        self.answer.untyped, self.answer.failed_at = why[:500], monotonic()
        return True

    def _refused(self, response: httpx.Response) -> bool:
        """An answer that is none: whether there is nothing more to try. Raises as ``_fail``, and ``UntypedError``."""
        try:
            failure = of_rest(json.loads(response.text)["error"], response.status_code)
        except (ValueError, LookupError, TypeError) as error:
            raise UntypedError(f"{response.status_code}: {response.text[:200]} ({error})") from None
        if failure.passes and not response.headers.get("retry-after", "").isdigit():
            raise UntypedError(f"{response.status_code} does not say when to come back: {response.text[:200]}")
        return self._fail(failure)

    def _send(self, request: Request) -> dict[str, str]:
        """The headers of a request that is sent now."""
        self.answer.sent.append(monotonic())
        return {**request.credentials, **({"Idempotency-Key": self._key} if request.keyed else {})}

    def _url(self) -> str:
        return self._chance.choice(self._stack.urls)

    def _hangs_up(self) -> bool:
        return self._chance.random() < self._manners.cut

    def _named(self, request: Request, fields: dict[str, Any]) -> None:
        """What an answer, or an event of it, calls itself."""
        if not fields["id"].startswith(request.id_prefix) or fields["model"] != request.body["model"]:
            self.answer.malformed.append(f"{fields['id']} of {fields['model']}")
        self.answer.name(id=fields["id"].removeprefix(request.id_prefix), object=fields["object"])


class StreamClient(Client):
    """Server-sent events, and ``Last-Event-ID``. A request without a key is resumable only after its first event."""

    async def _try(self, request: Request) -> bool:
        if not self._id:
            body = {**request.body, **STREAMED}
            attempt = self._http.stream("POST", self._url() + request.path, json=body, headers=self._send(request))
        else:
            headers = request.credentials | ({"Last-Event-ID": self._last} if self._last else {})
            attempt = self._http.stream("GET", f"{self._url()}/v1/requests/{self._id}/events", headers=headers)
        async with attempt as response:
            if response.status_code != 200:
                await response.aread()
                return self._refused(response)
            return await self._read(response, request)

    async def _read(self, response: httpx.Response, request: Request) -> bool:
        self._hear()
        if request.keyed or self._id:
            self._id = response.headers["x-request-id"]
            self.answer.name(id=self._id)
        events, is_pending = events_of(response.aiter_lines(), self._hear), False
        async for event in events:
            if event.data == DONE:
                await self._expect_end(events, DONE)
                if request.keyed and not is_pending:
                    await self._read_back(request, f"/v1/requests/{self._id}")
                return True
            data = json.loads(event.data)
            is_pending = data.get("quire_journal") == "pending"
            if "error" in data:
                await self._expect_end(events, "its error")
                return self._broken_off(data["error"])
            self._take(request, event, data, is_pending=is_pending)
        return self._give_up("the stream ended without [DONE] and without an error")

    def _take(self, request: Request, event: Event, data: dict[str, Any], *, is_pending: bool) -> None:
        self._named(request, data)
        self.answer.take(data)
        if not (is_pending and event.id == self._last):  # a chunk that says so alone adds nothing to the one before
            self.answer.reach(event.id, counts_tokens=not request.crosses)
        self._id, self._last = self.answer.names["id"], event.id
        if self._hangs_up():
            raise Pause

    def _broken_off(self, error: dict[str, Any]) -> bool:
        """The stream's last event is an error: whether there is nothing more to try."""
        failure = of_rest(error)
        if self._id:
            self.answer.name(id=error["request_id"])
        if not isinstance(error.get("resumable"), bool) or (error["resumable"] and not failure.passes):
            raise UntypedError(f"an error without ``resumable``: {error}")
        if failure.passes and not error["resumable"] and self._id:
            raise UntypedError(f"a retryable error of a released request that is not resumable: {error}")
        return self._fail(failure)

    async def _expect_end(self, events: Any, what: str) -> None:
        with suppress(httpx.TransportError):  # a client that has the whole response does not need it
            async for event in events:
                self.answer.malformed.append(f"after {what}: {event.data[:200]}")


class WholeClient(Client):
    """A response that is not streamed; the same request is repeated until it comes, with more patience each time, as
    without a key it begins anew.
    """

    async def _try(self, request: Request) -> bool:
        hasty = self._manners.cut > 0 and self._chance.random() < 0.3
        timeout = (4 + self.answer.broke) * self._manners.silence * (self._chance.uniform(0.02, 0.2) if hasty else 1)
        url, headers = self._url() + request.path, self._send(request)
        response = await self._http.post(url, json=request.body, headers=headers, timeout=timeout)
        self._hear()
        if response.status_code != 200:
            return self._refused(response)
        self.answer.name(id=response.headers["x-request-id"])
        whole = response.json()
        self._named(request, whole)
        self.answer.take(whole)
        return True


class BackgroundClient(StreamClient):
    """Leaves its request alone for a while, and then attaches to it."""

    _form: ClassVar[dict[str, Any]] = STREAMED

    async def _try(self, request: Request) -> bool:
        if self._id:
            return await self._fetch(request)
        body = {**request.body, **self._form, "background": True}
        response = await self._http.post(self._url() + request.path, json=body, headers=self._send(request))
        if response.status_code != 202:
            return self._refused(response)
        self._hear()
        started = response.json()
        self.answer.name(id=started["id"])
        self._id = started["id"]
        if response.headers["location"] != f"/v1/requests/{self._id}":
            self.answer.malformed.append(f"the location {response.headers['location']} of {self._id}")
        await asyncio.sleep(self._chance.uniform(0.0, self._manners.absence))
        raise Pause

    async def _fetch(self, request: Request) -> bool:
        return await super()._try(request)


class PollingClient(BackgroundClient):
    """As the background client, but polls the request until it has the response."""

    _form: ClassVar[dict[str, Any]] = {}

    async def _fetch(self, request: Request) -> bool:
        response = await self._http.get(f"{self._url()}/v1/requests/{self._id}", headers=request.credentials)
        if response.status_code != 200:
            return self._refused(response)
        self._hear()
        seen = response.json()
        self.answer.name(id=seen["id"])
        if seen["status"] == "running":
            raise Pause
        if seen["status"] != "completed":
            return self._ended(seen)
        self._named(request, seen["response"])
        self.answer.take(seen["response"])
        return True

    def _ended(self, seen: dict[str, Any]) -> bool:
        """A request that ended otherwise than it should: it does not pass, whatever its error is."""
        self.answer.failure, self.answer.failed_at = of_rest(seen.get("error")), monotonic()
        return True
