"""Log-probabilities in the formats of the OpenAI API and of vLLM, as JSON texts: how each format writes tokens
(``LogprobsFormat``, ``PromptLogprobsFormat``), and what one response shows (``LogprobsRenderer``). Does no I/O.

With twenty tokens at each position a response of a thousand tokens has a megabyte of them, made beside every other
stream of this process. So each token's name is rendered once, a position only joins texts, and nothing is kept as
objects.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from quire_proto.sampling import FinishReason, TokenLogprobs
from quire_proto.text.detokenizer import OutputTextStream

from quire_router.api.prepared_request import PreparedRequest
from quire_router.api.response_opener import withheld
from quire_router.api.rest.http import json_text
from quire_router.core.generation import Delta, GenerationRequest

UNLIKELY: Final = -9999.0  # the OpenAI API's minus infinity, which JSON cannot write
LogprobLists = tuple[str, ...]  # contents of several JSON lists, without brackets


class TokenNames:
    """Tokens as one response shows them, in JSON, cached. ``token_bytes`` is the model's. With ``as_ids`` a token's
    name is its id, as vLLM writes it.
    """

    def __init__(self, token_bytes: Callable[[int], bytes | None], *, as_ids: bool = False) -> None:
        self._bytes_of = token_bytes
        self._as_ids = as_ids
        self.name = cache(self._name)
        self.marked_name = cache(self._marked_name)
        self.entry = cache(self._entry)

    def _name(self, token_id: int) -> str:
        r"""The token's text, or its bytes where they are not text: those beyond ASCII like ``\xe2``."""
        return self._write(token_id, "")

    def _marked_name(self, token_id: int) -> str:
        """The same, with ``bytes:`` before what is not text."""
        return self._write(token_id, "bytes:")

    def _entry(self, token_id: int) -> tuple[str, str]:
        """A chat's token without the end of its object: the parts before and behind the log-probability."""
        raw = self._bytes_of(token_id)
        written = "null" if raw is None else json_text([*raw])
        return f'{{"token":{self.name(token_id)},"logprob":', f',"bytes":{written}'

    def _write(self, token_id: int, prefix: str) -> str:
        if self._as_ids:
            return f'"token_id:{token_id}"'
        raw = self._bytes_of(token_id) or b""
        try:
            return json_text(raw.decode())
        except UnicodeDecodeError:
            return json_text(prefix + raw.decode("ascii", "backslashreplace"))


class TextOffsets:
    """Where the text of each token begins: ``begin`` and the characters that ``output`` has made before it. If the
    whole ``text`` is known, a token that it does not have there, such as one that the tokenizer added, has no length.
    """

    def __init__(self, output: OutputTextStream, begin: int = 0, text: str = "") -> None:
        self._output = output
        self._text = text
        self.end = begin

    def finish(self) -> int:
        """Returns where the text ends. No token may follow."""
        self.end += len(self._output.finish())
        return self.end

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Returns the next tokens' offsets. Tokens that make one character together have the offset of the first."""
        return [self._pass(token_id) for token_id in token_ids]

    def _pass(self, token_id: int) -> int:
        begin, piece = self.end, self._output.push([token_id])
        self.end += len(piece) if not self._text or self._text.startswith(piece, begin) else 0
        return begin


class LogprobsFormat(ABC):
    """``choices[].logprobs``: an object of the lists that ``lists`` names, followed by the constant ``after``. The
    ``top`` most probable tokens are shown at each position.
    """

    lists: tuple[str, ...]
    after = ""

    def __init__(self, names: TokenNames, top: int) -> None:
        self._names = names
        self._top = top

    @abstractmethod
    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: TextOffsets) -> LogprobLists:
        """Returns what these tokens add to each of the lists."""

    @abstractmethod
    def write_stop_token(self, token_id: int, logprobs: TokenLogprobs, offsets: TextOffsets) -> LogprobLists:
        """Returns what the token that ended the output adds, which has no text there, as vLLM does."""

    def object_of(self, contents: LogprobLists) -> str:
        """Returns the object whose lists have these contents."""
        lists = ",".join(f'"{name}":[{content}]' for name, content in zip(self.lists, contents, strict=True))
        return f"{{{lists}{self.after}}}"


class ChatLogprobsFormat(LogprobsFormat):
    """The format of chat completions: one object a token in ``content``."""

    lists = ("content",)
    after = ',"refusal":null'

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], _offsets: TextOffsets) -> LogprobLists:
        """Returns what these tokens add to the list."""
        return (joined(self._position(*each) for each in zip(token_ids, logprobs, strict=True)),)

    def write_stop_token(self, token_id: int, logprobs: TokenLogprobs, _offsets: TextOffsets) -> LogprobLists:
        """Returns its entry, which looks like every other."""
        return (self._position(token_id, logprobs),)

    def _position(self, token_id: int, logprobs: TokenLogprobs) -> str:
        others = ",".join([self._token(*each) + "}" for each in logprobs.top[: self._top]])
        return f'{self._token(token_id, logprobs.logprob)},"top_logprobs":[{others}]}}'

    def _token(self, token_id: int, logprob: float) -> str:
        before, after = self._names.entry(token_id)
        return f"{before}{number(logprob)}{after}"


