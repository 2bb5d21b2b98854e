"""A client of the Responses API: a conversation of several turns, each of which goes on from the one before at any
router, and is read on behind its last ``sequence_number`` wherever it broke.
"""

import json
from typing import Any

import httpx

from tests.chaos.client import Client, Pause
from tests.chaos.events import events_of
from tests.chaos.failure import UntypedError, of_rest
from tests.chaos.workload import Request

PATH = "/v1/responses"
_ENDS = {"completed": "stop", "incomplete": "length"}


class ConversationClient(Client):
    """Each turn is one choice of its answer, and the usage that of all turns."""

    _turn = 0
    _previous = ""
    _number = -1
    _used = (0, 0)

    async def _try(self, request: Request) -> bool:
        """One connection, which brings a turn to its end or not."""
        if self._id:
            address = f"{self._url()}{PATH}/{self._id}?stream=true"
            address += f"&starting_after={self._number}" if self._number >= 0 else ""
            attempt = self._http.stream("GET", address, headers=request.credentials)
        else:
            body = {**request.body, "stream": True, "input": request.turns[self._turn]}
            if self._previous:
                body["previous_response_id"] = self._previous
            headers = self._send(request)
            if request.keyed:
                headers["Idempotency-Key"] += f"-{self._turn}"
            attempt = self._http.stream("POST", self._url() + PATH, json=body, headers=headers)
        async with attempt as response:
            if response.status_code != 200:
                await response.aread()
                return self._refused(response)
            self._hear()
            if request.keyed:
                self._id = response.headers["x-request-id"]
            return await self._read(response, request)

    async def _read(self, response: httpx.Response, request: Request) -> bool:
        async for event in events_of(response.aiter_lines(), self._hear):
            data = json.loads(event.data)
            if data["type"] == "error":
                return self._broken_off(data["error"])
            if data["sequence_number"] <= self._number:
                self.answer.malformed.append(f"the event {data['sequence_number']} after {self._number}")
            self._number = data["sequence_number"]
            if self._take(data, request):
                if request.keyed and data.get("quire_journal") != "pending":
                    await self._read_back(request, f"{PATH}/{self._previous}")
                return self._turn == len(request.turns)
            if self._hangs_up():
                raise Pause
        return self._give_up("the stream ended without an end of the response, and without an error")

    def _take(self, data: dict[str, Any], request: Request) -> bool:
        """Takes in an event; whether it is the last of its turn."""
        choice = self.answer.choices[self._turn]
        kind = data["type"]
        if kind == "response.created":
            self._id = data["response"]["id"]
            self._name(data["response"])
        elif kind == "response.output_text.delta":
            choice.text += data["delta"]
        elif kind in ("response.completed", "response.incomplete"):
            self._end(data["response"])
            return True
        return False

    def _end(self, response: dict[str, Any]) -> None:
        """The whole response that ends a turn has to be what its events said."""
        self._name(response)
        choice = self.answer.choices[self._turn]
        text = "".join(part["text"] for item in response["output"] for part in item["content"])
        if text != choice.text:
            self.answer.malformed.append(f"the response {text!r} behind {choice.text!r}")
        if response["previous_response_id"] != (self._previous or None):
            self.answer.malformed.append(f"it goes on from {response['previous_response_id']}")
        choice.end = _ENDS.get(response["status"], response["status"])
        usage = response["usage"]
        self._used = self._used[0] + usage["input_tokens"], self._used[1] + usage["output_tokens"]
        self.answer.usage = self._used
        self._previous, self._id, self._number = response["id"], "", -1
        self._turn += 1

    def _name(self, response: dict[str, Any]) -> None:
        """What a response calls itself; the first one's id is that of the conversation."""
        names = {"id": response["id"]} if self._turn == 0 else {}
        self.answer.name(**names, **{f"id of turn {self._turn}": response["id"]}, model=response["model"])

    def _broken_off(self, error: dict[str, Any]) -> bool:
        """The stream's error: whether there is nothing more to try."""
        failure = of_rest(error)
        if not isinstance(error.get("resumable"), bool) or error["resumable"] is not failure.passes:
            raise UntypedError(f"an error that is not as ``resumable`` as it should be: {error}")
        return self._fail(failure)
