"""The client of a row: it asks the whole time, reads on where an answer broke off, and compares every answer with that
of an undisturbed run. Runs in a pod of the router's image, so it imports nothing of the tests.

``python client.py PLAN`` with a JSON file as ``load.py`` writes it. It prints ``answered N`` after each answer, and as
its last line what it saw. SIGTERM ends it, once what is on its way is answered.
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import gmtime, monotonic, strftime
from typing import Any
from uuid import uuid4

import aiohttp

AGAIN = 0.2
"""Seconds between two tries of one answer."""
CONNECT = 3.0
SILENCE = 8.0
"""Seconds without a byte after which a stream is taken for dead: routers send a comment every 5."""
WHOLE_SILENCE = 20.0
"""The same for an answer in one piece, which has no comments."""
PATIENCE = 150.0
"""Seconds without a token after which an answer counts as lost."""
TICK = 0.1
STREAM, WHOLE = "stream", "whole"
BROKEN = (aiohttp.ClientError, TimeoutError, ConnectionError)


class FinalError(Exception):
    """An answer that no other try brings."""


@dataclass
class Seen:
    """What all answers of this client were like. ``pause`` is the longest time between two events of a stream, and
    ``first`` that before the first; ``worst`` says when the longer of the two ended, and in which answer. ``errors``
    are connections that broke or were refused, by what they said. ``late`` is the longest time that the client itself
    did not get to run.
    """

    answers: int = 0
    pause: float = 0.0
    first: float = 0.0
    worst: str = ""
    late: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    resumed: int = 0
    lost: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    texts: dict[str, Any] = field(default_factory=dict)

    def waited(self, seconds: float, answer: str, *, begun: bool) -> None:
        """Counts the time before an event of a stream that has ``begun``, or before its first."""
        if seconds > max(self.pause, self.first):
            self.worst = f"{seconds:.1f} s until {strftime('%H:%M:%S', gmtime())} in {answer}"
        if begun:
            self.pause = max(self.pause, seconds)
        else:
            self.first = max(self.first, seconds)

    def error(self, what: str) -> None:
        """Counts one that the client saw, and goes on from."""
        self.errors[what] = self.errors.get(what, 0) + 1


@dataclass
class Answer:
    """One answer, as far as it has come. ``place`` is the id of the last event."""

    request_id: str = ""
    place: str = ""
    text: str = ""
    end: str = ""
    tokens: int = 0
    heard: float = 0.0

    def content(self) -> list[Any]:
        """What must not depend on faults."""
        return [self.text, self.end, self.tokens]


def order(place: str) -> tuple[int, bool, bool]:
    """Event ids in the order in which a stream has them: tokens, the end, the usage."""
    return int(place.rstrip("eu") or 0), "e" in place, "u" in place


class Client:
    """Asks one request after the other of ``plan``, with as many at once as it says."""

    def __init__(self, plan: dict[str, Any], http: aiohttp.ClientSession) -> None:
        self.seen = Seen()
        self.ending = asyncio.Event()
        self._plan = plan
        self._http = http
        self._credentials = {"Authorization": f"Bearer {key}"} if (key := plan["key"]) else {}

    async def run(self) -> None:
        """Until it is to end; or, where no answers are known yet, once through all requests, one after the other."""
        if self._plan["known"] is None:
            for number, way in enumerate((STREAM,) * len(self._plan["requests"])):
                self.seen.texts[str(number)] = await self._answer(number, way)
            return
        ticks = asyncio.create_task(self._tick())
        await asyncio.gather(*(self._one_after_the_other(worker) for worker in range(self._plan["workers"])))
        ticks.cancel()

    async def _tick(self) -> None:
        """Takes notice of how late the client itself is."""
        while True:
            began = monotonic()
            await asyncio.sleep(TICK)
            self.seen.late = max(self.seen.late, monotonic() - began - TICK)

    async def _one_after_the_other(self, worker: int) -> None:
        number, ways = worker, (STREAM, STREAM, STREAM, WHOLE)
        while not self.ending.is_set():
            which = number % len(self._plan["requests"])
            content = await self._answer(which, ways[(number // self._plan["workers"]) % len(ways)])
            known = self._plan["known"][str(which)]
            if content is not None and content != known:
                self.seen.changed.append(f"{content} instead of {known}")
            number += self._plan["workers"]

    async def _answer(self, number: int, way: str) -> list[Any] | None:
        """The answer's content, over any number of connections; None where it is lost."""
        answer, key = Answer(heard=monotonic()), uuid4().hex
        body = {**self._plan["requests"][number], "model": self._plan["model"]}
        attempt = self._stream if way == STREAM else self._whole
        while True:
            try:
                await attempt(answer, body, key)
                break
            except FinalError as error:
                self.seen.lost.append(str(error))
                return None
            except BROKEN as error:
                self.seen.error(f"{type(error).__name__}: {error}"[:200])
            if monotonic() > answer.heard + PATIENCE:
                self.seen.lost.append(f"nothing for {PATIENCE:.0f} s, behind {len(answer.text)} characters")
                return None
            self.seen.resumed += bool(answer.request_id)
            await asyncio.sleep(AGAIN)
        self.seen.answers += 1
        print(f"answered {self.seen.answers}", flush=True)
        return answer.content()

    async def _whole(self, answer: Answer, body: dict[str, Any], key: str) -> None:
        """An answer in one piece. Sent again with its key it runs once, whichever router takes it."""
        url = f"{self._plan['url']}/v1/completions"
        headers, timeout = {**self._credentials, "Idempotency-Key": key}, timeouts(WHOLE_SILENCE)
        async with self._http.post(url, json=body, headers=headers, timeout=timeout) as response:
            await self._expect_ok(response)
            whole = await response.json()
        (choice,) = whole["choices"]
        answer.text, answer.end = choice["text"], choice["finish_reason"]
        answer.tokens = whole["usage"]["completion_tokens"]

    async def _stream(self, answer: Answer, body: dict[str, Any], key: str) -> None:
        """One connection of a stream: its beginning, or what follows the last event that came."""
        url = self._plan["url"]
        if answer.request_id:
            headers = {**self._credentials, "Last-Event-ID": answer.place}
            asked = self._http.get(f"{url}/v1/requests/{answer.request_id}/events", headers=headers)
        else:
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True, "include_event_ids": True}}
            headers = {**self._credentials, "Idempotency-Key": key}
            asked = self._http.post(f"{url}/v1/completions", json=streamed, headers=headers)
        async with asked as response:
            await self._expect_ok(response)
            async for place, data in events(response):
                if data == "[DONE]":
                    return
                self._take(answer, place, json.loads(data))
        raise aiohttp.ClientPayloadError("the stream ended without [DONE]")

    def _take(self, answer: Answer, place: str, event: dict[str, Any]) -> None:
        if "error" in event:
            error = event["error"]
            if not error.get("resumable"):
                raise FinalError(f"an error in the stream: {error}")
            raise aiohttp.ClientPayloadError(f"an error in the stream: {error['code']}")
        now = monotonic()
        if answer.place and order(place) <= order(answer.place):
            self.seen.repeated.append(f"{place} after {answer.place}")
        self.seen.waited(now - answer.heard, event["id"], begun=bool(answer.place))
        answer.heard, answer.place, answer.request_id = now, place, event["id"]
        for choice in event["choices"]:
            answer.text += choice["text"]
            answer.end = choice["finish_reason"] or answer.end
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]

    async def _expect_ok(self, response: aiohttp.ClientResponse) -> None:
        """Raises ``FinalError`` for a refusal, and what counts as broken for one that passes."""
        if response.status == 200:
            return
        said = (await response.text())[:300]
        if response.status in (429, 502, 503, 504):
            raise aiohttp.ClientPayloadError(f"{response.status}: {said}")
        raise FinalError(f"{response.status}: {said}")


def timeouts(silence: float) -> aiohttp.ClientTimeout:
    """Those of one connection; an answer may take as long as it likes."""
    return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=silence)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
    """The id and the data of each event."""
    place = ""
    async for line in response.content:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "id":
            place = value
        elif name == "data":
            yield place, value


async def main(plan: dict[str, Any]) -> None:
    """Runs until SIGTERM, and prints what was seen."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(timeout=timeouts(SILENCE), connector=connector) as http:
        client = Client(plan, http)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, client.ending.set)
        await client.run()
    print(json.dumps(asdict(client.seen)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