class CompletionLogprobsFormat(LogprobsFormat):
    """The format of completions: four parallel lists. ``top_logprobs`` also has the token itself, where it is not among
    the most probable ones. ``text_offset`` is where a token's text begins in the choice's text.
    """

    lists = ("text_offset", "token_logprobs", "tokens", "top_logprobs")

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: TextOffsets) -> LogprobLists:
        """Returns what these tokens add to each of the lists."""
        return (
            joined(map(str, offsets.of(token_ids))),
            joined(number(each.logprob) for each in logprobs),
            joined(map(self._names.marked_name, token_ids)),
            joined(self._most_probable(*each) for each in zip(token_ids, logprobs, strict=True)),
        )

    def write_first(self, token_id: int, offsets: TextOffsets) -> LogprobLists:
        """Returns the entries of an echoed prompt's first token, which nothing predicts."""
        return str(*offsets.of([token_id])), "null", self._names.marked_name(token_id), "null"

    def write_stop_token(self, token_id: int, logprobs: TokenLogprobs, offsets: TextOffsets) -> LogprobLists:
        """Returns its entries, with the end of the choice's text as its offset."""
        name, others = self._names.marked_name(token_id), self._most_probable(token_id, logprobs)
        return str(offsets.finish()), number(logprobs.logprob), name, others

    def _most_probable(self, token_id: int, logprobs: TokenLogprobs) -> str:
        """Returns an object by tokens' names, the token's own first, as in vLLM. Of two tokens with one name the more
        probable counts.
        """
        entries = {self._names.marked_name(token_id): logprobs.logprob}
        for each, logprob in logprobs.top[: self._top]:
            name = self._names.marked_name(each)
            entries[name] = max(logprob, entries.get(name, logprob))
        return f"{{{','.join([f'{name}:{number(value)}' for name, value in entries.items()])}}}"


class PromptLogprobsFormat:
    """vLLM's ``prompt_logprobs``: for each token an object of the most probable ones by their ids, and null for the
    first. ``rank`` counts from 1; it is null for the prompt's own token where it is not among the most probable.
    """

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> str:
        """Returns what these tokens add to the list."""
        return joined(self._position(*each) for each in zip(token_ids, logprobs, strict=True))

    def _position(self, token_id: int, logprobs: TokenLogprobs) -> str:
        entries = {token_id: self._token(token_id, logprobs.logprob, "null")}
        for rank, (each, logprob) in enumerate(logprobs.top, 1):
            entries[each] = self._token(each, logprob, str(rank))
        return f"{{{','.join(entries.values())}}}"

    def _token(self, token_id: int, logprob: float, rank: str) -> str:
        name = self._names.name(token_id)
        return f'"{token_id}":{{"logprob":{number(logprob)},"rank":{rank},"decoded_token":{name}}}'


def joined(parts: Iterable[str]) -> str:
    """Joins the contents of a list that come in parts, some of them empty."""
    return ",".join(filter(None, parts))


def number(logprob: float) -> str:
    """Returns a log-probability, or a beam's score, as JSON can write it."""
    return repr(min(max(UNLIKELY, logprob), -UNLIKELY))


_CHUNK = 32  # positions of a prompt that are rendered at once: a millisecond or two with twenty tokens each


@dataclass(frozen=True, slots=True)
class _PromptLogprobs:
    """What is shown of one prompt. Where it is echoed, ``lists`` come before its choices' own, and its text has
    ``characters``; ``listed`` is vLLM's list. Both are empty where they are not requested.
    """

    lists: LogprobLists = ()
    characters: int = 0
    listed: str = ""


