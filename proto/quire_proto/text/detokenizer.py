"""From an output's tokens to its text, while they arrive: detokenised, and cut at the first stop string.

``Detokenizer`` keeps a short window of tokens whose text was returned already. It decodes them together with new ones
and returns the difference, because sentencepiece's decoders treat a first token's space differently, and a character
may lie across tokens. ``StopMatcher`` finds the first stop string.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
StandaloneText = Callable[[int], str | None]
"""The text of a token after whole characters; None if it depends on its neighbours."""


REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes of UTF-8, and so the most tokens that one character can take
_CONTEXT = 8  # prompt tokens that decoding may need: one with text, and all of an unfinished character
_READ_BACK = 64  # prompt tokens that are searched for those with text


class OutputTextStream:
    """Takes an output's tokens as they arrive and returns its text.

    ``decode`` is the tokenizer's, ``standalone`` the text of single tokens (see ``Detokenizer``), ``visible`` says
    which token ids have text, ``prompt`` is what the output continues, and ``matcher`` finds its stop string, if it has
    any. A stop string that the text of the first ``min_tokens`` tokens completes does not count, as in vLLM.
    """

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_pushed", "_visible")

    def __init__(
        self,
        decode: Decode,
        standalone: StandaloneText,
        visible: Callable[[int], bool],
        prompt: Sequence[int],
        matcher: "StopMatcher | None",
        *,
        min_tokens: int = 0,
    ) -> None:
        self._min_tokens = min_tokens
        self._visible = visible
        self._detokenizer = Detokenizer(decode, _last_visible(prompt, visible), standalone)
        self._matcher = matcher
        self._pushed = 0

    @property
    def may_stop(self) -> bool:
        """Whether there are stop strings."""
        return self._matcher is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed. Then all of the output's text has been returned."""
        return self._matcher is not None and self._matcher.stopped

    @property
    def stop_string(self) -> str | None:
        """The stop string that was completed; None if none was."""
        return None if self._matcher is None else self._matcher.found

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the output: after a stop, up to the one that completed the stop string."""
        return self._pushed

    @property
    def stop_strings_count(self) -> bool:
        """Whether a stop string that the last token completes ends the output."""
        return self._pushed > self._min_tokens

    @property
    def is_whole(self) -> bool:
        """Whether no token waits for the rest of its character."""
        return self._detokenizer.is_whole

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that is certain now: no part of a character, nor of a possible stop string. Empty after a
        stop.
        """
        if len(token_ids) == 1:
            return self.push_token(token_ids[0])
        if self._matcher is not None:
            return "".join(map(self.push_token, token_ids))
        self._pushed += len(token_ids)
        return self._detokenizer.push_all([token_id for token_id in token_ids if self._visible(token_id)])

    def finish(self) -> str:
        """Returns what was held back, at the end of the output. Not called after a stop."""
        rest = self._detokenizer.finish()
        if self._matcher is None:
            return rest
        return self._matcher.push(rest, counts=self.stop_strings_count) + self._matcher.finish()

    def push_token(self, token_id: int) -> str:
        """As ``push`` of one token."""
        matcher = self._matcher
        if matcher is not None and matcher.stopped:
            return ""
        self._pushed += 1
        text = self._detokenizer.push(token_id) if self._visible(token_id) else ""
        return text if matcher is None else matcher.push(text, counts=self.stop_strings_count)


def _last_visible(prompt: Sequence[int], visible: Callable[[int], bool]) -> list[int]:
    return [token_id for token_id in prompt[-_READ_BACK:] if visible(token_id)]


