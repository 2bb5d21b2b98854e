"""One request and its answer: ``GenerationRequest`` as it left the validator, in tokens; the ``Delta`` objects that its
answer consists of; ``StreamCursor``, how far a client has read them, as an event id says it; and ``DeltaStream``, the
generator that a client's task reads them from, with the direct path that most of them take instead. Does no I/O.
"""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any, Protocol, Self

from opentelemetry.context import Context
from quire_proto.pooling import PoolingParams
from quire_proto.priority import BEST_EFFORT
from quire_proto.sampling import FinishReason, SamplingParams, StopToken, TokenLogprobs
from quire_proto.text.stream_scanner import OutputPart

PROMPT_SEPARATOR = "_"
_CURSOR = re.compile(r"(?:-|[0-9]{1,9}e?)(?:\.(?:-|[0-9]{1,9}e?))*u?", re.ASCII)
MAX_RESPONSE_OPTIONS_CHARACTERS = 65_536
MAX_PARTS = 1_024
MAX_CONVERSATION_CHARACTERS = 4_194_304
LOGPROBS_PER_TOKEN = 6
"""Log-probabilities that take a router as long to write as a token of a stream: 6 µs each, against 35 to 40."""


@dataclass(frozen=True, slots=True)
class LoRA:
    """A LoRA adapter as engines report it: its ``name``, and the ``digest`` of its files, which tells it from another
    of the same name. ``path`` is its folder where it was loaded while an engine served; else empty.
    """

    name: str
    digest: bytes
    path: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that passed the validator, for a configured ``model`` and an adapter of it, or none: ``lora``.

    ``served_name`` is what the client asked for where that stands for several models, its targets, of which ``model``
    is the one that was chosen; else it is empty.
    ``request_id`` is opaque, ``[A-Za-z0-9_-]{1,64}``. ``prompt_token_ids`` come from the validator as
    ``array("i")``: journals keep them for long, and a list takes nine times as much. ``params`` has every default
    filled in, also a seed. ``stop`` strings are the router's: engines know no text. ``tenant`` is an opaque name of who
    asks, the empty string when keys are not configured; ``cache_salt`` (0 to 32 bytes) keeps tenants' prefix caches
    apart. ``include_stop`` leaves the stop string that was found in the text, ``skip_special_tokens`` leaves special
    tokens out of it. ``echo`` is the API's: it begins each choice's text with the prompt's. Requests with a smaller
    ``priority`` go first where engines run by priority. ``operation`` is ``chat``,
    ``text_completion``, ``embeddings`` or ``score``, for traces and metrics. With ``pooling`` the prompt is pooled
    instead of continued, and ``params`` are not read.

    ``response_options`` is what the API has to know to write the answer again for a client that comes back: JSON
    that only the API reads. ``conversation`` is, for an API whose next request may go on from this one's answer,
    what that needs besides the tokens: text that only the API reads, too, and may be long; where a prompt is
    echoed, its text as it was sent. ``parts`` are the ids of all prompts' generations where a request has several,
    in the first one. ``digest`` distinguishes requests that came with one ``Idempotency-Key``, hexadecimal, empty
    without one. A ``background`` request runs on without a listener. Requests of one ``session`` share their
    history; it is opaque and never shown. ``deadline`` is when the answer must have ended, in seconds since 1970 by the
    clock of ``created``: what counts is the time between them, from ``started`` on, which is of the monotonic clock, so
    that a wall clock that is set changes no request's time. ``retention`` is for how many seconds its record is kept
    after its end, 0 for the shortest time in which followers see it; None for the router's default.
    """

    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    priority: int = 0
    operation: str = "chat"
    tenant: str = ""
    cache_salt: bytes = b""
    stream: bool = False
    created: float = field(default_factory=time)
    response_options: str = ""
    conversation: str = ""
    parts: tuple[str, ...] = ()
    digest: str = ""
    background: bool = False
    session: str = ""
    deadline: float | None = None
    retention: float | None = None
    lora: LoRA | None = None
    pooling: PoolingParams | None = None
    served_name: str = ""
    started: float = field(default_factory=monotonic, compare=False, repr=False)

    @property
    def ends_by(self) -> float | None:
        """Its deadline, by the monotonic clock; None if it has none."""
        return None if self.deadline is None else self.started + self.deadline - self.created

    @property
    def seconds_left(self) -> float | None:
        """Seconds until its deadline; None if it has none."""
        return seconds_until(self.ends_by)

    @property
    def model_name(self) -> str:
        """The name that the client asked for: the adapter's, that of several targets, or the model's."""
        return (self.served_name or self.model) if self.lora is None else self.lora.name

    @property
    def best_effort(self) -> bool:
        """Whether it runs only on what other requests leave, as the lines of batches do."""
        return self.priority >= BEST_EFFORT

    @property
    def keeps_conversation(self) -> bool:
        """Whether another request may go on from its answer: the second line of ``conversation`` is that."""
        return 0 <= self.conversation.find("\n") < len(self.conversation) - 1

    @property
    def is_stored(self) -> bool:
        """Whether clients rely on its answer being there once it has ended: it has an idempotency key, runs in the
        background, or may be gone on from.
        """
        return bool(self.digest) or self.background or self.keeps_conversation

    @property
    def selects_choices(self) -> bool:
        """Whether choices are candidates, of ``best_of`` or of a beam search, of which the best are delivered together
        once all of them have ended.
        """
        return self.params.beam_width > 0 or self.params.best_of > self.params.n

    @property
    def is_storable(self) -> bool:
        """Whether the request is small enough for a journal to keep it."""
        fits = len(self.conversation) <= MAX_CONVERSATION_CHARACTERS
        return fits and len(self.response_options) <= MAX_RESPONSE_OPTIONS_CHARACTERS and len(self.parts) <= MAX_PARTS

    @property
    def stored_size(self) -> int:
        """What keeping the request takes, in tokens of 4 bytes, as far as a client can multiply it. A number in a tuple
        is 14 of them, with its part of the tuple.
        """
        params = self.params
        characters = (
            len(self.response_options) + len(self.conversation) + sum(map(len, self.stop)) + sum(map(len, self.parts))
        )
        if params.structured is not None:
            characters += len(params.structured.text)
        numbers = 2 * len(params.logit_bias) + sum(map(len, params.bad_words)) + len(params.stop_token_ids)
        return len(self.prompt_token_ids) + characters // 4 + 14 * numbers

    @property
    def max_cost(self) -> int:
        """What the request counts for at most (``cost``): with the longest output of all choices that are drawn."""
        max_output = 0 if self.pooling is not None else self.params.max_tokens * self.params.num_sequences
        return self.cost(len(self.prompt_token_ids), max_output)

    def cost(self, prompt_tokens: int, completion_tokens: int) -> int:
        """What so many tokens of this request count for, in limits and fair shares: themselves, and their
        log-probabilities, of which ``LOGPROBS_PER_TOKEN`` weigh as much as a token.
        """
        logprobs = self.num_logprobs(prompt_tokens, completion_tokens)
        return prompt_tokens + completion_tokens + -(-logprobs // LOGPROBS_PER_TOKEN)

    def num_logprobs(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Log-probabilities that the answer holds when it has so many tokens in all its choices. Each choice has those
        of the prompt again, where they are asked for or echoed.
        """
        params = self.params
        echoed = params.num_sequences * prompt_tokens if self.echo else 0
        outputs = (completion_tokens + echoed) * _logprobs_per_token(params.logprobs)
        return outputs + params.num_sequences * prompt_tokens * _logprobs_per_token(params.prompt_logprobs)


