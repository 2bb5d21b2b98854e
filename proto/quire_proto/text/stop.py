"""Stop strings: finds the first one in text that arrives in pieces. Knows no tokens."""

from collections.abc import Sequence


class StopMatcher:
    """Watches one output for ``stops`` (none of them empty).

    The output ends at the first character that completes a stop string, so that the result does not depend on how the
    text is cut into pieces; of several that end there, the longest counts. Only what may still become a stop string
    is held back: at most ``max(len(stop)) - 1`` characters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain not to be part of a stop string; after a match, the text before it."""
        if self.stopped or not self._searches:
            return "" if self.stopped else text
        held = len(self._held)
        text = self._held + text
        for index in range(held, len(text)):
            found = self._advance(text[index])
            if found:
                self.stopped, self._held = True, ""
                return text[: index + 1 - found]
        keep = len(text) - max(search.matched for search in self._searches)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back: it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """The length of the longest stop string that ``character`` completes, 0 for none."""
        found = 0
        for search in self._searches:
            if search.advance(character):
                found = max(found, search.matched)
        return found


class _Search:
    """Knuth, Morris and Pratt's search for one string: ``matched`` is how much of it the text so far ends with."""

    __slots__ = ("_borders", "_stop", "matched")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self.matched = 0

    def advance(self, character: str) -> bool:
        """Whether ``character`` completes the string."""
        matched, stop = self.matched, self._stop
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
