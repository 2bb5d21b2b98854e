"""Thoughts that a model marks with ``<think>`` and ``</think>`` before it answers, told apart from the answer. Knows no
tokens.
"""

from quire_proto.text.pieces import SPACE, Content, Piece, Reasoning, held_back

BEGIN, END = "<think>", "</think>"


def is_opened(prompt: str) -> bool:
    """Whether a prompt ends inside of the model's thoughts, so that its output begins with them."""
    return prompt.rstrip(SPACE).endswith(BEGIN)


class ReasoningParser:
    """Splits one output that comes in pieces, however it is cut.

    Thoughts stand at the beginning of an output: behind the mark, or at once where the prompt has ``opened`` them. What
    follows their end is content as it is, so that an answer may speak of these marks. Space around thoughts belongs to
    the marks. Thoughts that never end are thoughts.
    """

    def __init__(self, *, opened: bool) -> None:
        self._text = ""
        self._thought = opened
        self._step = self._enter if opened else self._begin

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""
        if self._step == self._answer:
            return [Content(text)] if text else []
        self._text += text
        return self._run(ended=False)

    def finish(self) -> list[Piece]:
        """What was held back."""
        return self._run(ended=True)

    def _run(self, *, ended: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._step(pieces, ended):
            pass
        return pieces

    def _enter(self, pieces: list[Piece], ended: bool) -> bool:
        """The first thought, which some models mark although the prompt did."""
        del pieces
        text = self._text.lstrip(SPACE)
        if BEGIN.startswith(text) and text != BEGIN and not ended:
            return False
        self._text, self._step = text.removeprefix(BEGIN), self._settle
        return True

    def _settle(self, pieces: list[Piece], ended: bool) -> bool:
        """Space between the mark and the first thought."""
        del pieces, ended
        self._text = self._text.lstrip(SPACE)
        if not self._text:
            return False
        self._step = self._think
        return True

    def _begin(self, pieces: list[Piece], ended: bool) -> bool:
        """Either thoughts or the answer."""
        del pieces
        text = self._text.lstrip(SPACE)
        if text.startswith(BEGIN):
            self._text, self._thought, self._step = text[len(BEGIN) :], True, self._settle
            return True
        if BEGIN.startswith(text) and not ended:
            return False
        self._text, self._step = text if self._thought else self._text, self._answer
        return True

    def _think(self, pieces: list[Piece], ended: bool) -> bool:
        thought, end, rest = self._text.partition(END)
        if end:
            self._text, self._step = rest, self._begin
            thought = thought.rstrip(SPACE)
        else:
            cut = len(thought) if ended else len(thought) - held_back(thought, END)
            thought, self._text = thought[:cut], thought[cut:]
        if thought:
            pieces.append(Reasoning(thought))
        return bool(end)

    def _answer(self, pieces: list[Piece], ended: bool) -> bool:
        del ended
        if self._text:
            pieces.append(Content(self._text))
            self._text = ""
        return False
