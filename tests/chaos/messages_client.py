"""A client of Anthropic's Messages API: a stream, which is read on behind the id of its last event at any router."""

import json
from typing import Any

import httpx

from tests.chaos.client import Client, Pause
from tests.chaos.events import Event, events_of
from tests.chaos.failure import UntypedError, of_messages
from tests.chaos.workload import Request

_ENDS = {"end_turn": "stop", "max_tokens": "length"}


class MessagesClient(Client):
    """The message is one choice. Its events are checked for their order; ``ping`` may come between any two."""

    _open = -1

    async def _try(self, request: Request) -> bool:
        if not self._id:
            body = {**request.body, "stream": True}
            attempt = self._http.stream("POST", self._url() + request.path, json=body, headers=self._send(request))
        else:
            headers = request.credentials | ({"Last-Event-ID": self._last} if self._last else {})
            attempt = self._http.stream("GET", f"{self._url()}/v1/requests/{self._id}/events", headers=headers)
        async with attempt as response:
            if response.status_code != 200:
                await response.aread()
                return self._refused(response)
            self._hear()
            self._id = response.headers["x-request-id"]
            self.answer.name(id=self._id)
            return await self._read(response)

    async def _read(self, response: httpx.Response) -> bool:
        async for event in events_of(response.aiter_lines(), self._hear):
            data = json.loads(event.data)
            if data["type"] == "error":
                return self._broken_off(data)
            if data["type"] == "ping":
                continue
            self._take(event, data)
            if data["type"] == "message_stop":
                return True
            if self._hangs_up():
                raise Pause
        return self._give_up("the stream ended without message_stop and without an error")

    def _take(self, event: Event, data: dict[str, Any]) -> None:
        if data["type"] == "message_stop":  # there is nothing behind it
            return
        if not event.id or event.id == self._last:
            self.answer.malformed.append(f"{data['type']} has the id {event.id!r} behind {self._last!r}")
        self._last = event.id
        kind, choice = data["type"], self.answer.choices[0]
        if (kind == "message_start") is choice.has_role:
            self.answer.malformed.append(f"{kind} where it cannot be")
        if kind == "message_start":
            choice.has_role = True
            self.answer.name(message=data["message"]["id"], model=data["message"]["model"])
        elif kind == "content_block_start":
            self._expect(self._open < 0, kind)
            self._open = data["index"]
        elif kind == "content_block_delta":
            self._expect(self._open == data["index"], kind)
            choice.text += data["delta"]["text"]
        elif kind == "content_block_stop":
            self._expect(self._open == data["index"], kind)
            self._open = -1
        elif kind == "message_delta":
            self._expect(not choice.end, kind)
            choice.end = _ENDS.get(data["delta"]["stop_reason"], data["delta"]["stop_reason"])
            usage = data["usage"]
            prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
            self.answer.usage = prompt, usage["output_tokens"]

    def _expect(self, is_so: bool, kind: str) -> None:
        if not is_so:
            self.answer.malformed.append(f"{kind} where it cannot be")

    def _refused(self, response: httpx.Response) -> bool:
        try:
            failure = of_messages(json.loads(response.text), response.status_code)
        except UntypedError:
            return super()._refused(response)  # a request that is read on is refused in OpenAI's words
        if failure.passes and not response.headers.get("retry-after", "").isdigit():
            raise UntypedError(f"{response.status_code} does not say when to come back: {response.text[:200]}")
        return self._fail(failure)

    def _broken_off(self, data: dict[str, Any]) -> bool:
        """The stream's error: whether there is nothing more to try."""
        failure, resumable = of_messages(data), data["error"]["details"].get("resumable")
        self.answer.name(id=data["request_id"])
        if resumable is not failure.passes:
            raise UntypedError(f"an error that is not as ``resumable`` as it should be: {data}")
        return self._fail(failure)
