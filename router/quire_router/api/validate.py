"""The one validator: a request of either API becomes one ``GenerationRequest`` a prompt, or is refused with the
parameter at fault.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from secrets import randbits
from typing import TypeVar

from quire_proto.errors import ErrorCode, QuireError, invalid
from quire_proto.sampling import check_length
from quire_proto.text.model_text import ModelTokenizer

from quire_router.admission.reason import RefusalReason
from quire_router.api.backend import ModelLimitsView
from quire_router.api.calling import drop_unsupported_by_template, structured_of, template_options
from quire_router.api.conversation import as_template_sees_them
from quire_router.api.identity import Identity
from quire_router.api.sampling import check_ids, sampling_of
from quire_router.api.schemas import ChatRequest, CompletionRequest, GenerationBody, TemplatedBody
from quire_router.api.size import check_response_size
from quire_router.api.strict import StrictModel, ignored_parameters, unknown_parameter
from quire_router.generation import GenerationRequest, prompt_request_id

BodyT = TypeVar("BodyT", bound=StrictModel)

COMPLETION_MAX_TOKENS = 16
RETRY_UNREADY = 2.0  # seconds
_MOST_PRIORITY = 2**31


class Validator:
    """Checks requests against the models' texts and what their engines can take. ``allow_priority`` lets clients set
    the priority of their requests, and with ``refuse_unknown`` an unknown parameter is refused instead of ignored.
    """

    def __init__(
        self,
        texts: Mapping[str, ModelTokenizer],
        limits: Callable[[str], ModelLimitsView | None],
        *,
        allow_priority: bool = False,
        refuse_unknown: bool = False,
    ) -> None:
        self._texts = texts
        self._limits = limits
        self._allow_priority = allow_priority
        self._refuse_unknown = refuse_unknown

    def drop_ignored(self, request: BodyT, model: str) -> tuple[BodyT, tuple[str, ...]]:
        """What of a request its model can take, which is then validated, and the names of the parameters that are
        ignored, each once. Raises ``QuireError`` NOT_FOUND for the model, and INVALID for what may not be ignored.
        """
        ignored = []
        for param, is_known in ignored_parameters(request):
            if self._refuse_unknown and not is_known:
                raise unknown_parameter(param)
            ignored.append(param)
        text = self.text(model)
        if isinstance(request, TemplatedBody):
            request, more = drop_unsupported_by_template(request, text)
            ignored += more
        return request, tuple(dict.fromkeys(ignored))

    def generations(self, request: GenerationBody, request_id: str, caller: Identity) -> tuple[GenerationRequest, ...]:
        """The request in tokens, one for each prompt, every default filled in. Raises ``QuireError``."""
        text = self.text(request.model)
        limits = self._limits(request.model)
        if limits is None:
            raise model_not_ready(request.model)
        prompts, output_limit = _prompts(request, text, limits)
        first = GenerationRequest(
            request_id=request_id,
            model=request.model,
            prompt_token_ids=prompts[0],
            params=sampling_of(request, output_limit, text, limits, structured_of(request, text, prompts[0])),
            stop=tuple(request.stop),
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            echo=isinstance(request, CompletionRequest) and bool(request.echo),
            priority=self._priority(request, caller),
            operation="chat" if isinstance(request, ChatRequest) else "text_completion",
            tenant=caller.tenant,
            cache_salt=caller.cache_salt,
            stream=bool(request.stream),
        )
        generations = tuple(_for_prompt(first, number, prompt) for number, prompt in enumerate(prompts))
        if request.seed is None:
            generations = tuple(map(_seeded, generations))
        check_response_size(generations)
        return generations

    def text(self, model: str) -> ModelTokenizer:
        """A configured model's text. Raises ``QuireError`` NOT_FOUND."""
        text = self._texts.get(model)
        if text is None:
            raise unknown_model(model)
        return text

    def _priority(self, request: GenerationBody, caller: Identity) -> int:
        """The tenant's, and what the request adds to it."""
        own = request.priority or 0
        if own and not (self._allow_priority or caller.policy.allow_priority):
            raise invalid("priority", "priority is not taken from clients here; only 0 is.")
        priority = own + caller.policy.priority
        if not -_MOST_PRIORITY <= priority < _MOST_PRIORITY:
            raise invalid("priority", f"priority must be between {-_MOST_PRIORITY} and {_MOST_PRIORITY - 1}.")
        return priority


def unknown_model(model: str) -> QuireError:
    """The refusal of a model that is not configured."""
    message = f"There is no model named {model[:128]!r} here; the list of models says which there are."
    return QuireError(ErrorCode.NOT_FOUND, message, param="model", reason="model_not_found")


def model_not_ready(model: str) -> QuireError:
    """The refusal of a model that no engine has offered yet."""
    message = f"No engine is ready for the model {model!r}."
    return QuireError(ErrorCode.UNAVAILABLE, message, retry_after=RETRY_UNREADY, reason=RefusalReason.NONE_READY)


def _for_prompt(first: GenerationRequest, number: int, prompt: Sequence[int]) -> GenerationRequest:
    """The same request for another of its prompts, under a name of its own."""
    if number == 0:
        return first
    return replace(first, request_id=prompt_request_id(first.request_id, number), prompt_token_ids=prompt)


def _seeded(generation: GenerationRequest) -> GenerationRequest:
    return replace(generation, params=replace(generation.params, seed=randbits(64)))


def _prompts(request: GenerationBody, text: ModelTokenizer, limits: ModelLimitsView) -> tuple[list[Sequence[int]], int]:
    """The tokens of each prompt, and how many each output may have."""
    if isinstance(request, ChatRequest):
        return _conversation(request, text, limits)
    assert isinstance(request, CompletionRequest)
    output_limit, prompts = COMPLETION_MAX_TOKENS, []
    for number, given in enumerate(request.prompt):
        name = f"prompt[{number}]" if len(request.prompt) > 1 else "prompt"
        with _calling_the_prompt(name):
            tokens = text.encode(given, limits.max_model_len) if isinstance(given, str) else given
        output_limit = _checked_limit(request, name, len(tokens), COMPLETION_MAX_TOKENS, limits)
        check_ids(name, tokens, limits)
        prompts.append(array("i", tokens))
    return [*prompts], output_limit


def _conversation(
    request: ChatRequest, text: ModelTokenizer, limits: ModelLimitsView
) -> tuple[list[Sequence[int]], int]:
    tools = [tool.as_template_sees_it() for tool in request.offered]
    options = template_options(request.chat_template_kwargs, request.reasoning_effort, text)
    with _calling_the_prompt("messages"):
        prompt = text.encode_chat(
            as_template_sees_them(request.messages), limits.max_model_len, tools=tools, options=options
        )
    rest = max(1, limits.max_model_len - len(prompt))
    return [array("i", prompt)], _checked_limit(request, "messages", len(prompt), rest, limits)


def _checked_limit(
    request: GenerationBody, param: str, prompt_tokens: int, default: int, limits: ModelLimitsView
) -> int:
    """The most output tokens: what the client said, or ``default``. ``param`` is what this API calls the prompt."""
    given = request.output_limit
    if given is not None and given < 1:
        raise invalid("max_tokens", "max_tokens must be at least 1.")
    output_limit = default if given is None else given
    with _calling_the_prompt(param):
        check_length(prompt_tokens, output_limit, limits.max_model_len)
    return output_limit


@contextmanager
def _calling_the_prompt(name: str) -> Iterator[None]:
    """Refusals of the prompt name it as this API does."""
    try:
        yield
    except QuireError as error:
        raise invalid(name if error.param == "prompt" else error.param or name, error.message) from None
