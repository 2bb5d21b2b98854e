"""Requests that a gateway sends to a server itself, as far as the router has to know them to say to which one:
``read_forwarded`` reads a body, ``forwarded_generations`` has the prompts in tokens, as the server will.

The server judges the request, not the router: what the router's own API would refuse, such as an image or a parameter
that only the server knows, is no error here. Its prompt is not known then, and it is placed by load alone. Only a body
that is no JSON, and one without a model, are refused.
"""

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from pydantic import ConfigDict
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.pooling import Task
from quire_proto.sampling import SamplingParams

from quire_router.api.auth import Identity
from quire_router.api.prepared_request import RequestOptions, opaque_session
from quire_router.api.schemas.anthropic import MessagesRequest
from quire_router.api.schemas.base import ModelName, StrictModel
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest, GenerationBody, TemplatedBody
from quire_router.api.schemas.pooling import EmbeddingRequest, PoolingBody, RerankRequest, ScoreRequest
from quire_router.api.schemas.response_items import History
from quire_router.api.schemas.responses import ResponsesRequest
from quire_router.api.tools_and_reasoning import drop_unsupported_by_template
from quire_router.api.validation import Validator
from quire_router.core.complexity import check_complexity
from quire_router.core.generation import GenerationRequest

BYTES_PER_TOKEN = 4
"""Of a prompt whose tokens are not known: as of English text."""

ASSUMED_OUTPUT_TOKENS = 1024
"""Of a request that is not understood and names no limit: so much is charged until its response says more."""

_MAX_OUTPUT_TOKENS = 2**20
_MAX_SALT_BYTES = 32
_SALT = "cache_salt"  # of vLLM
Body = GenerationBody | PoolingBody


class _AnyRequest(StrictModel):
    """What requests of all APIs have in common."""

    model_config = ConfigDict(extra="ignore")

    model: ModelName = ""
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None

    @property
    def output_limit(self) -> int:
        """The most tokens of an answer, as far as it says so."""
        given = (self.max_completion_tokens, self.max_output_tokens, self.max_tokens)
        return next(filter(_is_limit, given), ASSUMED_OUTPUT_TOKENS)


