"""``OutputParser``: splits the text of a chat's choice into content, reasoning and tool calls, for REST and gRPC.
``parts`` returns the parts in their order, and ``parse`` what a chunk of the OpenAI API holds of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from quire_proto.sampling import FinishReason
from quire_proto.text.answer_stream import AnswerParser, new_answer_parser
from quire_proto.text.stream_scanner import (
    BracketScanner,
    Content,
    OutputPart,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)

from quire_router.api.prepared_request import PreparedRequest
from quire_router.core.generation import Delta
from quire_router.core.response_options import ReasoningPlacement

TOOL_CALLS = "tool_calls"
"""The OpenAI API's finish reason of a choice that called tools and then stopped by itself."""

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
    """What one delta adds to its choice; nothing while its text is withheld. ``finish_reason`` ends the choice."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        """Whether there is anything to send."""
        return bool(self.content or self.reasoning or self.calls or self.finish_reason)


class OutputParser:
    """Parses one choice. What it has returned after some text depends on that text alone and not on how it was chunked:
    so a response can be resumed with other chunks than before.
    """

    def __init__(self, choice: str, answer: AnswerParser, *, hide_reasoning: bool = False) -> None:
        self._choice = choice
        self._answer = answer
        self._hide_reasoning = hide_reasoning
        self._calls = 0
        self._open_call: BracketScanner | None = None
        self.kinds: set[type[OutputPart]] = set()
        """The kinds of the parts so far, with reasoning that is hidden."""

    @property
    def is_in_call(self) -> bool:
        """Whether the arguments of the last call are not complete."""
        return self._open_call is not None

    def parse(self, delta: Delta) -> ParsedDelta:
        """Parses the next delta. To be called with every delta in order, also with those that are replayed."""
        parsed = self._to_delta(self.parts(delta), delta.finish_reason)
        if self._calls and self.ends_with_calls(delta):
            return ParsedDelta(parsed.content, parsed.reasoning, parsed.calls, TOOL_CALLS)
        return parsed

    def ends_with_calls(self, delta: Delta) -> bool:
        """Whether ``delta``, which was parsed last, ends an answer whose calls, if it has any, can all be made: a stop
        string or a stop token may have cut it.
        """
        return delta.finish_reason is FinishReason.STOP and delta.stop_string is None and not self.is_in_call

    def parts(self, delta: Delta) -> list[OutputPart]:
        """As ``parse``, but returns the parts in their order, without reasoning that is hidden."""
        parts = delta.parts
        if parts is None:
            parts = self._answer.push(delta.text)
            if delta.finish_reason is not None:
                parts = [*parts, *self._answer.finish(cut=delta.finish_reason is not FinishReason.STOP)]
        if delta.stop_string is not None:
            self.kinds.add(Content)  # there is some, if only the stop string that was cut off
        for part in parts:
            self.kinds.add(type(part))
            self._follow_call(part)
        return [part for part in parts if not isinstance(part, Reasoning)] if self._hide_reasoning else parts

    def _follow_call(self, part: OutputPart) -> None:
        if isinstance(part, ToolCallStart):
            self._open_call = BracketScanner()
        elif isinstance(part, ToolCallArguments) and self._open_call is not None:
            ended = self._open_call.find(part.text, 0, len(part.text)) is not None
            self._open_call = None if ended else self._open_call

    def _to_delta(self, parts: Iterable[OutputPart], reason: FinishReason | None = None) -> ParsedDelta:
        content, reasoning, calls = "", "", list[ToolCallDelta]()
        for part in parts:
            if isinstance(part, Content):
                content += part.text
            elif isinstance(part, ToolCallStart):
                calls.append(ToolCallDelta(self._calls, self._call_id(), part.name, ""))
                self._calls += 1
            elif isinstance(part, ToolCallArguments):
                calls.append(self._with_arguments(calls, part.text))
            elif isinstance(part, Reasoning):
                reasoning += part.text
        return ParsedDelta(content, reasoning, tuple(calls), reason)

    def _with_arguments(self, calls: list[ToolCallDelta], arguments: str) -> ToolCallDelta:
        """Returns the next part of the last call, merged with its beginning where that is among ``calls``."""
        if not calls:
            return ToolCallDelta(self._calls - 1, "", "", arguments)
        started = calls.pop()
        return ToolCallDelta(started.index, started.id, started.name, started.arguments + arguments)

    def _call_id(self) -> str:
        """Returns the id of the next call."""
        return "call_" + call_digest(self._choice, self._calls)


def choice_name(request_id: str, index: int) -> str:
    """Returns the name of one choice of an answer, among those of all answers."""
    return f"{request_id}/{index}"


def call_digest(choice: str, number: int) -> str:
    """Returns what tells a call of a choice from all others, the same at every router; ``number`` counts from 0."""
    return blake2b(f"{choice}/{number}".encode(), digest_size=_ID_BYTES, person=b"quire call").hexdigest()


def create_parsers(prepared: PreparedRequest) -> list[OutputParser]:
    """Returns a parser for each choice of a request that ``is_parsed``."""
    options, request_id = prepared.response_options, prepared.first.request_id
    return [
        OutputParser(
            choice_name(request_id, index),
            _new_parser(prepared),
            hide_reasoning=options.reasoning is ReasoningPlacement.HIDDEN,
        )
        for index in range(prepared.num_choices)
    ]


def _new_parser(prepared: PreparedRequest) -> AnswerParser:
    first, options = prepared.first, prepared.response_options
    return new_answer_parser(
        prepared.tokenizer,
        first.prompt_token_ids,
        splits_reasoning=prepared.has_reasoning,
        tools=options.tools,
        types=options.tool_types,
        guided=first.params.structured is not None,  # with tools the grammar is always of calls
    )


def _count_reasoning(prepared: PreparedRequest, parser: OutputParser, token_ids: Sequence[int]) -> int:
    """Returns how many tokens of an answer that ``parser`` has read are reasoning, with its marks: those up to its end,
    wherever that was split. A choice that reasons has one piece of it, at its beginning.
    """
    if Reasoning not in parser.kinds:
        return 0
    marks = prepared.tokenizer.reasoning
    end = None if marks is None else prepared.tokenizer.marker_tokens.get(marks.end)
    if end in token_ids:
        return token_ids.index(end) + 1
    return len(token_ids) if parser.kinds == {Reasoning} else _count_before_others(prepared, token_ids)


class ReasoningCounter:
    """Counts the tokens of an answer that are reasoning, those of all choices, which ``parsers`` read. Keeps nothing of
    an answer that cannot reason.
    """

    def __init__(self, prepared: PreparedRequest, parsers: Sequence[OutputParser] | None) -> None:
        self._prepared = prepared
        self._parsers = parsers if parsers is not None and prepared.has_reasoning else ()
        self._token_ids: list[list[int]] = [[] for _ in self._parsers]

    def add(self, delta: Delta) -> None:
        """Adds a delta, to be called with each."""
        if self._token_ids:
            self._token_ids[delta.index] += delta.token_ids

    @property
    def total(self) -> int:
        """The tokens so far."""
        choices = zip(self._parsers, self._token_ids, strict=True)
        return sum(_count_reasoning(self._prepared, parser, token_ids) for parser, token_ids in choices)


def _count_before_others(prepared: PreparedRequest, token_ids: Sequence[int]) -> int:
    """Counts the tokens before those that write something else, for models that write the end with several tokens."""
    parser, first = OutputParser("", _new_parser(prepared)), prepared.first
    text = prepared.tokenizer.new_output_stream(
        first.prompt_token_ids, (), skip_special_tokens=first.skip_special_tokens, keep_markers=True
    )
    for count, token_id in enumerate(token_ids):
        if any(not isinstance(part, Reasoning) for part in parser.parts(Delta(text.push_token(token_id), [token_id]))):
            return count
    return len(token_ids)