def _logprobs_per_token(most_probable: int | None) -> int:
    """Returns how many a token has: its own and those of the most probable tokens."""
    return 0 if most_probable is None else 1 + most_probable


def prompt_request_id(request_id: str, number: int) -> str:
    """Returns the id of a prompt after the first; no request's own id has ``PROMPT_SEPARATOR`` in it."""
    return f"{request_id}{PROMPT_SEPARATOR}{number}"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request consumed; ``cached_tokens`` are part of ``prompt_tokens``."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


NO_USAGE = Usage(0, 0)
"""The usage of a request of which nothing is known yet."""


@dataclass(frozen=True, slots=True)
class Move:
    """A request left engine ``lost``, because of ``reason``, and continues on ``engine``. Its client waited ``seconds``
    between the last token of the one and the first of the other.
    """

    lost: str
    reason: str
    engine: str
    seconds: float


@dataclass(slots=True)  # made for every token: a frozen one takes five times as long to make, but none is ever changed
class Delta:
    """What an answer adds to one choice. Choices are numbered from 0, and their deltas come in any order.

    ``finish_reason`` is set in the last delta of a choice, and ``usage`` in the last delta of the answer, and only
    there. ``token_ids`` may run ahead of ``text``: the text of an unfinished character, or of what may become a stop
    string, comes later. ``logprobs`` has one entry for each of ``token_ids`` where they were asked for.
    ``prompt_logprobs`` are those of the prompt's tokens from the second on, all of them, in the answer's first delta.
    ``score`` is a beam's, with its finish reason. ``stop_token`` is the token that ended the choice, which is none of
    ``token_ids``, with the finish reason where ``logprobs`` were asked for. ``stop_string`` is the one of the
    request's stop strings that ended the choice. ``parts`` are the content, reasoning and calls of the text where
    stop strings had to be searched in the content; the ``text`` is empty then. ``pooled`` is what a prompt was
    pooled to, as little-endian float32. A ``replayed`` delta the client has had before: it only brings the encoder
    of the answer to the client's cursor. ``route`` is where the request runs and why, in the first delta of an
    attempt, if the operator asked for that, and ``move`` where it left an engine, in the first delta of the next one.
    In the delta with the usage ``pending`` says that the answer can be read again, and that its end may be lost with
    this router, as the journal could not be written in time.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    index: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    score: float | None = None
    replayed: bool = False
    route: str = ""
    stop_token: StopToken | None = None
    stop_string: str | None = None
    pooled: bytes = b""
    pending: bool = False
    parts: list[OutputPart] | None = None
    move: Move | None = None


@dataclass(slots=True)
class PromptGroup:
    """What the prompts of one request share. The answer has ``started`` once the client was sent any of it, so that it
    may resume each of them; once one ``failed`` for good, none of the others is resumed.
    """

    started: bool = False
    failed: bool = False


class StreamCursor:
    """How far a client has received an answer: of each choice how many tokens, and whether its end; and whether the
    usage.

    Written as ``17`` or ``17e`` for a choice, ``-`` for one that has not started, with dots between, and ``u`` at
    the end once the usage was sent. Positions are tokens because they mean the same at every router; the deltas of an
    answer do not.
    """

    __slots__ = ("_delivered", "_ended", "_words", "usage")

    def __init__(self, choices: int) -> None:
        self._delivered: list[int | None] = [None] * choices
        self._ended = [False] * choices
        self._words = ["-"] * choices
        self.usage = False

    @classmethod
    def parse(cls, text: str, choices: int) -> Self:
        """Reads the cursor that was written as ``text``; an empty one is the beginning. Raises ``ValueError`` for what
        is no cursor of an answer with so many choices.
        """
        cursor = cls(choices)
        if not text:
            return cursor
        words = text.removesuffix("u").split(".")
        if not _CURSOR.fullmatch(text) or len(words) != choices:
            raise ValueError("this is not a position in the answer")
        cursor.usage = text.endswith("u")
        for index, word in enumerate(words):
            if word != "-":
                cursor._delivered[index] = int(word.removesuffix("e"))
                cursor._ended[index] = word.endswith("e")
                cursor._write(index)
        return cursor

    def __str__(self) -> str:
        return ".".join(self._words) + ("u" if self.usage else "")

    def position(self, index: int) -> int:
        """Returns how many tokens of a choice the client has."""
        return self._delivered[index] or 0

    def started(self, index: int) -> bool:
        """Whether the client has anything of a choice, if only its beginning."""
        return self._delivered[index] is not None

    def ended(self, index: int) -> bool:
        """Whether the client has the end of a choice."""
        return self._ended[index]

    def slice(self, first: int, choices: int) -> Self:
        """Returns the cursor of so many choices from ``first`` on, without the usage."""
        return self.parse(".".join(self._words[first : first + choices]), choices)

    def open(self, index: int) -> None:
        """Records that the beginning of a choice was sent."""
        if self._delivered[index] is None:
            self._delivered[index] = 0
            self._write(index)

    def advance(self, delta: Delta) -> None:
        """Records that a delta was sent, but not the usage in it."""
        index = delta.index
        self._delivered[index] = (self._delivered[index] or 0) + len(delta.token_ids)
        if delta.finish_reason is not None:
            self._ended[index] = True
        self._write(index)

    def _write(self, index: int) -> None:
        self._words[index] = f"{self._delivered[index]}e" if self._ended[index] else str(self._delivered[index])


class DeltaSink(Protocol):
    """Writes a response delta by delta."""

    @property
    def is_open(self) -> bool:
        """Whether a delta can be written now, without waiting for anything."""
        ...

    def write(self, delta: Delta) -> None:
        """Writes a delta. May be called only while ``is_open``."""
        ...

    def write_token(self, index: int, token_id: int, text: str) -> None:
        """As ``write`` of a delta that is one token of choice ``index`` and its text."""
        ...


class DirectPath:
    """Leads deltas from where an engine's output arrives to the client's connection, without the generator; ``sink`` is
    set once the response has started.

    A task switch and a chain of generators cost more than all that is done with a token. So a delta that comes while
    the reader waits for it, and that ends nothing, is written to the sink at once. Every other delta, every end and
    every error is yielded by the generator, and so is everything while the sink is not open.
    """

    __slots__ = ("sink",)

    def __init__(self) -> None:
        self.sink: DeltaSink | None = None


class DeltaStream(AsyncGenerator[Delta, None]):
    """The generator ``answer``, with the ``direct_path`` that its reader may open."""

    def __init__(self, answer: AsyncGenerator[Delta, None], direct_path: DirectPath) -> None:
        self.direct_path = direct_path
        self._answer = answer

    def __anext__(self) -> Coroutine[Any, Any, Delta]:
        """See ``AsyncGenerator``."""
        return self.asend(None)

    def asend(self, value: None) -> Coroutine[Any, Any, Delta]:
        """See ``AsyncGenerator``."""
        return self._answer.asend(value)

    def athrow(self, error: Any, *older: Any) -> Coroutine[Any, Any, Delta]:
        """See ``AsyncGenerator``."""
        return self._answer.athrow(error, *older)

    def aclose(self) -> Coroutine[Any, Any, None]:
        """See ``AsyncGenerator``."""
        return self._answer.aclose()


class OwnedDeltaStream(DeltaStream):
    """A delta stream that owns resources before it is first read, which ``answer`` releases on every way out. If it is
    closed before that, ``release`` is called instead, because a generator that was never started runs no ``finally``.
    """

    def __init__(
        self,
        answer: AsyncGenerator[Delta, None],
        release: Callable[[], Awaitable[None]],
        direct_path: DirectPath | None = None,
    ) -> None:
        super().__init__(answer, direct_path or DirectPath())
        self._release: Callable[[], Awaitable[None]] | None = release

    def asend(self, value: None) -> Coroutine[Any, Any, Delta]:
        """See ``AsyncGenerator``."""
        self._release = None
        return super().asend(value)

    async def athrow(self, error: Any, *older: Any) -> Delta:
        """See ``AsyncGenerator``."""
        await self._release_once()
        return await super().athrow(error, *older)

    async def aclose(self) -> None:
        """See ``AsyncGenerator``."""
        await self._release_once()
        await super().aclose()

    async def _release_once(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            await release()


@dataclass(frozen=True, slots=True)
class ResponseConsumer:
    """The consumer of a response: ``trace_context`` is the caller's, ``direct_path`` that of its deltas, and
    ``prompt_group`` is shared with the other prompts of its request. One that resumes an earlier answer has a
    ``cursor``, and waits until ``deadline``, by the monotonic clock.
    """

    trace_context: Context = field(default_factory=Context)
    direct_path: DirectPath = field(default_factory=DirectPath)
    prompt_group: PromptGroup = field(default_factory=PromptGroup)
    cursor: StreamCursor | None = None
    deadline: float | None = None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until its deadline; None if it has none."""
        return seconds_until(self.deadline)


def seconds_until(moment: float | None) -> float | None:
    """Seconds until a ``moment`` of the monotonic clock, 0 if that is over; None for None."""
    return None if moment is None else max(0.0, moment - monotonic())
