"""The one validator: a request of either API becomes a ``Generation``, or is refused with the parameter at fault."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from secrets import randbits

from quire_proto.errors import ErrorCode, QuireError, invalid
from quire_proto.sampling import SamplingParams, check_length
from quire_proto.text.model_text import ModelText

from quire_router.api.backend import Limits
from quire_router.api.identity import Caller
from quire_router.api.schemas import ChatRequest, CompletionRequest, GenerationRequest
from quire_router.generation import Generation

COMPLETION_MAX_TOKENS = 16
RETRY_UNREADY = 2.0  # seconds


class Validator:
    """Checks requests against the models' texts and what their engines can take."""

    def __init__(self, texts: Mapping[str, ModelText], limits: Callable[[str], Limits | None]) -> None:
        self._texts = texts
        self._limits = limits

    def generation(self, request: GenerationRequest, request_id: str, caller: Caller) -> Generation:
        """The request in tokens, every default filled in. Raises ``QuireError``."""
        text = self.text(request.model)
        limits = self._limits(request.model)
        if limits is None:
            raise unready(request.model)
        prompt, output_limit = _prompt(request, text, limits)
        return Generation(
            request_id=request_id,
            model=request.model,
            prompt_token_ids=array("i", prompt),
            params=_sampling(request, output_limit, limits),
            stop=tuple(request.stop),
            operation="chat" if isinstance(request, ChatRequest) else "text_completion",
            tenant=caller.tenant,
            cache_salt=caller.cache_salt,
            stream=bool(request.stream),
        )

    def text(self, model: str) -> ModelText:
        """A configured model's text. Raises ``QuireError`` NOT_FOUND."""
        text = self._texts.get(model)
        if text is None:
            raise unknown_model(model)
        return text


def unknown_model(model: str) -> QuireError:
    """The refusal of a model that is not configured."""
    return QuireError(ErrorCode.NOT_FOUND, f"There is no model named {model[:128]!r} here.", param="model")


def unready(model: str) -> QuireError:
    """The refusal of a model that no engine has offered yet."""
    message = f"No engine is ready for the model {model!r}."
    return QuireError(ErrorCode.UNAVAILABLE, message, retry_after=RETRY_UNREADY)


def _prompt(request: GenerationRequest, text: ModelText, limits: Limits) -> tuple[list[int], int]:
    """The prompt's tokens, and how many the output may have."""
    if isinstance(request, ChatRequest):
        messages = [message.as_template_sees_it() for message in request.messages]
        with _calling_the_prompt("messages"):
            prompt = text.render_chat(messages, limits.max_model_len)
        rest = max(1, limits.max_model_len - len(prompt))
        return prompt, _checked_limit(request, "messages", len(prompt), rest, limits)
    assert isinstance(request, CompletionRequest)
    given = request.prompt
    prompt = text.encode(given, limits.max_model_len) if isinstance(given, str) else given
    output_limit = _checked_limit(request, "prompt", len(prompt), COMPLETION_MAX_TOKENS, limits)
    _check_ids("prompt", prompt, limits)
    return prompt, output_limit


def _checked_limit(request: GenerationRequest, param: str, prompt_tokens: int, default: int, limits: Limits) -> int:
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


def _sampling(request: GenerationRequest, output_limit: int, limits: Limits) -> SamplingParams:
    stop_token_ids = tuple(request.stop_token_ids or ())
    _check_ids("stop_token_ids", stop_token_ids, limits)
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k or 0,
        seed=randbits(64) if request.seed is None else request.seed,
        max_tokens=output_limit,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
    )


def _check_ids(param: str, token_ids: Sequence[int], limits: Limits) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
        raise invalid(param, f"{param} holds a token id outside of this model's vocabulary of {limits.vocab_size}.")
