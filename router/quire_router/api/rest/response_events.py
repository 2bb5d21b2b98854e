"""The items of a response's output and the events that they are streamed as (``ItemWriter``), from the parts of an
answer. Sequence numbers are given where a stream is written (``responses_format``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as _quote
from typing import Any, Final

from quire_proto.text.stream_scanner import Content, OutputPart, Reasoning, ToolCallStart

from quire_router.api.output_parser import call_digest, choice_name
from quire_router.api.rest.http import json_text
from quire_router.api.schemas.response_items import CALL, MESSAGE, REASONING, encode_encrypted_content
from quire_router.api.schemas.response_state import ResponseState

_PREFIXES: Final = {MESSAGE: "msg", REASONING: "rs", CALL: "fc"}
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


@dataclass(slots=True)
class ResponseEvent:
    """An event without its sequence number: a mark, which is ``head`` alone, or one with a ``text`` behind it, and of a
    message with the ``logprobs`` of the tokens that begin in that.
    """

    head: str
    text: str | None = None
    logprobs: "Sequence[TokenEntry] | None" = None

    @property
    def size(self) -> int:
        """What it counts for in sequence numbers."""
        return 1 if self.text is None else len(self.text)

    def encode(self, number: int, delivered: int = 0) -> str:
        """Returns the event with its number, and without so many of the first characters of its text."""
        text = "" if self.text is None else _quote(self.text[delivered:])
        if self.logprobs is not None:
            text += f',"logprobs":[{",".join(each.entry for each in self.logprobs if each.begin >= delivered)}]'
        return f'{self.head}{text},"sequence_number":{number}}}\n\n'


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """The log-probabilities of a token as JSON, and which character of its event's text the token begins with."""

    begin: int
    entry: str


def _mark(fields: dict[str, Any]) -> ResponseEvent:
    return ResponseEvent(f"event: {fields['type']}\ndata: {json_text(fields)[:-1]}")


@dataclass(slots=True)
class OutputItem:
    """One item of an answer. ``texts`` are those of its deltas: text, reasoning, or a call's arguments."""

    kind: str
    id: str
    name: str = ""
    call_id: str = ""
    namespace: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    status: str = IN_PROGRESS

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self.texts)


