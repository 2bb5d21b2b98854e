"""Thoughts that a model marks with ``<think>`` and ``</think>`` before it answers, told apart from the answer."""

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

THINK_BEGIN, THINK_END = "<think>", "</think>"


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends inside of the model's thoughts, so that its output begins with them."""
    return prompt.rstrip(SPACE).endswith(THINK_BEGIN)


class ReasoningParser:
    """Splits one output that comes in pieces, however it is cut.

    Thoughts stand at the beginning of an output: behind the mark, or at once where the prompt has ``opened`` them. What
    follows their end is content as it is, so that an answer may speak of these marks. Space around thoughts belongs to
    the marks, as far as it is no longer than ``MAX_MARKER_SPACE`` characters where it is held back for that. Thoughts
    that never end are thoughts.
    """

    def __init__(self, *, opened: bool) -> None:
        self._source = StreamReader()
        self._pieces: list[OutputPart] = []
        self._thought = opened  # so that space before the next thought or the answer belongs to a mark
        self._thinks = opened  # what comes is a thought, also where the mark is not repeated
        self._space = TextBuffer()
        self._begin_mark = MarkerMatch(THINK_BEGIN)
        self._end_mark = MarkerSearch(THINK_END)
        self._gap = TrailingSpace()
        self._step = self._begin

    def push(self, text: str) -> list[OutputPart]:
        """What is certain now."""
        if self._step == self._answer:
            return [Content(text)] if text else []
        self._source.push(text)
        while self._source.more():
            self._step()
        return self._told()

    def finish(self) -> list[OutputPart]:
        """What was held back."""
        self._tell(self._space.take() + self._begin_mark.take() + self._gap.take() + self._end_mark.take())
        return self._told()

    def _begin(self) -> None:
        """Thoughts or the answer. Some models mark the first thought although the prompt did."""
        if not self._begin_mark.held:
            self._take_space()
        begun = None
        if len(self._space) > MAX_MARKER_SPACE:
            begun = False
        elif self._source.more():
            begun = self._begin_mark.read(self._source)
        if begun:
            self._space.take()
            self._thought = self._thinks = True
            self._step = self._settle
        elif begun is False:
            self._go_on()

    def _take_space(self) -> None:
        """Space before an answer without thoughts is a part of it."""
        space = self._source.take(self._source.space())
        if not self._thought:
            self._space.push(space)

    def _go_on(self) -> None:
        """No mark is here."""
        self._step = self._think if self._thinks else self._answer
        self._tell(self._space.take())

    def _settle(self) -> None:
        """Space between the mark and the thought."""
        self._source.go(self._source.space())
        if self._source.more():
            self._step = self._think

    def _think(self) -> None:
        thought, ended = self._end_mark.read(self._source)
        self._tell(self._gap.push(thought))
        if ended:
            self._gap.take()
            self._thinks, self._step = False, self._begin

    def _answer(self) -> None:
        self._tell(self._source.take(len(self._source.text)))

    def _tell(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text) if self._thinks else Content(text))

    def _told(self) -> list[OutputPart]:
        pieces, self._pieces = self._pieces, []
        return merge_adjacent(pieces) if len(pieces) > 1 else pieces
