"""A request between its body and its response. ``RequestOptions`` come outside its body: idempotency key, session and
timeout. ``PreparedRequest`` is a validated request, new or stored, with all that writing its response needs. Below it
are the protocols through which the API sees the engine pool and the runner of requests.
"""

import logging
import math
import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol

from quire_proto.convert import sampling_to_proto
from quire_proto.errors import invalid
from quire_proto.structured_output import Structured, StructuredKind
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.text.tool_arguments import parameter_types
from quire_proto.units import seconds_of

from quire_router.api.auth import Identity
from quire_router.api.schemas.openai import ChatRequest, GenerationBody
from quire_router.core.generation import Delta, GenerationRequest, LoRA, PromptGroup, StreamCursor
from quire_router.core.response_options import ReasoningPlacement, ResponseOptions
from quire_router.engines.settings import ServedLoRA, ServedModelLimits
from quire_router.journal.base import RequestRecord

log = logging.getLogger(__name__)

MAX_LABEL_CHARACTERS = 255
IDEMPOTENCY_KEY = "idempotency-key"
_LABEL = re.compile(f"[ -~]{{1,{MAX_LABEL_CHARACTERS}}}")
_SECONDS = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?", re.ASCII)
_ID_BYTES = 16
_TOKENS_PER_CHUNK = 4096  # tokens


def build_response_options(request: GenerationBody, max_tokens: int) -> ResponseOptions:
    """Returns the options that a request asks for whose output may have ``max_tokens``. A response that is not streamed
    always has its usage.
    """
    return ResponseOptions(
        structured_param=_structured_param(request.structured),
        include_usage=request.include_usage or not request.stream,
        continuous_usage=request.continuous_usage,
        logprobs=request.output_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        tools=_callable_tool_names(request),
        tool_types=_tool_types(request),
        reasoning=_reasoning_placement(request),
        api=request.api,
        limited_by_context=request.output_limit is not None and request.output_limit > max_tokens,
    )


def _callable_tool_names(request: GenerationBody) -> tuple[str, ...]:
    return tuple(tool.function.name for tool in request.callable_tools) if isinstance(request, ChatRequest) else ()


def _structured_param(structured: Structured | None) -> str:
    return "" if structured is None or structured.kind is StructuredKind.GRAMMAR else structured.param


def _tool_types(request: GenerationBody) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    tools = request.callable_tools if isinstance(request, ChatRequest) else ()
    types = {tool.function.name: parameter_types(tool.function.schema_of_arguments) for tool in tools}
    return {name: each for name, each in types.items() if each}


def _reasoning_placement(request: GenerationBody) -> ReasoningPlacement:
    """Output that follows a context-free grammar of the client has no reasoning before it."""
    if not isinstance(request, ChatRequest) or request.separate_reasoning is False:
        return ReasoningPlacement.INLINE
    if request.structured is not None and request.structured.kind is StructuredKind.GRAMMAR:
        return ReasoningPlacement.INLINE
    return ReasoningPlacement.HIDDEN if request.include_reasoning is False else ReasoningPlacement.SEPARATE


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One generation for each of the request's prompts (at least one), how its response is written, and the tokenizer
    of its model. With ``event_ids`` the events of its stream have ids. ``ignored`` are the parameters that it named and
    that change nothing.
    """

    generations: tuple[GenerationRequest, ...]
    response_options: ResponseOptions
    tokenizer: ModelTokenizer
    event_ids: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def first(self) -> GenerationRequest:
        """The generation of the first prompt; the others differ from it in prompt, id and seed."""
        return self.generations[0]

    @property
    def num_choices(self) -> int:
        """The number of choices of the response: those of all prompts, in order."""
        return len(self.generations) * self.first.params.n

    @property
    def has_logprobs(self) -> bool:
        """Whether the response shows log-probabilities, of its output or of its prompts."""
        return self.response_options.logprobs is not None or self.response_options.prompt_logprobs is not None

    @property
    def has_reasoning(self) -> bool:
        """Whether a choice's text may have reasoning in it that is to be separated from its content."""
        inline = self.response_options.reasoning is ReasoningPlacement.INLINE
        return self.first.operation == "chat" and self.tokenizer.reasoning is not None and not inline

    @property
    def is_parsed(self) -> bool:
        """Whether a choice's text is more than its content: there may be reasoning or tool calls in it."""
        return self.has_reasoning or (bool(self.response_options.tools) and self.tokenizer.tool_format is not None)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """``key`` is the idempotency key and ``session`` the client's name for its session, both empty for none.
    ``timeout`` is how many seconds the response may take; None when the client did not say. ``target`` is the model
    that the response was of which the request goes on from; empty if there is none.
    """

    key: str = ""
    session: str = ""
    timeout: float | None = None
    target: str = ""

    def request_id(self, caller: Identity, secret: bytes = b"") -> str:
        """Returns the request id that follows from the key, the same at every router; empty without a key. Nobody can
        compute it without the ``secret``.
        """
        return _opaque_id("idempotency", caller.tenant, self.key, secret) if self.key else ""


