"""Stop strings: finds the first one in text that arrives in pieces."""

from collections.abc import Sequence


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
