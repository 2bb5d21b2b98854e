"""Tokens to text, piece by piece.

The method keeps a short window of tokens whose text is already out, decodes it together with the new ones, and hands
out the difference: decoders of the sentencepiece kind treat a first token's space differently, and a character may lie
across tokens.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
StandaloneText = Callable[[int], str | None]
"""The text that a token has behind whole characters, whatever they are; None where that depends on its neighbours."""

REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes of UTF-8, and so the most tokens that one character can take
_CONTEXT = 8  # prompt tokens that may be needed to read on: one with text, and all of an unfinished character


class Detokenizer:
    """The text of one output that continues ``prompt``.

    ``decode`` turns tokens into text as the tokenizer does, special tokens already removed from both by the caller.
    All pieces together are ``decode(prompt + output)`` without ``decode(prompt)``; where the prompt ends inside a
    character, the output begins with that character. ``alone`` only saves decoding: it says the same where it says
    anything.
    """

    __slots__ = ("_alone", "_decode", "_prefix", "_settled", "_window")

    def __init__(self, decode: Decode, prompt: Sequence[int], alone: StandaloneText = lambda _: None) -> None:
        self._decode = decode
        self._alone = alone
        self._window = _context(decode, prompt)
        self._settled = len(self._window)
        self._prefix = decode(self._window) if self._window else ""

    def push(self, token_id: int) -> str:
        """The text that this token makes certain: never a part of a character."""
        if len(self._window) == self._settled and (text := self._alone(token_id)) is not None:
            self._window, self._settled, self._prefix = [token_id], 1, text
            return text
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._settle(text)
        if len(self._window) - self._settled < _LONGEST_CHARACTER:
            return ""
        return self._settle_most(text)

    def finish(self) -> str:
        """What was held back, with replacement characters for what never became whole."""
        return self._new_text(self._decode(self._window)) if len(self._window) > self._settled else ""

    def _settle(self, text: str) -> str:
        delta = self._new_text(text)
        del self._window[: self._settled]
        self._settled = len(self._window)
        self._prefix = self._decode(self._window)
        return delta

    def _settle_most(self, text: str) -> str:
        """Hands out all but an unfinished last character of ``text``, which ends with a replacement character.

        A cut is between characters exactly when both sides decode to what they decode to together. There is none where
        a token ends one character and begins the next: then the whole characters go out, and all tokens stay.
        """
        for cut in range(len(self._window) - 1, len(self._window) - _LONGEST_CHARACTER, -1):
            head = self._decode(self._window[:cut])
            if head + self._decode(self._window[cut:]) == text:
                delta = self._new_text(head)
                del self._window[:cut]
                self._settled, self._prefix = 0, ""
                return delta
        whole = text.rstrip(REPLACEMENT)
        if whole.startswith(self._prefix) and len(self._window) - self._settled < 2 * _LONGEST_CHARACTER:
            delta, self._prefix = whole[len(self._prefix) :], whole
            return delta
        return self._settle(text)

    def _new_text(self, text: str) -> str:
        """What ``text``, the window's, adds to the part of it that is out."""
        if text.startswith(self._prefix):
            return text[len(self._prefix) :]
        whole = self._prefix.rstrip(REPLACEMENT)  # the prompt's last character has just become whole
        if whole != self._prefix and text.startswith(whole):
            return text[len(whole) :]
        return self._decode(self._window[self._settled :])  # invalid bytes took valid ones with them


def _context(decode: Decode, prompt: Sequence[int]) -> list[int]:
    """The fewest last tokens of ``prompt`` that read as text of their own."""
    longest = min(len(prompt), _CONTEXT)
    for length in range(1, longest + 1):
        context = list(prompt[-length:])
        text = decode(context)
        if text and not text.startswith(REPLACEMENT):
            return context
    return list(prompt[len(prompt) - longest :])