NO_OPTIONS = RequestOptions()


def read_label(name: str, values: Sequence[str]) -> str:
    """Returns the one value of a header or of metadata; empty when there is none. Raises ``QuireError`` INVALID."""
    if not values:
        return ""
    if len(values) > 1:
        raise invalid(name, f"There is more than one {name}.")
    if not _LABEL.fullmatch(values[0]):
        raise invalid(name, f"{name} must have 1 to {MAX_LABEL_CHARACTERS} printable ASCII characters.")
    return values[0]


def read_timeout(name: str, values: Sequence[str]) -> float | None:
    """Returns the seconds above 0 of a duration, which may have units; None when there is none. Raises ``QuireError``
    INVALID.
    """
    if not values:
        return None
    if len(values) > 1:
        raise invalid(name, f"There is more than one {name}.")
    seconds = float(values[0]) if _SECONDS.fullmatch(values[0]) else seconds_of(values[0])
    if not seconds or seconds == math.inf:
        raise invalid(name, f"{name} must be a number of seconds above 0, such as 30 or 2.5, or a duration such as 5m.")
    return seconds


def options_from_headers(values: Callable[[str], Sequence[str]]) -> RequestOptions:
    """Returns the options of an HTTP request; ``values`` returns every value of a header. Raises ``QuireError``."""
    return RequestOptions(
        key=read_label(IDEMPOTENCY_KEY, values(IDEMPOTENCY_KEY)),
        session=read_label("x-session-id", values("x-session-id")),
        timeout=read_timeout("x-request-timeout", values("x-request-timeout")),
    )


def options_from_metadata(values: Callable[[str], Sequence[str]], remaining: float | None) -> RequestOptions:
    """Returns the options of a gRPC call, whose deadline is in ``remaining`` seconds. Raises ``QuireError``."""
    return RequestOptions(
        key=read_label(IDEMPOTENCY_KEY, values(IDEMPOTENCY_KEY)),
        session=read_label("session-id", values("session-id")),
        timeout=remaining,
    )


def apply_options(
    request: GenerationBody,
    prepared: PreparedRequest,
    options: RequestOptions,
    caller: Identity,
    *,
    timeout: float | None,
    retention: float | None,
) -> PreparedRequest:
    """Returns the request with its options, and with what is stored to write its response again. No request may take
    more than ``timeout`` seconds, and its record is kept for ``retention`` seconds, unless it is not to be stored.
    Raises ``QuireError``.
    """
    several = len(prepared.generations) > 1
    if request.background and several:
        raise invalid("background", "background takes one prompt, not a list of them.")
    if request.background and request.store is False:
        raise invalid(
            "store", "The answer of a background request is kept until it is asked for: store cannot be false."
        )
    seconds = min((each for each in (options.timeout, timeout) if each is not None), default=math.inf)
    session = options.session or request.prompt_cache_key or ""
    first = replace(
        prepared.first,
        response_options=prepared.response_options.to_json(),
        parts=tuple(each.request_id for each in prepared.generations) if several else (),
        background=bool(request.background),
        session=opaque_session(caller, session) if session else "",
        deadline=prepared.first.created + seconds if math.isfinite(seconds) else None,
        retention=0 if request.store is False else retention,
    )
    if options.key:
        first = replace(first, digest=_digest(first, prepared, request))
    generations = (first, *(_with_shared_fields(first, each) for each in prepared.generations[1:]))
    if options.key and request.seed is None:
        # Without Redis two routers may both run it, and a client that has part of one response must be able to resume
        # with the other.
        generations = tuple(map(_seed_from_id, generations))
    return replace(prepared, generations=generations)


def _digest(first: GenerationRequest, prepared: PreparedRequest, request: GenerationBody) -> str:
    """Returns a digest of all that makes responses or what is kept of them differ, and not of how they are sent.
    Parameters that the client left out do not count: their defaults may follow from the engines, which change.
    """
    digest = blake2b(digest_size=16, person=b"quire digest")
    unlike = {"include_usage": False, "continuous_usage": False}
    response_options = prepared.response_options.model_copy(update=unlike).to_json()
    params = sampling_to_proto(first.params)
    if request.seed is None:
        params.ClearField("seed")
    if request.output_limit is None:
        params.ClearField("max_tokens")
    flags = (first.include_stop, first.skip_special_tokens, first.echo, first.background, request.seed is not None)
    words = (first.model_name, first.operation, first.stop, first.priority, flags, response_options)
    prompts = "[" + ", ".join(_list_repr(generation.prompt_token_ids) for generation in prepared.generations) + "]"
    parts = [repr(words).encode(), params.SerializeToString(deterministic=True), prompts.encode()]
    kept = (request.store is False, sorted((request.metadata or {}).items()))
    if any(kept) or first.conversation:
        parts += [repr(kept).encode(), first.conversation.encode("utf-8", "surrogatepass")]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _list_repr(token_ids: Sequence[int]) -> str:
    """Returns ``repr`` of a list, made in chunks, between which other threads can run."""
    parts = (
        repr(list(token_ids[start : start + _TOKENS_PER_CHUNK]))[1:-1]
        for start in range(0, len(token_ids), _TOKENS_PER_CHUNK)
    )
    return f"[{', '.join(parts)}]"


