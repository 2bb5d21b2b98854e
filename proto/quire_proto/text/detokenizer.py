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


# Stop strings: finds the first one in text that arrives in pieces.


class StopMatcher:
    """Watches one output for ``stops`` (none of them empty).

    The output ends at the first character that completes a stop string, so that the result does not depend on how the
    text is cut into pieces; of several that end there, the longest counts. With ``include`` that stop string is part
    of the text, and nothing is held back; otherwise what may still become a stop string is: at most
    ``max(len(stop)) - 1`` characters.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed, which ``found`` is then."""
        return self.found is not None

    def push(self, text: str) -> str:
        """The text that is certain to be the output's; after a match, what was left of it."""
        if self.stopped or not self._searches:
            return "" if self.stopped else text
        held = len(self._held)
        text = self._held + text
        for index in range(held, len(text)):
            self.found = self._advance(text[index])
            if self.found is not None:
                self._held = ""
                return text[: index + 1 - self._withheld(len(self.found))]
        keep = len(text) - self._withheld(max(search.matched for search in self._searches))
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back: it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _withheld(self, matched: int) -> int:
        """How much of the text's end is not given out when it ends with so much of a stop string."""
        return 0 if self._include else matched

    def _advance(self, character: str) -> str | None:
        """The longest stop string that ``character`` completes."""
        completed = [search.stop for search in self._searches if search.advance(character)]
        return max(completed, key=len, default=None)


class _Search:
    """Knuth, Morris and Pratt's search for one string: ``matched`` is how much of it the text so far ends with."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._borders = _borders(stop)
        self.matched = 0

    def advance(self, character: str) -> bool:
        """Whether ``character`` completes the string."""
        matched, stop = self.matched, self.stop
        while matched and stop[matched] != character:
            matched = self._borders[matched - 1]
        if stop[matched] == character:
            matched += 1
        self.matched = matched
        return matched == len(stop)


def _borders(stop: str) -> list[int]:
    """For each beginning of ``stop``, the length of the longest shorter beginning that it ends with."""
    borders, matched = [0], 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        if stop[matched] == character:
            matched += 1
        borders.append(matched)
    return borders


# The text of one output as far as it is certain: detokenised, and cut at the first stop string.


class OutputTextStream:
    """Takes an output's tokens as they come and gives its text.

    ``decode`` is the tokenizer's, ``alone`` what it makes of single tokens (see ``Detokenizer``), ``visible`` tells
    which token ids have text at all, ``prompt`` is what the output continues, and ``matcher`` finds where it stops.
    """

    __slots__ = ("_detokenizer", "_matcher", "_pushed", "_visible")

    def __init__(
        self,
        decode: Decode,
        alone: StandaloneText,
        visible: Callable[[int], bool],
        prompt: Sequence[int],
        matcher: StopMatcher | None,
    ) -> None:
        self._visible = visible
        self._detokenizer = Detokenizer(decode, _last_visible(prompt, visible), alone)
        self._matcher = matcher
        self._pushed = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed. All of the output's text has been returned."""
        return self._matcher is not None and self._matcher.stopped

    @property
    def stop_string(self) -> str | None:
        """The stop string that was completed."""
        return None if self._matcher is None else self._matcher.found

    @property
    def stop_token_count(self) -> int:
        """How many tokens belong to the output: after a stop, those up to the one that completed the stop string."""
        return self._pushed

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now: never a part of a character, nor of what may become a stop string. Empty
        after a stop.
        """
        if len(token_ids) == 1:
            return self._push(token_ids[0])
        return "".join(map(self._push, token_ids))

    def finish(self) -> str:
        """What was held back. Not called after a stop."""
        rest = self._detokenizer.finish()
        return rest if self._matcher is None else self._matcher.push(rest) + self._matcher.finish()

    def _push(self, token_id: int) -> str:
        matcher = self._matcher
        if matcher is not None and matcher.stopped:
            return ""
        self._pushed += 1
        text = self._detokenizer.push(token_id) if self._visible(token_id) else ""
        return text if matcher is None else matcher.push(text)


_READ_BACK = 64  # prompt tokens that are looked at for those with text


def _last_visible(prompt: Sequence[int], visible: Callable[[int], bool]) -> list[int]:
    return [token_id for token_id in prompt[-_READ_BACK:] if visible(token_id)]
