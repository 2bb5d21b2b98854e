"""What a chat's choices say: text split into content, thoughts and calls of tools. Knows neither REST nor gRPC."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from quire_proto.sampling import FinishReason
from quire_proto.text.reasoning import ReasoningParser
from quire_proto.text.stream_scanner import Content, OutputPart, Reasoning, ToolCallArguments, ToolCallStart
from quire_proto.text.tool_formats import new_tool_parser
from quire_proto.text.tool_parser import ToolParser

from quire_router.api.prepared_request import PreparedRequest, ReasoningPlacement
from quire_router.core.generation import Delta

TOOL_CALLS = "tool_calls"
"""Why a choice ended that called tools and then stopped by itself, in the words of the OpenAI API."""

_ID_BYTES = 12


@dataclass(slots=True)
class ToolCallDelta:
    """A part of one call. ``index`` counts the calls of a choice from 0; ``id`` and ``name`` come with the first part,
    and the ``arguments`` of all parts together are JSON.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ParsedDelta:
    """What one piece of a choice adds to it; nothing where its text is held back. ``finish_reason`` ends the choice."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.content or self.reasoning or self.calls or self.finish_reason)


class OutputParser:
    """Reads one choice. What it has said after some text depends on that text alone and not on the pieces in which it
    came: so whoever takes an answer up again, with the same pieces or with others, goes on where it was.
    """

    def __init__(
        self,
        call_prefix: str,
        thinking: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        hides_thoughts: bool = False,
    ) -> None:
        self._call_prefix = call_prefix
        self._thinking = thinking
        self._tools = tools
        self._hides_thoughts = hides_thoughts
        self._calls = 0

    def parse(self, delta: Delta) -> ParsedDelta:
        """What the next piece says. To be called with every piece in order, also with those that are told already."""
        if delta.finish_reason is None:
            return self._to_delta(self._push(delta.text))
        pieces = [*self._push(delta.text), *self._finish()]
        said = self._to_delta(pieces, delta.finish_reason)
        if self._calls and delta.finish_reason is FinishReason.STOP:
            return ParsedDelta(said.content, said.reasoning, said.calls, TOOL_CALLS)
        return said

    def _push(self, text: str) -> list[OutputPart]:
        pieces: list[OutputPart] = [Content(text)] if text else []
        if self._thinking is not None:
            pieces = self._thinking.push(text)
        return self._call(pieces)

    def _finish(self) -> list[OutputPart]:
        pieces = self._call(self._thinking.finish()) if self._thinking is not None else []
        return pieces if self._tools is None else [*pieces, *self._tools.finish()]

    def _call(self, pieces: list[OutputPart]) -> list[OutputPart]:
        """The same, with the calls found in the content."""
        if self._tools is None:
            return pieces
        result: list[OutputPart] = []
        for piece in pieces:
            result += self._tools.push(piece.text) if isinstance(piece, Content) else [piece]
        return result

    def _to_delta(self, pieces: Iterable[OutputPart], reason: FinishReason | None = None) -> ParsedDelta:
        content, reasoning, calls = "", "", list[ToolCallDelta]()
        for piece in pieces:
            if isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, ToolCallStart):
                calls.append(ToolCallDelta(self._calls, self._call_id(), piece.name, ""))
                self._calls += 1
            elif isinstance(piece, ToolCallArguments):
                calls.append(self._with_arguments(calls, piece.text))
            elif isinstance(piece, Reasoning) and not self._hides_thoughts:
                reasoning += piece.text
        return ParsedDelta(content, reasoning, tuple(calls), reason)

    def _with_arguments(self, calls: list[ToolCallDelta], arguments: str) -> ToolCallDelta:
        """The next part of the last call, in one with its beginning where that is among ``calls``."""
        if not calls:
            return ToolCallDelta(self._calls - 1, "", "", arguments)
        begun = calls.pop()
        return ToolCallDelta(begun.index, begun.id, begun.name, begun.arguments + arguments)

    def _call_id(self) -> str:
        """The same at every router."""
        name = f"{self._call_prefix}/{self._calls}".encode()
        return "call_" + blake2b(name, digest_size=_ID_BYTES, person=b"quire call").hexdigest()


def create_parsers(admitted: PreparedRequest) -> list[OutputParser]:
    """A parser for each choice of a request that ``is_parsed``."""
    first, shape, text = admitted.first, admitted.response_options, admitted.text
    tool_format = text.tool_format if shape.tools else None
    exact = admitted.first.params.structured is not None  # with tools the grammar is always of calls
    thinks = admitted.has_reasoning
    opened = thinks and text.starts_in_reasoning(first.prompt_token_ids)
    return [
        OutputParser(
            f"{first.request_id}/{index}",
            ReasoningParser(opened=opened) if thinks else None,
            new_tool_parser(tool_format, shape.tools, exact=exact) if tool_format is not None else None,
            hides_thoughts=shape.thoughts is ReasoningPlacement.HIDDEN,
        )
        for index in range(admitted.num_choices)
    ]
