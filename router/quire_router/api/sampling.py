"""A request's fields as ``SamplingParams``, and what excludes each other beyond them. The ranges are quire_proto's."""

from collections.abc import Sequence

from quire_proto.errors import QuireError, invalid
from quire_proto.sampling import SamplingParams
from quire_proto.structured import Structured
from quire_proto.text.bad_words import encode_bad_words
from quire_proto.text.model_text import ModelTokenizer

from quire_router.api.backend import ModelLimitsView
from quire_router.api.schemas import GenerationBody

_AS_THEY_ARE = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "n",
    "length_penalty", "early_stopping", "min_tokens", "ignore_eos", "seed",
)  # fmt: skip
_ALL_TOKENS = -1  # vLLM's other word for top_k 0


def sampling_of(
    request: GenerationBody,
    max_tokens: int,
    text: ModelTokenizer,
    limits: ModelLimitsView,
    structured: Structured | None,
) -> SamplingParams:
    """How the request's tokens are drawn; what it does not say has its default. ``structured`` is what the output is
    held to. Raises ``QuireError``.
    """
    given = {name: value for name in _AS_THEY_ARE if (value := getattr(request, name)) is not None}
    params = SamplingParams(
        max_tokens=max_tokens,
        top_k=_top_k(request.top_k or 0),
        best_of=request.drawn or 0,
        beam_width=request.width,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=tuple(sorted((request.logit_bias or {}).items())),
        bad_words=_bad_words(request, text),
        logprobs=request.output_logprobs,
        prompt_logprobs=request.all_prompt_logprobs,
        structured=structured,
        **given,
    )
    _check_ids_of(params, limits)
    _check_search(request, params)
    return params


def check_stream(request: GenerationBody) -> None:
    """Raises ``QuireError`` where the answer has parts that cannot come piece by piece as the OpenAI API has them."""
    if not request.stream:
        return
    whole = {
        "best_of": (request.drawn or 0) > (request.n or 1),
        "use_beam_search": bool(request.use_beam_search),
        "beam_width": bool(request.beam_width),
        "prompt_logprobs": request.prompt_logprobs is not None,
    }
    for param, is_asked in whole.items():
        if is_asked:
            raise _excluded(param, "stream")


def check_ids(param: str, token_ids: Sequence[int], limits: ModelLimitsView) -> None:
    """Raises ``QuireError`` for a token id that the model does not have."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
        raise invalid(param, f"{param} holds a token id outside of this model's vocabulary of {limits.vocab_size}.")


def _top_k(given: int) -> int:
    return 0 if given == _ALL_TOKENS else given


def _bad_words(request: GenerationBody, text: ModelTokenizer) -> tuple[tuple[int, ...], ...]:
    given = request.bad_words or []
    as_tokens = tuple(tuple(word) for word in given if not isinstance(word, str))
    return encode_bad_words([word for word in given if isinstance(word, str)], text) + as_tokens


def _check_ids_of(params: SamplingParams, limits: ModelLimitsView) -> None:
    check_ids("stop_token_ids", params.stop_token_ids, limits)
    check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], limits)
    check_ids("bad_words", [token_id for word in params.bad_words for token_id in word], limits)


def _check_search(request: GenerationBody, params: SamplingParams) -> None:
    """A search compares whole outputs, so that none may end for its text."""
    if params.beam_width and request.stop:
        raise _excluded("beam_width", "stop")


def _excluded(param: str, other: str) -> QuireError:
    return invalid(param, f"{param} and {other} exclude each other.")
