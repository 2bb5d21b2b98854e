"""The events of one stream, as the OpenAI API writes them. Does no I/O."""

import json
from json.encoder import encode_basestring_ascii as _quote  # as json.dumps writes a string, in a quarter of the time
from typing import Any, Final

from quire_router.api.admitted import PreparedRequest
from quire_router.api.answer import begun_choices
from quire_router.api.reading import ParsedDelta, create_parsers
from quire_router.api.rest.answers import OpenAiFormat, event, head, usage_object
from quire_router.api.rest.logprobs import LogprobLists, number
from quire_router.api.rest.said import delta_json
from quire_router.api.rest.shown import LogprobsRenderer
from quire_router.generation import Delta, Usage
from quire_router.mark import StreamCursor

DONE: Final = b"data: [DONE]\n\n"
_NO_USAGE: Final = b',"usage":null}\n\n'


class SseEncoder:
    """Each event is a piece of one choice. Its id, where ids were asked for, is the ``mark`` of where its reader then
    stands: a client that comes back with it gets what follows. So a piece is one event, also with its choice's end. All
    that does not change between tokens is written once.
    """

    __slots__ = (
        "_after",
        "_before",
        "_choices",
        "_closed",
        "_counts",
        "_end",
        "_has_ids",
        "_head",
        "_mark",
        "_prompts",
        "_readers",
        "_shows",
        "_starts",
        "_style",
        "_usage",
        "_usage_so_far",
        "shown",
    )

    def __init__(self, style: OpenAiFormat, admitted: PreparedRequest, mark: StreamCursor) -> None:
        self.shown = LogprobsRenderer(admitted, style.shape, begun_choices(mark, admitted.num_choices))
        self._shows = self.shown.anything
        self._readers = create_parsers(admitted)
        self._style = style
        self._mark = mark
        self._has_ids = admitted.event_ids
        self._usage_so_far = admitted.response_options.continuous_usage
        self._counts = self._has_ids or self._usage_so_far
        self._prompts = [len(each.prompt_token_ids) for each in admitted.generations for _ in range(each.params.n)]
        self._choices = admitted.num_choices
        self._head = head(style, style.chunk, admitted.first)
        self._usage: dict[str, Any] = {"usage": None} if admitted.response_options.include_usage else {}
        opening = _unclosed(self._head)
        starts = [f'data: {opening},"choices":[{{"index":{index},' for index in range(self._choices)]
        self._before = [start + style.piece_before for start in starts]
        self._starts = [f'{start}"delta":' for start in starts]
        no_usage = ',"usage":null' if self._usage else ""
        self._closed = f"}}]{no_usage}}}\n\n"
        self._end = f',"finish_reason":null{self._closed}'
        self._after = f'{style.piece_after},"logprobs":null{self._end}'

    def opening(self) -> bytes:
        """What comes before all text: the role of each choice that has not begun, where there are roles."""
        if self._style.opening is None:
            return b""
        return b"".join(self._open(index) for index in range(self._choices) if not self._mark.begun(index))

    def encode(self, delta: Delta) -> bytes:
        """What a piece adds to its choice: nothing, some text, its end. The usage ends the stream."""
        logprobs = self.shown.logprobs(delta) if self._shows else ()
        if self._readers is not None:
            data = self._encode_parsed(self._readers[delta.index].parse(delta), delta, logprobs)
        else:
            data = b"" if delta.replayed else self._encode_text(delta, logprobs)
        if data and self._usage_so_far:
            data = self._with_usage(data, delta.index)
        return data if delta.usage is None else data + self._closing(delta.usage)

    def _encode_text(self, delta: Delta, logprobs: LogprobLists) -> bytes:
        line = self._take(delta) if self._counts else ""
        if delta.finish_reason is not None:
            return self._encode_last(line, delta, logprobs)
        if any(logprobs):  # also without text: tokens may come before theirs
            text = self._before[delta.index] + json.dumps(delta.text) + self._style.piece_after
            text += f',"logprobs":{self.shown.logprobs_object(logprobs)}{self._end}'
            return f"{line}{text}".encode("ascii")
        if delta.text:  # once for each token, so it only joins strings
            return f"{line}{self._before[delta.index]}{_quote(delta.text)}{self._after}".encode("ascii")
        return b""

    def _encode_parsed(self, said: ParsedDelta, delta: Delta, logprobs: LogprobLists) -> bytes:
        """A piece of a choice that may think or call tools. It is one event too, whatever it says."""
        if delta.replayed:
            return b""
        line = self._take(delta) if self._counts else ""
        if not (said.has_output or any(logprobs)):
            return b""
        piece = f"{line}{self._starts[delta.index]}{delta_json(said)}"
        if not any(logprobs) and said.finish_reason is None:
            return f'{piece},"logprobs":null{self._end}'.encode("ascii")
        shown = self.shown.logprobs_object(logprobs) if any(logprobs) else "null"
        score = "" if delta.score is None else f',"score":{number(delta.score)}'
        end = f',"logprobs":{shown},"finish_reason":{json.dumps(said.finish_reason)}{score}{self._closed}'
        return f"{piece}{end}".encode("ascii")

    def _encode_last(self, line: str, delta: Delta, logprobs: LogprobLists) -> bytes:
        """The last event of a choice, with what text there is left, and the ``line`` with its id."""
        shown = self.shown.logprobs_object(logprobs) if any(logprobs) else "null"
        if delta.text or shown != "null":
            choice = self._before[delta.index] + json.dumps(delta.text) + self._style.piece_after
        else:
            closing = _unclosed({"index": delta.index, **self._style.closing})
            choice = f'data: {_unclosed(self._head)},"choices":[{closing}'
        score = "" if delta.score is None else f',"score":{number(delta.score)}'
        end = f',"logprobs":{shown},"finish_reason":"{delta.finish_reason}"{score}{self._closed}'
        return f"{line}{choice}{end}".encode("ascii")

    def _closing(self, usage: Usage) -> bytes:
        """The usage where it was asked for and not told before, and the end mark."""
        if not self._usage or self._mark.usage:
            return DONE
        self._mark.usage = True
        return self._event({**self._head, "choices": [], "usage": usage_object(usage)}) + DONE

    def _open(self, index: int) -> bytes:
        self._mark.open(index)
        choice = {"index": index, **(self._style.opening or {}), "logprobs": None, "finish_reason": None}
        data = self._event({**self._head, "choices": [choice], **self._usage})
        return self._with_usage(data, index) if self._usage_so_far else data

    def _with_usage(self, data: bytes, index: int) -> bytes:
        """An event with what its choice has used so far: as in vLLM, the tokens of its prompt and its own."""
        prompt, completion = self._prompts[index], self._mark.position(index)
        tokens = b'"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d' % (
            prompt,
            completion,
            prompt + completion,
        )
        return data.removesuffix(_NO_USAGE) + b',"usage":{' + tokens + b"}}\n\n"

    def _event(self, chunk: dict[str, Any]) -> bytes:
        line = f"id: {self._mark}\n".encode("ascii") if self._has_ids else b""
        return line + event(chunk)

    def _take(self, delta: Delta) -> str:
        """Counts ``delta`` as told; the line with the id of its event where ids were asked for."""
        self._mark.advance(delta)
        return f"id: {self._mark!s}\n" if self._has_ids else ""


def _unclosed(value: dict[str, Any]) -> str:
    """An object of JSON without its end."""
    return json.dumps(value, separators=(",", ":"))[:-1]
