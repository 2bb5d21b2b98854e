"""The text of one output as far as it is certain: detokenised, and cut at the first stop string."""

from collections.abc import Callable, Sequence

from quire_proto.text.detokenizer import Decode, Detokenizer, StandaloneText
from quire_proto.text.stop import StopMatcher


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
