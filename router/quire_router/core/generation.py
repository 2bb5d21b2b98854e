"""One request as the rooms behind the API see it: validated, in tokens; and the pieces of its answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time

from quire_proto.sampling import FinishReason, SamplingParams, TokenLogprobs

PROMPT_SEPARATOR = "_"
LOGPROBS_PER_TOKEN = 6
"""Log-probabilities that take a router as long to write as a token of a stream: 6 µs each, against 35 to 40."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that passed the validator.

    ``request_id`` is opaque, ``[A-Za-z0-9_-]{1,64}``. ``prompt_token_ids`` come from the validator as
    ``array("i")``: journals keep them for long, and a list takes nine times as much. ``params`` has every default
    filled in, also a seed. ``stop`` strings are the router's: engines know no text. ``tenant`` is an opaque name of who
    asks, the empty string when keys are not configured; ``cache_salt`` (0 to 32 bytes) keeps tenants' prefix caches
    apart. ``include_stop`` leaves the stop string that was found in the text, ``skip_special_tokens`` leaves special
    tokens out of it. ``echo`` is the API's: it begins each choice's text with the prompt's. Requests with a smaller
    ``priority`` go first where engines run by priority. ``operation`` is ``chat`` or
    ``text_completion``, for traces and metrics.

    ``shape`` is what the API has to know to write the answer again for a client that comes back: JSON that only the API
    reads. ``parts`` are the ids of all prompts' generations where a request has several, in the first one. ``digest``
    tells apart requests that came with one ``Idempotency-Key``, hexadecimal, empty without one. A ``background``
    request runs on without a listener. Requests of one ``session`` share their history; it is opaque and never shown.
    ``deadline`` is when the answer must have ended, in seconds since 1970. ``retention`` is for how many seconds its
    record is kept after its end, 0 for the shortest time in which followers see it; None for the router's default.
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
    shape: str = ""
    parts: tuple[str, ...] = ()
    digest: str = ""
    background: bool = False
    session: str = ""
    deadline: float | None = None
    retention: float | None = None

    @property
    def max_cost(self) -> int:
        """What the request counts for at most (``cost``): with the longest output of all choices that are drawn."""
        return self.cost(len(self.prompt_token_ids), self.params.max_tokens * self.params.num_sequences)

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
    """A token's own log-probability and those of the most probable tokens."""
    return 0 if most_probable is None else 1 + most_probable


def prompt_request_id(request_id: str, number: int) -> str:
    """The id of another prompt's generation, after the first; no request's own has ``CHUNK_TOKENS`` in it."""
    return f"{request_id}{PROMPT_SEPARATOR}{number}"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request consumed; ``cached_tokens`` are part of ``prompt_tokens``."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


NO_USAGE = Usage(0, 0)
"""Where nothing is known yet."""


@dataclass(slots=True)  # made for every token: a frozen one takes five times as long to make, but none is ever changed
class Delta:
    """The next piece of one choice of an answer. Choices are numbered from 0 and their pieces come in any order.

    ``finish_reason`` is set in the last piece of a choice, and ``usage`` in the last piece of the answer, and only
    there. ``token_ids`` may run ahead of ``text``: the text of an unfinished character, or of what may become a stop
    string, comes later. ``logprobs`` has one entry for each of ``token_ids`` where they were asked for.
    ``prompt_logprobs`` are those of the prompt's tokens from the second on, all of them, in the answer's first piece.
    ``score`` is a beam's, with its finish reason. What is ``told`` the client has had before: it only brings whoever
    writes the answer to where the client stands. ``route`` says where the request runs and why, in the first piece of
    an attempt, where the operator asked for that.
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


# The state that the prompts of one request share.


@dataclass(slots=True)
class PromptGroup:
    """One for all prompts of a request that run here. Its answer has ``begun`` once the client was told anything of it,
    so that the client may come back for each of them. Once one ``failed`` for good nobody comes back for the others.
    """

    begun: bool = False
    failed: bool = False
