"""Harmony, the format of gpt-oss: an output is a list of messages, each in a channel. ``analysis`` is reasoning,
``final`` is the answer, and a message to a function is a call:

    <|channel|>analysis<|message|>They ask for …<|end|><|start|>assistant<|channel|>final<|message|>It is sunny.
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>

It is read as text. The library ``openai-harmony`` has the same rules, but reads the tokens of one vocabulary, a file
that it downloads.
"""

import re
from collections.abc import Callable, Collection

from quire_proto.text.stream_scanner import (
    SPACE,
    Content,
    MarkerSearch,
    Reasoning,
    Steps,
    StreamParser,
    TextBuffer,
    ToolCallArguments,
    ToolCallStart,
)

MAX_HEADER_CHARS = 512
CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = (START, CHANNEL, "<|end|>", "<|call|>", "<|return|>")
"""What ends a message; the first two begin the next one."""
MARKS = (*ENDS, MESSAGE, "<|constrain|>")
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_MARK = "<|"  # the beginning of every mark
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(StreamParser):
    """Splits one output into reasoning, content and calls of the tools in ``names``. A message to another tool is
    content as it was written, and so is an output without marks. At most one header is held back, of
    ``MAX_HEADER_CHARS``.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)

    def _parse(self) -> Steps[None]:
        mark = yield from self._read_beginning()
        while mark or (yield from self._more()):
            header = yield from self._read_header(mark)
            mark = "" if header is None else (yield from self._read_message(header))

    def _read_beginning(self) -> Steps[str]:
        """Reads an answer without a header. Returns the mark with which the first header begins."""
        source, space = self._source, TextBuffer()
        while (yield from self._more()) and len(space) <= MAX_HEADER_CHARS:
            space.push(source.take(source.space_end()))
            if source.at < len(source.text):
                break
        for mark in (START, CHANNEL, "to="):
            if (yield from self._accept(mark)):
                return space.take() + mark
        self._emit_content(space.take())
        return (yield from self._read_body(self._emit_content))

    def _read_header(self, mark: str) -> Steps[str | None]:
        """Reads a header that begins with ``mark``, up to its end. Returns None for text that is none, which is
        content. A header that the output cuts off is dropped.
        """
        source, search, header = self._source, MarkerSearch(MESSAGE), TextBuffer()
        header.push(mark)
        begin = source.position
        while (yield from self._more()):
            stop = min(len(source.text), source.at + MAX_HEADER_CHARS + begin - source.position)
            text, found = search.read(source, stop)
            header.push(text)
            if found:
                return header.take()
            if source.position - begin >= MAX_HEADER_CHARS:
                self._emit_content(header.take() + search.take())
                return None
        rest = header.take() + search.take()
        if not rest.lstrip(SPACE).startswith(_MARK):
            self._emit_content(rest)
        return None

    def _read_message(self, header: str) -> Steps[str]:
        """Reads the message after a header, by its channel and recipient. Returns the mark that begins the next."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None and recipient[1] in self._names:
            self._parts.append(ToolCallStart(recipient[1]))
            return (yield from self._read_body(self._emit_arguments))
        if recipient is not None:
            self._emit_content(header + MESSAGE)
            return (yield from self._read_body(self._emit_content))
        is_analysis = channel is not None and channel[1] == "analysis"
        return (yield from self._read_body(self._emit_reasoning if is_analysis else self._emit_content))

    def _read_body(self, emit: Callable[[str], None]) -> Steps[str]:
        """Emits text up to the mark that ends it. Returns that mark if it begins the next header, else nothing."""
        search = MarkerSearch(_MARK)
        while (yield from self._more()):
            text, found = search.read(self._source)
            emit(text)
            if not found:
                continue
            for mark in ENDS:
                if (yield from self._accept(mark.removeprefix(_MARK))):
                    return mark if mark in (START, CHANNEL) else ""
            if self._is_cut_here and self._begins_mark():
                break
            emit(_MARK)
        rest = search.take()
        emit("" if self._is_cut else rest)
        return ""

    def _begins_mark(self) -> bool:
        """Whether the rest of the output is the beginning of a mark that ends a message. It is dropped."""
        rest = self._source.take_rest()
        begins = any(mark.removeprefix(_MARK).startswith(rest) for mark in ENDS)
        self._source.put_back("" if begins else rest)
        return begins

    def _emit_content(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))

    def _emit_reasoning(self, text: str) -> None:
        if text:
            self._parts.append(Reasoning(text))

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ToolCallArguments(text))