def _with_shared_fields(first: GenerationRequest, other: GenerationRequest) -> GenerationRequest:
    """Returns the generation of another prompt with what it shares with the first one."""
    return replace(
        other,
        response_options=first.response_options,
        digest=first.digest,
        session=first.session,
        deadline=first.deadline,
        retention=first.retention,
        parts=(),
    )


def _seed_from_id(generation: GenerationRequest) -> GenerationRequest:
    """Derives the seed from the id, and so from the key."""
    digest = blake2b(generation.request_id.encode(), digest_size=8, person=b"quire seed").digest()
    return replace(generation, params=replace(generation.params, seed=int.from_bytes(digest, "little")))


def opaque_session(caller: Identity, label: str) -> str:
    """Returns an opaque name for a tenant's session."""
    return _opaque_id("session", caller.tenant, label)


def _opaque_id(kind: str, tenant: str, label: str, secret: bytes = b"") -> str:
    """Returns an opaque name for a tenant's ``label``."""
    words = f"{kind}\0{tenant}\0{label}".encode()
    return blake2b(words, key=secret, digest_size=_ID_BYTES, person=b"quire label").hexdigest()


class EnginePoolView(Protocol):
    """What is known of the engines now."""

    def limits(self, model: str) -> ServedModelLimits | None:
        """Returns the limits of a configured model; None while they are unknown."""
        ...

    def ready(self, model: str, lora: LoRA | None = None) -> int:
        """Returns the number of engines that can run the model now, or an adapter of it."""
        ...

    def num_sleeping(self, model: str) -> int:
        """Returns the number of engines of the model that are woken up when they are needed."""
        ...

    def are_names_of_one(self, models: Collection[str]) -> bool:
        """Returns whether these are names of one model; False if there are none."""
        ...

    def loras(self) -> Mapping[str, ServedLoRA]:
        """Returns all adapters by their names, as far as they are known."""
        ...

    def knows_loras(self) -> bool:
        """Returns whether all adapters are known: every engine has said which it has."""
        ...

    async def wait_for_lora(self, name: str, seconds: float) -> None:
        """Waits until an adapter of this name is known, or all are, so long at most."""
        ...


class Runner(Protocol):
    """Runs validated requests; see ``requests.runner.RequestRunner``. Every method raises ``QuireError``."""

    def run(self, generation: GenerationRequest) -> AsyncGenerator[Delta]:
        """Yields the deltas; the last of each choice has its finish reason, and the last of all the usage. Closing or
        cancelling the generator cancels the request.
        """
        ...

    async def run_once(
        self, generation: GenerationRequest, prompt_group: PromptGroup | None = None
    ) -> AsyncGenerator[Delta] | None:
        """As ``run``, but returns None when there is a record of this id already, which can be resumed. For requests
        whose id follows from an idempotency key, and for one of several prompts, which share ``prompt_group``.
        """
        ...

    async def start(self, generation: GenerationRequest) -> bool:
        """Runs a background request to its end without a consumer. Returns once its record is written, False when there
        is one of this id already.
        """
        ...

    async def record(self, request_id: str) -> RequestRecord | None:
        """Returns the record of a request, running anywhere or ended; None when there is none."""
        ...

    async def statuses(self, request_ids: Sequence[str], *, confirm_missing: bool = True) -> list[RequestRecord | None]:
        """Returns the records of several requests without prompts and deltas; see ``Journal.statuses``. A background
        request without a lease is claimed.
        """
        ...

    def resume(
        self, record: RequestRecord, cursor: StreamCursor, deadline: float | None = None
    ) -> AsyncGenerator[Delta]:
        """Yields the response to an earlier request from its first delta on; deltas before ``cursor`` are ``replayed``.
        Follows the router that runs the request, and claims a request that none runs. Raises ``QuireError``, DEADLINE
        among others at ``deadline``, by the monotonic clock. Closing the generator, as that error, only ends the
        request if it was claimed here, and then leaves it to be resumed again.
        """
        ...

    async def delete(self, request_id: str) -> bool:
        """Forgets a request that has ended. One that runs is ended as by ``cancel`` and forgotten soon after. Returns
        False when there is no record of it.
        """
        ...

    async def cancel(self, request_id: str) -> bool:
        """Ends a request that runs, here or anywhere, with ``FinishReason.ABORT``. Returns False when none runs."""
        ...
