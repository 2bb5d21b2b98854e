"""The events of one stream, as the OpenAI API writes them. Does no I/O."""

import json
from typing import Any, Final

from quire_proto.sampling import FinishReason

from quire_router.api.frontend import Admitted
from quire_router.api.rest.answers import Style, event, head, usage_object
from quire_router.api.rest.logprobs import Lists
from quire_router.api.rest.shown import Shown
from quire_router.generation import Delta, Usage

DONE: Final = b"data: [DONE]\n\n"


class Chunks:
    """Each event is a piece of one choice. All that does not change between tokens is written once."""

    def __init__(self, style: Style, admitted: Admitted) -> None:
        self.shown = Shown(admitted, style.shape)
        self._style = style
        self._choices = len(admitted.generations) * admitted.first.params.n
        self._head = head(style, style.chunk, admitted.first)
        self._usage: dict[str, Any] = {"usage": None} if admitted.request.include_usage else {}
        opening = json.dumps(self._head, separators=(",", ":"))[:-1]
        self._before = [
            f'data: {opening},"choices":[{{"index":{index},{style.piece_before}' for index in range(self._choices)
        ]
        no_usage = ',"usage":null' if self._usage else ""
        self._end = f',"finish_reason":null}}]{no_usage}}}\n\n'
        self._after = f'{style.piece_after},"logprobs":null{self._end}'

    def opening(self) -> bytes:
        """What comes before all text: the role of each choice, where there are roles."""
        if self._style.opening is None:
            return b""
        return b"".join(self._chunk(index, self._style.opening, None) for index in range(self._choices))

    def piece(self, delta: Delta) -> bytes:
        """What a piece adds to its choice: nothing, some text, its end. The usage ends the stream."""
        data, logprobs = b"", self.shown.logprobs(delta) if self.shown.anything else ()
        if any(logprobs):  # also without text: tokens may come before theirs
            data = self._piece_with(logprobs, delta)
        elif delta.text:  # once for each token, so it only joins strings
            data = (self._before[delta.index] + json.dumps(delta.text) + self._after).encode("ascii")
        if delta.finish_reason is not None:
            data += self._chunk(delta.index, self._style.closing, delta.finish_reason)
        return data if delta.usage is None else data + self._closing(delta.usage)

    def _piece_with(self, logprobs: Lists, delta: Delta) -> bytes:
        text = self._before[delta.index] + json.dumps(delta.text) + self._style.piece_after
        return f'{text},"logprobs":{self.shown.logprobs_object(logprobs)}{self._end}'.encode("ascii")

    def _closing(self, usage: Usage) -> bytes:
        """The usage where it was asked for, and the end mark."""
        told = event({**self._head, "choices": [], "usage": usage_object(usage)}) if self._usage else b""
        return told + DONE

    def _chunk(self, index: int, choice: dict[str, Any], reason: FinishReason | None) -> bytes:
        whole_choice = {"index": index, **choice, "logprobs": None, "finish_reason": reason}
        return event({**self._head, "choices": [whole_choice], **self._usage})
