"""An answer in one piece, as the OpenAI API writes it, put together while it comes. Does no I/O."""

import asyncio
import json
from dataclasses import dataclass, field

from quire_proto.errors import internal

from quire_router.api.admitted import PreparedRequest
from quire_router.api.reading import ParsedDelta, create_parsers
from quire_router.api.rest.answers import OpenAiFormat, head, usage_object
from quire_router.api.rest.logprobs import LogprobLists, joined, number
from quire_router.api.rest.said import message_object
from quire_router.api.rest.shown import LogprobsRenderer
from quire_router.generation import Delta, Usage


@dataclass(slots=True)
class _ChoiceBuilder:
    """What came of one choice."""

    texts: list[str] = field(default_factory=list)
    said: list[ParsedDelta] = field(default_factory=list)
    logprobs: list[LogprobLists] = field(default_factory=list)
    finish_reason: str | None = None
    score: float | None = None


class CompletionBuilder:
    """Collects the pieces of all choices."""

    def __init__(self, style: OpenAiFormat, admitted: PreparedRequest) -> None:
        self.shown = LogprobsRenderer(admitted, style.shape)
        self._readers = create_parsers(admitted)
        self._style = style
        self._head = head(style, style.whole, admitted.first)
        self._choices = [_ChoiceBuilder() for _ in range(admitted.num_choices)]

    def add(self, delta: Delta) -> None:
        """The next piece."""
        choice = self._choices[delta.index]
        if self._readers is None:
            choice.texts.append(delta.text)
        else:
            choice.said.append(self._readers[delta.index].parse(delta))
        if self.shown.anything:
            choice.logprobs.append(self.shown.logprobs(delta))
        if delta.finish_reason is not None:
            choice.finish_reason, choice.score = delta.finish_reason, delta.score
            if choice.said:
                choice.finish_reason = choice.said[-1].finish_reason

    async def body(self, usage: Usage) -> bytes:
        """The answer, choice by choice, between which others get their turn. Raises ``QuireError`` when a choice has
        not ended: it is never passed on as a complete one.
        """
        if any(choice.finish_reason is None for choice in self._choices):
            raise internal()
        choices = []
        for index, choice in enumerate(self._choices):
            choices.append(self._choice_object(index, choice).encode("ascii"))
            await asyncio.sleep(0)
        after = "" if self._style.prompt_in_choices else self._prompt_logprobs(0)
        end = f'],"usage":{_json(usage_object(usage))}{after}}}'
        return b"".join(
            (f'{_json(self._head)[:-1]},"choices":['.encode("ascii"), b",".join(choices), end.encode("ascii"))
        )

    def _choice_object(self, index: int, choice: _ChoiceBuilder) -> str:
        if self._readers is None:
            text = f"{self._style.before}{_json(''.join(choice.texts))}{self._style.after}"
        else:
            text = f'"message":{_json(message_object(choice.said))}'
        logprobs = self.shown.logprobs_object(tuple(map(joined, zip(*choice.logprobs, strict=True))))
        after = self._prompt_logprobs(index) if self._style.prompt_in_choices else ""
        if choice.score is not None:
            after += f',"score":{number(choice.score)}'
        reason = _json(choice.finish_reason)
        return f'{{"index":{index},{text},"logprobs":{logprobs},"finish_reason":{reason}{after}}}'

    def _prompt_logprobs(self, index: int) -> str:
        listed = self.shown.prompt_logprobs(index)
        return f',"prompt_logprobs":{listed}' if listed else ""


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
