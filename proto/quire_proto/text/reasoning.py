"""Splits a model's reasoning, between marks such as ``<think>`` and ``</think>``, from the answer that follows it.
``REASONING_FORMATS`` are the marks that are known.
"""

from dataclasses import dataclass

from quire_proto.text.harmony import ANALYSIS, CHANNEL, MESSAGE, START
from quire_proto.text.stream_scanner import (
    MAX_MARKER_SPACE,
    SPACE,
    Content,
    MarkerMatch,
    MarkerSearch,
    OutputPart,
    Reasoning,
    StreamReader,
    TextBuffer,
    TrailingSpace,
    merge_adjacent,
)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning. ``after`` stands between it and the answer."""

    begin: str
    end: str
    after: str = ""

    @property
    def is_harmony(self) -> bool:
        """Whether ``HarmonyParser`` reads it, with all else."""
        return self.begin == ANALYSIS

    def is_opened(self, prompt: str) -> bool:
        """Whether a prompt ends in open reasoning, so that the output begins with more of it."""
        return prompt.rstrip(SPACE).endswith(self.begin)

    def is_closed(self, prompt: str) -> bool:
        """Whether a prompt ends in reasoning that is over, so that the output is the answer."""
        return prompt.rstrip(SPACE).endswith(self.end)


THINK = ReasoningFormat("<think>", "</think>")
REASONING_FORMATS = (
    ReasoningFormat(ANALYSIS, "<|end|>", f"{START}assistant"),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("<mm:think>", "</mm:think>"),
    ReasoningFormat("<think:opensource>", "</think:opensource>"),
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningFormat("<|channel>thought", "<channel|>"),
    ReasoningFormat("◁think▷", "◁/think▷"),
    THINK,
)
"""Every known kind of reasoning, the most specific marks first."""


def detect_reasoning(template: str, written: str = "") -> ReasoningFormat | None:
    """How a model marks reasoning, by its chat template and by what that has ``written`` of a conversation. Returns
    None if it does not.
    """
    text = template + "\n" + written
    if CHANNEL in text and MESSAGE in text and "analysis" in text:
        return REASONING_FORMATS[0]
    return next((each for each in REASONING_FORMATS[1:] if each.end in text), None)


class ReasoningParser:
    """Splits one output, with the same result however it is cut into pieces.

    Reasoning stands at the beginning of an output: after ``<think>``, or whatever ``marks`` say, or at once if the
    prompt has ``opened`` it. Everything after ``</think>`` is content unchanged, so that an answer may mention these
    markers. Space around reasoning belongs to the markers; at most ``MAX_MARKER_SPACE`` characters of it are held back.
    Reasoning that never ends is reasoning.
    """

    def __init__(self, marks: ReasoningFormat = THINK, *, opened: bool) -> None:
        self._source = StreamReader()
        self._parts: list[OutputPart] = []
        self._had_reasoning = opened  # then space before more reasoning or the answer belongs to a marker
        self._in_reasoning = opened  # the next text is reasoning, also if the marker is not repeated
        self._space = TextBuffer()
        self._begin_marker = MarkerMatch(marks.begin)
        self._end_marker = MarkerSearch(marks.end)
        self._gap = TrailingSpace()
        self._state = self._read_start

    def push(self, text: str) -> list[OutputPart]:
        """Returns the parts that are certain now."""
        if self._state == self._read_content:
            return [Content(text)] if text else []
        self._source.push(text)
        while self._source.has_more():
            self._state()
        return self._drain()

    def finish(self, *, cut: bool = False) -> list[OutputPart]:
        """Returns what was held back, at the end of the output. The beginning of a mark at the end of an output that
        was ``cut`` is dropped.
        """
        space, begun, gap, ended = (
            each.take() for each in (self._space, self._begin_marker, self._gap, self._end_marker)
        )
        if not cut or not (begun or ended):
            self._emit(space + begun + gap + ended)
        return self._drain()

    def _read_start(self) -> None:
        """Reasoning or the answer. Some models write ``<think>`` although the prompt ends with it."""
        if not self._begin_marker.pending:
            self._take_space()
        found = None
        if len(self._space) > MAX_MARKER_SPACE:
            found = False
        elif self._source.has_more():
            found = self._begin_marker.read(self._source)
        if found:
            self._space.take()
            self._had_reasoning = self._in_reasoning = True
            self._state = self._skip_space
        elif found is False:
            self._no_marker()

    def _take_space(self) -> None:
        """Space before an answer without reasoning is a part of the answer."""
        space = self._source.take(self._source.space_end())
        if not self._had_reasoning:
            self._space.push(space)

    def _no_marker(self) -> None:
        """The text does not begin with ``<think>``."""
        self._state = self._read_reasoning if self._in_reasoning else self._read_content
        self._emit(self._space.take())

    def _skip_space(self) -> None:
        """Skips the space between the marker and the reasoning."""
        self._source.advance(self._source.space_end())
        if self._source.has_more():
            self._state = self._read_reasoning

    def _read_reasoning(self) -> None:
        text, ended = self._end_marker.read(self._source)
        self._emit(self._gap.push(text))
        if ended:
            self._gap.take()
            self._in_reasoning, self._state = False, self._read_start

    def _read_content(self) -> None:
        self._emit(self._source.take(len(self._source.text)))

    def _emit(self, text: str) -> None:
        if text:
            self._parts.append(Reasoning(text) if self._in_reasoning else Content(text))

    def _drain(self) -> list[OutputPart]:
        parts, self._parts = self._parts, []
        return merge_adjacent(parts) if len(parts) > 1 else parts