class LogprobsRenderer:
    """Renders the log-probabilities of one response that shows any. ``logprobs_format`` is how the route writes those
    of the output. The client has had the beginnings of the ``started`` choices before. Does no I/O.
    """

    def __init__(
        self, prepared: PreparedRequest, logprobs_format: type[LogprobsFormat], started: Container[int] = ()
    ) -> None:
        options, token_bytes = prepared.response_options, prepared.tokenizer.token_bytes
        names = TokenNames(token_bytes, as_ids=options.tokens_as_ids)
        self._generations = prepared.generations
        self._tokenizer = prepared.tokenizer
        self._started = started
        self._format = None if options.logprobs is None else logprobs_format(names, options.logprobs)
        self._prompt_format = None if options.prompt_logprobs is None else PromptLogprobsFormat(TokenNames(token_bytes))
        self._offsets: dict[int, TextOffsets] = {}
        self._prompts: dict[int, _PromptLogprobs] = {}

    async def read_prompt(self, delta: Delta) -> None:
        """Renders what the first delta of a prompt says of it; yields to the event loop meanwhile. To be called with
        every delta before the other methods are.
        """
        number = self._number(delta.index)
        if number not in self._prompts:
            self._prompts[number] = await self._render_prompt(self._generations[number], delta)

    def logprobs(self, delta: Delta) -> LogprobLists:
        """Returns what a delta adds to its choice's lists; empty where only the prompt's are shown."""
        if self._format is None:
            return ()
        offsets = self._offsets.get(delta.index)
        opens = offsets is None and delta.index not in self._started
        if offsets is None:
            offsets = self._open_offsets(delta.index)
        if delta.replayed:
            offsets.of(delta.token_ids)
            return ()
        lists = self._format.write(delta.token_ids, delta.logprobs, offsets)
        parts = [self._prompts[self._number(delta.index)].lists if opens else (), lists]
        ending = delta.stop_token
        if ending is not None and ending.logprobs is not None:
            parts.append(self._format.write_stop_token(ending.token_id, ending.logprobs, offsets))
        return tuple(map(joined, zip(*filter(None, parts), strict=True)))

    def logprobs_object(self, lists: LogprobLists) -> str:
        """Returns ``choices[].logprobs`` with these contents of its lists; null where only the prompt's are shown."""
        return "null" if self._format is None else self._format.object_of(lists)

    def prompt_logprobs(self, index: int) -> str:
        """Returns ``prompt_logprobs`` of a choice's prompt; empty where it was not requested."""
        return self._prompts[self._number(index)].listed if self._prompt_format is not None else ""

    def _number(self, index: int) -> int:
        """Returns the number of the prompt that a choice belongs to."""
        return index // self._generations[0].params.n

    def _open_offsets(self, index: int) -> TextOffsets:
        number = self._number(index)
        generation = self._generations[number]
        output = self._new_output(generation, generation.prompt_token_ids)
        self._offsets[index] = TextOffsets(output, self._prompts[number].characters)
        return self._offsets[index]

    async def _render_prompt(self, generation: GenerationRequest, delta: Delta) -> _PromptLogprobs:
        if delta.finish_reason is FinishReason.ABORT and not delta.prompt_logprobs:
            return _PromptLogprobs(listed="null")  # cancelled before the prompt was computed
        if delta.replayed and not delta.prompt_logprobs:
            return _PromptLogprobs(characters=self._characters(generation))
        return _PromptLogprobs(*await self._echoed_lists(generation, delta), await self._prompt_list(generation, delta))

    async def _echoed_lists(self, generation: GenerationRequest, delta: Delta) -> tuple[LogprobLists, int]:
        if not (isinstance(self._format, CompletionLogprobsFormat) and generation.echo):
            return (), 0
        output = self._prompt_output()
        offsets = TextOffsets(output, text=generation.conversation)
        parts = [self._format.write_first(generation.prompt_token_ids[0], offsets)]
        for token_ids, logprobs in _positions(generation, delta):
            parts.append(self._format.write(token_ids, logprobs, offsets))
            await asyncio.sleep(0)
        characters = len(generation.conversation) or offsets.end + len(withheld(output))
        return tuple(map(joined, zip(*parts, strict=True))), characters

    def _characters(self, generation: GenerationRequest) -> int:
        """Returns the length of an echoed prompt's text; 0 where it is not echoed."""
        if not generation.echo:
            return 0
        if generation.conversation:
            return len(generation.conversation)
        output = self._prompt_output()
        return len(output.push(list(generation.prompt_token_ids))) + len(withheld(output))

    async def _prompt_list(self, generation: GenerationRequest, delta: Delta) -> str:
        if self._prompt_format is None:
            return ""
        parts = ["null"]
        for token_ids, logprobs in _positions(generation, delta):
            parts.append(self._prompt_format.write(token_ids, logprobs))
            await asyncio.sleep(0)
        return f"[{joined(parts)}]"

    def _prompt_output(self) -> OutputTextStream:
        """Returns the stream of an echoed prompt's text, which has its special tokens."""
        return self._tokenizer.new_output_stream((), (), skip_special_tokens=False)

    def _new_output(self, generation: GenerationRequest, prompt: Sequence[int]) -> OutputTextStream:
        return self._tokenizer.new_output_stream(prompt, (), skip_special_tokens=generation.skip_special_tokens)


def _positions(generation: GenerationRequest, delta: Delta) -> Iterator[tuple[Sequence[int], Sequence[TokenLogprobs]]]:
    """Yields the prompt from its second token on, ``_CHUNK`` positions at a time."""
    token_ids, logprobs = generation.prompt_token_ids[1:], delta.prompt_logprobs
    for start in range(0, len(token_ids), _CHUNK):
        yield token_ids[start : start + _CHUNK], logprobs[start : start + _CHUNK]
