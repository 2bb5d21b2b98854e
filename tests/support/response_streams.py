"""Streams of the Responses API: their events, read as strictly as the API says they come, and put together."""

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

ENDS = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}


@dataclass(frozen=True)
class Event:
    """An event, with the id that it has itself."""

    event_id: str | None
    data: dict[str, Any]

    @property
    def kind(self) -> str:
        kind: str = self.data["type"]
        return kind

    @property
    def number(self) -> int:
        number: int = self.data["sequence_number"]
        return number


def response_events(body: bytes) -> list[Event]:
    """The events of a stream. Each is named as its type, and their numbers grow."""
    events: list[Event] = []
    for block in body.decode().split("\n\n")[:-1]:
        fields = dict(line.partition(": ")[::2] for line in block.split("\n"))
        if set(fields) == {""}:
            continue  # a comment
        assert set(fields) <= {"id", "event", "data", "retry"}, block
        data = json.loads(fields["data"])
        assert data["type"] == fields["event"]
        assert fields.get("id") in (None, str(data["sequence_number"]))
        assert not events or events[-1].number < data["sequence_number"], block
        events.append(Event(fields.get("id"), data))
    return events


def response_of(events: Iterable[Event]) -> dict[str, Any]:
    """The response that a whole stream ends with; every event before has to say the same."""
    given = list(events)
    assert [event.kind for event in given[:2]] == ["response.created", "response.in_progress"]
    assert given[0].data["response"] == given[1].data["response"]
    items = _Items()
    for event in given[2:-1]:
        items.add(event)
    response: dict[str, Any] = given[-1].data["response"]
    if response["status"] != "cancelled":
        assert ENDS[given[-1].kind] == response["status"]
    assert response["output"] == items.done
    begun = given[0].data["response"]
    assert begun["status"] == "in_progress"
    assert begun["output"] == []
    assert begun["usage"] is None
    changed = ("status", "output", "usage", "incomplete_details", "error")
    for name in begun:
        assert name in changed or begun[name] == response[name]
    return response


class _Items:
    """The items of a stream, of which at most one is open."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""
        self._logprobs: list[Any] = []
        self._part: dict[str, Any] | None = None
        self._text_done = False

    def add(self, event: Event) -> None:
        data, kind = event.data, event.kind.removeprefix("response.")
        if kind == "output_item.added":
            assert self._open is None
            self._open = deepcopy(data["item"])
            self._text, self._logprobs, self._part, self._text_done = "", [], None, False
            assert self._open["status"] == "in_progress"
            assert data["output_index"] == len(self.done)
            return
        assert self._open is not None, data
        assert data["output_index"] == len(self.done)
        if kind == "output_item.done":
            self._end(data["item"])
            return
        assert data["item_id"] == self._open["id"]
        assert data.get("content_index", data.get("summary_index", 0)) == 0
        if kind in ("content_part.added", "reasoning_summary_part.added"):
            assert self._part is None
            self._part = data["part"]
            assert self._part["text"] == ""
        elif kind.endswith(".delta"):
            assert data["delta"]
            assert (self._part is None) is (self._open["type"] == "function_call")
            assert not self._text_done
            self._text += data["delta"]
            self._logprobs += data.get("logprobs", [])
        elif kind in ("content_part.done", "reasoning_summary_part.done"):
            assert self._text_done
            self._part = data["part"]
            assert self._part["text"] == self._text
        else:
            assert kind in ("output_text.done", "reasoning_text.done", "reasoning_summary_text.done") or (
                kind == "function_call_arguments.done"
            )
            assert data.get("text", data.get("arguments")) == self._text
            assert self._logprobs == data.get("logprobs", [])[: len(self._logprobs)]
            self._text_done = True

    def _end(self, item: dict[str, Any]) -> None:
        assert self._open is not None
        assert self._text_done
        assert item["status"] in ("completed", "incomplete")
        parts = [*item.get("summary", []), *item.get("content", [])]
        assert parts == ([] if self._part is None else [self._part])
        for name in ("id", "type", "name", "call_id", "role"):
            assert item.get(name) == self._open.get(name)
        assert item["type"] != "function_call" or item["arguments"] == self._text
        self.done.append(item)
        self._open = None
