"""From an answer's tokens to its parts, cut at the first stop string of its content. Stop strings do not count in
reasoning, nor in the marks and arguments of tool calls: those are not the answer that a client asked to be cut.

``AnswerParser`` splits text into parts, ``AnswerStream`` makes parts of tokens, and ``RawAnswerStream`` the text that
the model wrote, with all of its marks, cut at the same place.
"""

from collections.abc import Collection, Mapping, Sequence

from quire_proto.text.detokenizer import OutputTextStream, StopMatcher
from quire_proto.text.harmony import HarmonyParser
from quire_proto.text.reasoning import ReasoningParser
from quire_proto.text.stream_scanner import Content, OutputPart, StreamParser, merge_adjacent
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.text.tool_arguments import ParameterTypes
from quire_proto.text.tool_parser import new_tool_parser


class AnswerParser:
    """Splits the text of one answer into content, reasoning and tool calls, with the same result however it is cut."""

    __slots__ = ("_reasoning", "_tools")

    def __init__(self, reasoning: ReasoningParser | None, tools: StreamParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[OutputPart]:
        """Returns the parts that are certain now."""
        parts: list[OutputPart] = [Content(text)] if text else []
        if self._reasoning is not None:
            parts = self._reasoning.push(text)
        return self._split_calls(parts)

    def finish(self, *, cut: bool = False) -> list[OutputPart]:
        """Returns what was held back, at the end of the answer, without part of a mark if it was ``cut``."""
        parts = self._split_calls(self._reasoning.finish(cut=cut)) if self._reasoning is not None else []
        return parts if self._tools is None else [*parts, *self._tools.finish(cut=cut)]

    def _split_calls(self, parts: list[OutputPart]) -> list[OutputPart]:
        """Returns the same parts, with the tool calls split from the content."""
        if self._tools is None:
            return parts
        result: list[OutputPart] = []
        for part in parts:
            result += self._tools.push(part.text) if isinstance(part, Content) else [part]
        return result


def new_answer_parser(
    tokenizer: ModelTokenizer,
    prompt_token_ids: Sequence[int],
    *,
    splits_reasoning: bool,
    tools: Collection[str] = (),
    types: Mapping[str, ParameterTypes] = {},
    guided: bool = False,
) -> AnswerParser:
    """Returns the parser of an answer of this model to a prompt, which may call ``tools``. Without ``splits_reasoning``
    reasoning is content. The rest is as for ``new_tool_parser``.
    """
    marks = tokenizer.reasoning if splits_reasoning else None
    if marks is not None and marks.is_harmony:
        return AnswerParser(None, HarmonyParser(tools))
    reasoning = None
    if marks is not None:
        reasoning = ReasoningParser(marks, opened=tokenizer.starts_in_reasoning(prompt_token_ids))
    if not tools or tokenizer.tool_format is None:
        return AnswerParser(reasoning, None)
    return AnswerParser(reasoning, new_tool_parser(tokenizer.tool_format, tools, types, guided=guided))


def has_only_content(tokenizer: ModelTokenizer, tools: Collection[str], *, follows_grammar: bool) -> bool:
    """Whether all of a chat's answer is content: its model neither reasons nor can call ``tools``, or the answer
    ``follows_grammar`` of the client, before which there is no reasoning.
    """
    return follows_grammar or not (tokenizer.reasoning or (tools and tokenizer.tool_format))


class AnswerStream:
    """Takes an answer's tokens as they arrive and returns its parts. ``text`` is the stream of its text, which finds no
    stop strings itself, and ``matcher`` finds those of its content. A stop string lies within one piece of content.
    """

    __slots__ = ("_matcher", "_parser", "_text")

    def __init__(self, text: OutputTextStream, parser: AnswerParser, matcher: StopMatcher) -> None:
        self._text = text
        self._parser = parser
        self._matcher = matcher

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed. Then all parts have been returned."""
        return self._matcher.stopped

    @property
    def stop_string(self) -> str | None:
        """The stop string that was completed; None if none was."""
        return self._matcher.found

    @property
    def num_tokens(self) -> int:
        """As ``OutputTextStream.num_tokens``."""
        return self._text.num_tokens

    def push(self, token_ids: Sequence[int]) -> list[OutputPart]:
        """Returns the parts that are certain now. Empty after a stop."""
        parts: list[OutputPart] = []
        for token_id in token_ids:
            if self._matcher.stopped:
                break
            parts += self._cut(self._parser.push(self._text.push_token(token_id)))
        return merge_adjacent(parts)

    def finish(self, *, cut: bool = False) -> list[OutputPart]:
        """As ``AnswerParser.finish``. Not called after a stop."""
        parts = self._cut([*self._parser.push(self._text.finish()), *self._parser.finish(cut=cut)])
        rest = self._matcher.finish()
        return merge_adjacent([*parts, Content(rest)] if rest and not self._matcher.stopped else parts)

    def _cut(self, parts: Sequence[OutputPart]) -> list[OutputPart]:
        """Returns the parts up to the first stop string."""
        kept: list[OutputPart] = []
        for part in parts:
            if isinstance(part, Content):
                text = self._matcher.push(part.text, counts=self._text.stop_strings_count)
            else:
                text = self._matcher.finish()
            if text:
                kept.append(Content(text))
            if self._matcher.stopped:
                break
            if not isinstance(part, Content):
                kept.append(part)
        return kept


class RawAnswerStream:
    """Takes an answer's tokens as they arrive and returns its text as the model wrote it, up to the first stop string
    of its content. ``text`` is the stream of that text, ``answer`` that of the parts, of which ``matcher`` is the
    matcher. Where a stop string is possible, text is held back until that is decided.
    """

    __slots__ = ("_answer", "_held", "_include", "_matcher", "_text")

    def __init__(
        self, text: OutputTextStream, answer: AnswerStream, matcher: StopMatcher, *, include_stop: bool
    ) -> None:
        self._text = text
        self._answer = answer
        self._matcher = matcher
        self._include = include_stop
        self._held = ""

    @property
    def may_stop(self) -> bool:
        """As ``OutputTextStream.may_stop``."""
        return True

    @property
    def stopped(self) -> bool:
        """As ``OutputTextStream.stopped``."""
        return self._answer.stopped

    @property
    def stop_string(self) -> str | None:
        """As ``OutputTextStream.stop_string``."""
        return self._answer.stop_string

    @property
    def num_tokens(self) -> int:
        """As ``OutputTextStream.num_tokens``."""
        return self._answer.num_tokens

    def push(self, token_ids: Sequence[int]) -> str:
        """As ``OutputTextStream.push``."""
        return "".join(map(self.push_token, token_ids))

    def finish(self) -> str:
        """As ``OutputTextStream.finish``."""
        self._held += self._text.finish()
        self._answer.finish()
        return self._cut() if self.stopped else self._release(0)

    def push_token(self, token_id: int) -> str:
        """As ``push`` of one token."""
        if self.stopped:
            return ""
        new = self._text.push_token(token_id)
        self._held += new
        has_parts = bool(self._answer.push([token_id]))
        if self._matcher.found is not None:
            return self._cut()
        # What came before this token is decided once parts come with it, but may begin a stop string.
        return self._release(len(new) + self._matcher.longest - 1) if has_parts else ""

    def _release(self, kept: int) -> str:
        """Returns what is held back but for the last ``kept`` characters."""
        at = max(0, len(self._held) - kept)
        text, self._held = self._held[:at], self._held[at:]
        return text

    def _cut(self) -> str:
        """Returns what is held back up to the stop string, which is the last of its kind there with that behind it."""
        found = self._matcher.found or ""
        at = self._held.rfind(found + self._matcher.behind)
        if at < 0:  # it has a mark in it that has no text here
            return self._release(0)
        return self._held[: at + (len(found) if self._include else 0)]