class ItemWriter:
    """The items of one answer, of which at most the last is open. All ids follow from the request's."""

    __slots__ = ("_calls", "_choice", "_namespaces", "_request_id", "_state", "head", "items")

    def __init__(self, request_id: str, state: ResponseState) -> None:
        self.items: list[OutputItem] = []
        self.head = ""
        self._request_id = request_id
        self._choice = choice_name(request_id, 0)
        self._state = state
        self._namespaces = state.namespaces
        self._calls = 0

    @property
    def open_item(self) -> OutputItem | None:
        """The item that is written now."""
        return self.items[-1] if self.items and self.items[-1].status == IN_PROGRESS else None

    def write(self, part: OutputPart, logprobs: Sequence[TokenEntry] = ()) -> Iterator[ResponseEvent]:
        """Yields the events of the next part, whose tokens have these log-probabilities."""
        opened = self.open_item
        if isinstance(part, ToolCallStart):
            yield from self.close()
            call_id = f"call_{call_digest(self._choice, self._calls)}"
            self._calls += 1
            yield from self._open(CALL, part.name, call_id)
            return
        kind = REASONING if isinstance(part, Reasoning) else MESSAGE if isinstance(part, Content) else CALL
        if opened is None or opened.kind != kind:
            yield from self.close()
            yield from self._open(kind)
        item = self.items[-1]
        item.texts.append(part.text)
        item.logprobs += [each.entry for each in logprobs]
        yield ResponseEvent(self.head, part.text, logprobs if kind == MESSAGE else None)

    def close(self, status: str = COMPLETED) -> Iterator[ResponseEvent]:
        """Yields the events that end the open item, if there is one."""
        item = self.open_item
        if item is None:
            return
        item.status = status
        place = {"item_id": item.id, "output_index": len(self.items) - 1}
        if item.kind == CALL:
            done = {"type": "response.function_call_arguments.done", **place, "name": item.name}
            yield _mark({**done, "arguments": item.text})
        else:
            prefix, names, part = self._part(item)
            logprobs = f',"logprobs":[{",".join(item.logprobs)}]' if item.kind == MESSAGE else ""
            done_text = _mark({"type": f"response.{prefix}_text.done", **place, **names, "text": item.text})
            done_text.head += logprobs
            yield done_text
            yield ResponseEvent(_unclosed_part(f"response.{_part_event(prefix)}.done", {**place, **names}, part))
        ended = {"type": "response.output_item.done", "output_index": place["output_index"]}
        yield ResponseEvent(f'event: {ended["type"]}\ndata: {json_text(ended)[:-1]},"item":{self.item_json(item)}')

    def item_json(self, item: OutputItem) -> str:
        """Returns an item as it is now."""
        known = {"id": item.id, "type": item.kind}
        if item.kind == CALL:
            called = {"call_id": item.call_id, "name": item.name, "arguments": item.text}
            space = {"namespace": item.namespace} if item.namespace else {}
            return json_text({**known, **called, **space, "status": item.status})
        begun = item.status != IN_PROGRESS
        parts = f"[{self._part(item)[2]}]" if begun else "[]"
        if item.kind == MESSAGE:
            head = json_text({**known, "role": "assistant", "status": item.status})
            return f'{head[:-1]},"content":{parts}}}'
        summary, content = (parts, "[]") if self._state.is_summarized else ("[]", parts)
        head = json_text({**known, "status": item.status})
        if self._state.includes_encrypted_content:
            head = (
                f'{head[:-1]},"encrypted_content":{_quote(encode_encrypted_content(item.text)) if begun else "null"}}}'
            )
        return f'{head[:-1]},"summary":{summary},"content":{content}}}'

    def output_json(self) -> str:
        """Returns all items."""
        return f"[{','.join(map(self.item_json, self.items))}]"

    def _open(self, kind: str, name: str = "", call_id: str = "") -> Iterator[ResponseEvent]:
        number = len(self.items)
        namespace, name = self._namespaces.get(name, ("", name))
        item = OutputItem(kind, f"{_PREFIXES[kind]}_{self._request_id}_{number}", name, call_id, namespace)
        self.items.append(item)
        place = {"item_id": item.id, "output_index": number}
        added = {"type": "response.output_item.added", "output_index": number}
        yield ResponseEvent(f'event: {added["type"]}\ndata: {json_text(added)[:-1]},"item":{self.item_json(item)}')
        if kind == CALL:
            delta = "response.function_call_arguments.delta"
        else:
            prefix, names, part = self._part(item)
            place |= names
            yield ResponseEvent(_unclosed_part(f"response.{_part_event(prefix)}.added", place, part))
            delta = f"response.{prefix}_text.delta"
        self.head = f'event: {delta}\ndata: {json_text({"type": delta, **place})[:-1]},"delta":'

    def _part(self, item: OutputItem) -> tuple[str, dict[str, int], str]:
        """Returns how the events of an item's one part are named, the number of the part in them, and the part."""
        text = _quote(item.text)
        if item.kind == MESSAGE:
            part = f'{{"type":"output_text","annotations":[],"logprobs":[{",".join(item.logprobs)}],"text":{text}}}'
            return "output", {"content_index": 0}, part
        if self._state.is_summarized:
            return "reasoning_summary", {"summary_index": 0}, f'{{"type":"summary_text","text":{text}}}'
        return "reasoning", {"content_index": 0}, f'{{"type":"reasoning_text","text":{text}}}'


def _part_event(prefix: str) -> str:
    return "reasoning_summary_part" if prefix == "reasoning_summary" else "content_part"


def _unclosed_part(kind: str, place: dict[str, Any], part: str) -> str:
    return f'event: {kind}\ndata: {json_text({"type": kind, **place})[:-1]},"part":{part}'