class Detokenizer:
    """The text of one output that continues ``prompt``.

    ``decode`` turns tokens into text as the tokenizer does; the caller has removed special tokens from prompt and
    output. All returned pieces together are ``decode(prompt + output)`` without ``decode(prompt)``; if the prompt ends
    inside a character, the output begins with that character. ``standalone`` only saves decoding: where it is not None,
    it equals the decoded text.
    """

    __slots__ = ("_decode", "_prefix", "_settled", "_standalone", "_window")

    def __init__(self, decode: Decode, prompt: Sequence[int], standalone: StandaloneText = lambda _: None) -> None:
        self._decode = decode
        self._standalone = standalone
        self._window = _context(decode, prompt)
        self._settled = len(self._window)
        self._prefix = decode(self._window) if self._window else ""

    @property
    def is_whole(self) -> bool:
        """Whether all text of the tokens was returned."""
        return len(self._window) == self._settled

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes: no part of a character."""
        if len(self._window) == self._settled and (text := self._standalone(token_id)) is not None:
            self._window, self._settled, self._prefix = [token_id], 1, text
            return text
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._settle(text)
        if len(self._window) - self._settled < _LONGEST_CHARACTER:
            return ""
        return self._settle_most(text)

    def push_all(self, token_ids: Sequence[int]) -> str:
        """As ``push`` of each token, with the decoder called once where no character is left open."""
        if not token_ids:
            return ""
        text = self._decode([*self._window, *token_ids])
        if text.endswith(REPLACEMENT):
            return "".join(map(self.push, token_ids))
        self._window.extend(token_ids)
        delta = self._new_text(text)
        self._window = _context(self._decode, self._window)
        self._settled, self._prefix = len(self._window), self._decode(self._window)
        return delta

    def finish(self) -> str:
        """Returns what was held back, with replacement characters for incomplete ones."""
        return self._new_text(self._decode(self._window)) if len(self._window) > self._settled else ""

    def _settle(self, text: str) -> str:
        delta = self._new_text(text)
        del self._window[: self._settled]
        self._settled = len(self._window)
        self._prefix = self._decode(self._window)
        return delta

    def _settle_most(self, text: str) -> str:
        """Returns all but an unfinished last character of ``text``, which ends with a replacement character.

        A cut is between characters exactly when both sides decode to what they decode to together. There is none if a
        token ends one character and begins the next: then the whole characters are returned, and all tokens stay in
        the window.
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
        """What ``text``, the window's, adds to the part of it that was returned."""
        if text.startswith(self._prefix):
            return text[len(self._prefix) :]
        whole = self._prefix.rstrip(REPLACEMENT)  # the prompt's last character has just been completed
        if whole != self._prefix and text.startswith(whole):
            return text[len(whole) :]
        return self._decode(self._window[self._settled :])  # invalid bytes made valid ones before them invalid


def _context(decode: Decode, prompt: Sequence[int]) -> list[int]:
    """The fewest last tokens of ``prompt`` that decode to text beginning with a whole character."""
    longest = min(len(prompt), _CONTEXT)
    for length in range(1, longest + 1):
        context = list(prompt[-length:])
        text = decode(context)
        if text and not text.startswith(REPLACEMENT):
            return context
    return list(prompt[len(prompt) - longest :])


class StopMatcher:
    """Searches one output for ``stops`` (none of them empty).

    The output ends at the first character that completes a stop string, so that the result does not depend on how the
    text is cut into pieces; of several that end there, the longest counts. With ``include`` that stop string is part
    of the text, and nothing is held back; otherwise a possible beginning of one is: at most ``max(len(stop)) - 1``
    characters.

    ``found`` is the stop string that was completed, and ``behind`` the text after it that was pushed with its end. The
    ``longest`` has so many characters.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._include = include
        self._pending = ""
        self.found: str | None = None
        self.behind = ""
        self.longest = max(map(len, stops), default=0)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed, which is then ``found``."""
        return self.found is not None

    def push(self, text: str, *, counts: bool = True) -> str:
        """Returns the text that is certain to be the output's; with a match, the rest of it. A stop string that this
        text completes is a match only if it ``counts``.
        """
        if self.stopped or not self._searches:
            return "" if self.stopped else text
        pending = len(self._pending)
        text = self._pending + text
        for index in range(pending, len(text)):
            completed = self._advance(text[index])
            if counts and completed is not None:
                self.found, self._pending, self.behind = completed, "", text[index + 1 :]
                return text[: index + 1 - self._withheld(len(self.found))]
        keep = len(text) - self._withheld(max(search.matched for search in self._searches))
        self._pending = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Returns what was held back, which did not become a stop string. What follows is searched alone."""
        pending, self._pending = self._pending, ""
        for search in self._searches:
            search.matched = 0
        return pending

    def _withheld(self, matched: int) -> int:
        """Characters held back at the end of a text that ends with ``matched`` characters of a stop string."""
        return 0 if self._include else matched

    def _advance(self, character: str) -> str | None:
        """The longest stop string that ``character`` completes; None if there is none."""
        completed = [search.stop for search in self._searches if search.advance(character)]
        return max(completed, key=len, default=None)


class _Search:
    """Knuth, Morris and Pratt's search for one string: the text so far ends with ``matched`` characters of it."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._borders = _borders(stop)
        self.matched = 0

    def advance(self, character: str) -> bool:
        """Whether ``character`` completes the string. Then the text ends with ``matched`` characters of another one."""
        matched, stop = self.matched, self.stop
        while matched and stop[matched] != character:
            matched = self._borders[matched - 1]
        if stop[matched] == character:
            matched += 1
        completed = matched == len(stop)
        self.matched = self._borders[-1] if completed else matched
        return completed


def _borders(stop: str) -> list[int]:
    """For each prefix of ``stop``, the length of its longest proper prefix that is also its suffix."""
    borders, matched = [0], 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        if stop[matched] == character:
            matched += 1
        borders.append(matched)
    return borders
