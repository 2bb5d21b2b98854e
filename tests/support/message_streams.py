"""Streams of the Messages API: their events, read as strictly as the API says they come, and put together."""

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

PING = {"type": "ping"}
_TEXTS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
_KINDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "tool_use"}


@dataclass(frozen=True)
class Event:
    """An event, with the id that it has itself."""

    event_id: str | None
    data: dict[str, Any]


def message_events(body: bytes) -> list[Event]:
    """The events of a stream, without pings. Each is named as its type."""
    events = []
    for block in body.decode().split("\n\n")[:-1]:
        fields = dict(line.partition(": ")[::2] for line in block.split("\n"))
        assert set(fields) <= {"id", "event", "data", "retry"}, block
        data = json.loads(fields["data"])
        assert data["type"] == fields["event"]
        if data != PING:
            events.append(Event(fields.get("id"), data))
    return events


def message_of(events: Iterable[Event]) -> dict[str, Any]:
    """The message that a whole stream amounts to."""
    message: dict[str, Any] = {}
    opened: dict[str, Any] | None = None
    inputs: dict[int, str] = {}
    ended = False
    for event in events:
        data, kind = event.data, event.data["type"]
        assert not ended, f"{data} comes after the end"
        assert bool(message) is (kind != "message_start"), data
        if kind == "message_start":
            message = deepcopy(data["message"])
            assert message["content"] == []
            assert message["stop_reason"] is None
        elif kind == "content_block_start":
            assert opened is None
            assert message["usage"]["output_tokens"] == 0
            opened = dict(data["content_block"])
            assert data["index"] == len(message["content"])
            message["content"].append(opened)
        elif kind == "content_block_delta":
            assert opened is not None
            assert data["index"] == len(message["content"]) - 1
            _add(opened, data["delta"], inputs, data["index"])
        elif kind == "content_block_stop":
            assert opened is not None
            assert data["index"] == len(message["content"]) - 1
            opened = None
        elif kind == "message_delta":
            assert opened is None
            message |= data["delta"]
            message["usage"] |= data["usage"]
        else:
            assert kind == "message_stop", data
            assert message["stop_reason"] is not None
            ended = True
    assert ended
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def _add(block: dict[str, Any], delta: dict[str, Any], inputs: dict[int, str], index: int) -> None:
    kind = delta["type"]
    if kind == "signature_delta":
        assert (block["type"], block["signature"]) == ("thinking", "")
        block["signature"] = delta["signature"]
        return
    assert _KINDS[kind] == block["type"]
    text = delta[_TEXTS[kind]]
    assert text, "an event says something"
    if kind == "input_json_delta":
        inputs[index] = inputs.get(index, "") + text
    else:
        block[_TEXTS[kind]] += text