def _is_limit(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_OUTPUT_TOKENS


@dataclass(frozen=True, slots=True)
class ForwardedBody:
    """A body of ``size`` bytes for the ``model``. ``request`` is None where the router does not know what it means;
    then its answer has about ``output_limit`` tokens at most.
    """

    model: str
    size: int
    request: Body | None = None
    output_limit: int = ASSUMED_OUTPUT_TOKENS

    @property
    def tasks(self) -> Sequence[Task]:
        """See ``StrictModel``."""
        return () if self.request is None else self.request.tasks

    def with_model(self, model: str) -> Self:
        """See ``StrictModel``."""
        request = None if self.request is None else self.request.with_model(model)
        return replace(self, model=model, request=request)


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """One generation for each prompt of a request, at least one, and how many tokens their prompts have together. Where
    the prompt is not known, that is an estimate, and the generation has no prompt to look up.
    """

    generations: tuple[GenerationRequest, ...]
    prompt_tokens: int

    @property
    def first(self) -> GenerationRequest:
        """The generation of the first prompt, which stands for all of them."""
        return self.generations[0]

    @property
    def max_cost(self) -> int:
        """What it counts for at most, in limits: see ``GenerationRequest.max_cost``."""
        generations = self.generations
        unseen = self.prompt_tokens - sum(len(each.prompt_token_ids) for each in generations)
        return unseen + sum(each.max_cost for each in generations)

    @property
    def num_sequences(self) -> int:
        """How many sequences it decodes; 1 for prompts that are pooled."""
        return sum(each.params.num_sequences for each in self.generations if each.pooling is None) or 1


def _response(body: bytes) -> Body:
    request = ResponsesRequest.from_json(body)
    return request.to_chat(History(), "")


_READERS: Final[Mapping[str, Callable[[bytes], Body]]] = {
    "/v1/chat/completions": ChatRequest.from_json,
    "/v1/completions": CompletionRequest.from_json,
    "/v1/messages": MessagesRequest.chat_from_json,
    "/v1/responses": _response,
    "/v1/embeddings": EmbeddingRequest.from_json,
    "/score": ScoreRequest.from_json,
    "/v1/score": ScoreRequest.from_json,
    "/rerank": RerankRequest.from_json,
    "/v1/rerank": RerankRequest.from_json,
    "/v2/rerank": RerankRequest.from_json,
}


_PREFIX = re.compile(r"(?!/metrics)(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)*")
"""What a gateway may take away from the beginning of a path. Servers have all below ``/metrics`` be one page."""


def api_path(path: str) -> str:
    """The path of the API in a request's path, which may have something before it that a gateway takes away; empty if
    there is none.
    """
    path = path.partition("?")[0]
    known = max((known for known in _READERS if path.endswith(known)), key=len, default="")
    return known if _PREFIX.fullmatch(path.removesuffix(known)) else ""


def read_forwarded(path: str, body: bytes) -> ForwardedBody:
    """Reads the body of a request to a ``path`` of ``api_path``. Raises ``QuireError`` INVALID if it is not a JSON
    object, or names no model.
    """
    read = _READERS.get(path)
    try:
        if read is not None:
            request = read(body)
            limit = request.output_limit if isinstance(request, GenerationBody) else None
            return ForwardedBody(
                request.model,
                len(body),
                request.model_copy(update={"priority": None}),
                limit if limit is not None and _is_limit(limit) else ASSUMED_OUTPUT_TOKENS,
            )
    except QuireError:
        check_complexity(body)
    named = _AnyRequest.from_json(body)
    return ForwardedBody(named.model, len(body), output_limit=named.output_limit)


def forwarded_generations(  # noqa: PLR0917 - as ``ApiService.prepare``
    body: ForwardedBody,
    validator: Validator,
    request_id: str,
    caller: Identity,
    options: RequestOptions,
    target: str = "",
) -> ForwardedRequest:
    """Returns the prompts of a request, for the model ``target`` where it names what stands for several. Raises
    ``QuireError`` if its model is not known, or not ready.
    """
    request = body.request
    if request is not None:
        try:
            generations = _generations(request, validator, request_id, caller, target)
        except QuireError as error:
            if error.code is not ErrorCode.INVALID:
                raise
        else:
            salt, label = _salt_of(request), options.session or getattr(request, "prompt_cache_key", None) or ""
            session = opaque_session(caller, label) if label else ""
            generations = tuple(replace(each, cache_salt=salt, session=session) for each in generations)
            return ForwardedRequest(generations, sum(len(each.prompt_token_ids) for each in generations))
    model, lora = validator.resolve(target or body.model)
    unknown = GenerationRequest(
        request_id=request_id,
        model=model,
        lora=lora,
        prompt_token_ids=array("i", [0]),  # less than a block: nothing is looked up in the prefix index
        params=SamplingParams(max_tokens=body.output_limit),
        tenant=caller.tenant,
        session=opaque_session(caller, options.session) if options.session else "",
        served_name=body.model if target else "",
    )
    return ForwardedRequest((unknown,), max(1, body.size // BYTES_PER_TOKEN))


def _salt_of(request: Body) -> bytes:
    """What keeps the request's blocks apart at the server: what the client has written, as nobody else writes any."""
    salt = (request.as_sent.model_extra or {}).get(_SALT)
    return salt.encode()[:_MAX_SALT_BYTES] if isinstance(salt, str) else b""


def _generations(
    request: Body, validator: Validator, request_id: str, caller: Identity, target: str
) -> Sequence[GenerationRequest]:
    if isinstance(request, PoolingBody):
        return validator.pooling(request, request_id, caller, target).generations
    if isinstance(request, TemplatedBody):
        request, _ = drop_unsupported_by_template(request, validator.tokenizer(target or request.model))
    return validator.generations(request, request_id, caller, target)
