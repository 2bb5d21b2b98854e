"""The log-probabilities that an answer shows, choice by choice, as far as its request asks for them. Does no I/O."""

import asyncio
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from quire_proto.logprobs import TokenLogprobs
from quire_proto.sampling import FinishReason
from quire_proto.text.output import OutputTextStream

from quire_router.api.admitted import PreparedRequest
from quire_router.api.echo import withheld
from quire_router.api.rest.logprobs import (
    CompletionLogprobsFormat,
    LogprobLists,
    LogprobsFormat,
    PromptLogprobsFormat,
    TextOffsets,
    TokenNames,
    joined,
)
from quire_router.generation import Delta, GenerationRequest

_AT_A_TIME = 32  # positions of a prompt that are written at once: a millisecond or two with twenty tokens each


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What is shown of one prompt. ``lists`` come before its choices' own where it is echoed, and its text has then
    ``characters``; ``listed`` is vLLM's list. Both are empty where they are not asked for.
    """

    lists: LogprobLists = ()
    characters: int = 0
    listed: str = ""


class LogprobsRenderer:
    """What one answer shows beside its text. ``shape`` is how the route writes log-probabilities of the output. The
    reader has ``begun`` some choices before, and has what comes with their beginning.
    """

    def __init__(self, admitted: PreparedRequest, shape: type[LogprobsFormat], begun: Container[int] = ()) -> None:
        asked, names = admitted.response_options, TokenNames(admitted.text.token_bytes)
        self._generations = admitted.generations
        self._text = admitted.text
        self._begun = begun
        self._shape = None if asked.logprobs is None else shape(names, asked.logprobs)
        self._prompt_shape = None if asked.prompt_logprobs is None else PromptLogprobsFormat(names)
        self._offsets: dict[int, TextOffsets] = {}
        self._prompts: dict[int, _Prompt] = {}
        self.anything = self._shape is not None or self._prompt_shape is not None

    async def read(self, delta: Delta) -> None:
        """Takes what the first piece of an answer tells of its prompt, and lets other work go on meanwhile. To be
        called with every piece before the other methods are, unless there is not ``anything`` to show.
        """
        number = self._number(delta.index)
        if number not in self._prompts:
            self._prompts[number] = await self._read(self._generations[number], delta)

    def logprobs(self, delta: Delta) -> LogprobLists:
        """What a piece adds to the lists of its choice's log-probabilities; nothing where there are none to show."""
        if self._shape is None:
            return ()
        offsets = self._offsets.get(delta.index)
        opens = offsets is None and delta.index not in self._begun
        if offsets is None:
            offsets = self._open_offsets(delta.index)
        if delta.replayed:
            offsets.of(delta.token_ids)
            return ()
        lists = self._shape.write(delta.token_ids, delta.logprobs, offsets)
        before = self._prompts[self._number(delta.index)].lists if opens else ()
        return tuple(map(joined, zip(before, lists, strict=True))) if before else lists

    def logprobs_object(self, lists: LogprobLists) -> str:
        """``choices[].logprobs`` with these contents of its lists, null for nothing."""
        return "null" if self._shape is None else self._shape.object_of(lists)

    def prompt_logprobs(self, index: int) -> str:
        """The list of a choice's prompt; empty where it was not asked for."""
        return self._prompts[self._number(index)].listed if self._prompt_shape is not None else ""

    def _number(self, index: int) -> int:
        """Which prompt a choice belongs to."""
        return index // self._generations[0].params.n

    def _open_offsets(self, index: int) -> TextOffsets:
        number = self._number(index)
        generation = self._generations[number]
        output = self._open(generation, generation.prompt_token_ids)
        self._offsets[index] = TextOffsets(output, self._prompts[number].characters)
        return self._offsets[index]

    async def _read(self, generation: GenerationRequest, delta: Delta) -> _Prompt:
        if delta.finish_reason is FinishReason.ABORT and not delta.prompt_logprobs:
            return _Prompt(listed="null")  # cancelled before the prompt was computed
        if delta.replayed and not delta.prompt_logprobs:
            return _Prompt(characters=self._characters(generation))
        return _Prompt(*await self._echo(generation, delta), await self._list(generation, delta))

    async def _echo(self, generation: GenerationRequest, delta: Delta) -> tuple[LogprobLists, int]:
        if not (isinstance(self._shape, CompletionLogprobsFormat) and generation.echo):
            return (), 0
        output = self._open(generation, ())
        offsets = TextOffsets(output)
        parts = [self._shape.write_first(generation.prompt_token_ids[0], offsets)]
        for token_ids, logprobs in _positions(generation, delta):
            parts.append(self._shape.write(token_ids, logprobs, offsets))
            await asyncio.sleep(0)
        return tuple(map(joined, zip(*parts, strict=True))), offsets.end + len(withheld(output))

    def _characters(self, generation: GenerationRequest) -> int:
        """How long the text of an echoed prompt is."""
        if not generation.echo:
            return 0
        output = self._open(generation, ())
        return len(output.push(list(generation.prompt_token_ids))) + len(withheld(output))

    async def _list(self, generation: GenerationRequest, delta: Delta) -> str:
        if self._prompt_shape is None:
            return ""
        parts = ["null"]
        for token_ids, logprobs in _positions(generation, delta):
            parts.append(self._prompt_shape.write(token_ids, logprobs))
            await asyncio.sleep(0)
        return f"[{joined(parts)}]"

    def _open(self, generation: GenerationRequest, prompt: Sequence[int]) -> OutputTextStream:
        return self._text.new_output_stream(prompt, (), skip_special_tokens=generation.skip_special_tokens)


def _positions(generation: GenerationRequest, delta: Delta) -> Iterator[tuple[Sequence[int], Sequence[TokenLogprobs]]]:
    """The prompt from its second token on, some at a time."""
    token_ids, logprobs = generation.prompt_token_ids[1:], delta.prompt_logprobs
    for start in range(0, len(token_ids), _AT_A_TIME):
        yield token_ids[start : start + _AT_A_TIME], logprobs[start : start + _AT_A_TIME]
