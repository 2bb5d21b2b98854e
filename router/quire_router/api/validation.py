"""``Validator``: makes one ``GenerationRequest`` of each prompt of a request, or refuses it with the parameter at
fault. Below it: sampling parameters, and which of them exclude each other. Their ranges are those of ``quire_proto``.
"""

import logging
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from secrets import randbits
from typing import Any, TypeVar

from quire_proto.context_length import check_length
from quire_proto.errors import QuireError, invalid
from quire_proto.pooling import Task
from quire_proto.priority import BEST_EFFORT
from quire_proto.sampling import SamplingParams
from quire_proto.structured_output import Structured
from quire_proto.text.tokenizer import ModelTokenizer, encode_bad_words

from quire_router.admission.model_targets import TargetGroup
from quire_router.api.auth import Identity
from quire_router.api.pooled_requests import PreparedPooling, pooled_requests, wrong_task
from quire_router.api.request_limits import check_response_size
from quire_router.api.schemas.base import StrictModel, ignored_parameters, unknown_parameter
from quire_router.api.schemas.conversation import to_template_messages
from quire_router.api.schemas.openai import (
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    TemplatedBody,
    TemplateOptions,
)
from quire_router.api.schemas.pooling import EmbeddingRequest, PoolingBody
from quire_router.api.tools_and_reasoning import drop_unsupported_by_template, structured_of, template_options
from quire_router.api.truncation import encode_truncated
from quire_router.core.errors import model_not_ready, unknown_model
from quire_router.core.generation import GenerationRequest, LoRA, prompt_request_id
from quire_router.engines.settings import ServedLoRA, ServedModelLimits

log = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=StrictModel)

COMPLETION_MAX_TOKENS = 16
_POOLED = SamplingParams(max_tokens=1)  # nobody reads them
_MIN_PRIORITY = -(2**31)


class Validator:
    """Checks requests against the models' tokenizers and the limits of their engines. A request may name one of
    ``loras`` as its model, or what has ``targets``. ``allow_priority`` lets clients set the priority of their requests,
    and with ``refuse_unknown`` an unknown parameter is refused instead of ignored.
    ``sampling_defaults`` are the fields of ``SamplingParams`` that count for a model where a request is silent.
    """

    def __init__(
        self,
        tokenizers: Mapping[str, ModelTokenizer],
        limits: Callable[[str], ServedModelLimits | None],
        loras: Callable[[], Mapping[str, ServedLoRA]] = dict,
        targets: Mapping[str, TargetGroup] | None = None,
        *,
        allow_priority: bool = False,
        refuse_unknown: bool = False,
        sampling_defaults: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._tokenizers = tokenizers
        self._limits = limits
        self._loras = loras
        self._targets = {} if targets is None else targets
        self._allow_priority = allow_priority
        self._refuse_unknown = refuse_unknown
        self._sampling_defaults = sampling_defaults or {}
        self._warned_of_tools: set[str] = set()

    def drop_ignored(self, request: BodyT, model: str) -> tuple[BodyT, tuple[str, ...]]:
        """Returns the request without what its model ignores, and the names of the ignored parameters, each once.
        Raises ``QuireError`` NOT_FOUND for the model, and INVALID for what may not be ignored.
        """
        ignored = []
        for param, is_known in ignored_parameters(request):
            if self._refuse_unknown and not is_known:
                raise unknown_parameter(param)
            ignored.append(param)
        tokenizer = self.tokenizer(model)
        if isinstance(request, TemplatedBody):
            request, more = drop_unsupported_by_template(request, tokenizer)
            ignored += more
            if "tools" in more:
                self._warn_of_tools(model)
        sent = request.sent_names
        names = {**request.names, **sent}
        if "chat_template_kwargs" in sent:
            names |= dict.fromkeys(
                map("chat_template_kwargs.{}".format, TemplateOptions.model_fields), sent["chat_template_kwargs"]
            )
        named = dict.fromkeys(names.get(param, param) for param in ignored)
        tools = isinstance(request, TemplatedBody) and bool(request.offered_tools)
        return request, (*named, *request.as_sent.unseen(partial(tokenizer.hidden, with_tools=tools)))

    def _warn_of_tools(self, model: str) -> None:
        """Tells the operator once: clients that read no headers take the answer for one that needed no tool."""
        if model not in self._warned_of_tools:
            self._warned_of_tools.add(model)
            log.warning(
                "model %s: tools in requests are ignored, because its chat template has none in a known format; serve "
                "a model whose template has (docs/tools.md)",
                model,
            )

    def generations(
        self, request: GenerationBody, request_id: str, caller: Identity, target: str = ""
    ) -> tuple[GenerationRequest, ...]:
        """Returns one generation for each prompt, in tokens, with every default filled in; for the model ``target``,
        where the request names what stands for several. Raises ``QuireError``, which names fields as they were sent.
        """
        with _naming_as_sent(request):
            return self._generations(request, request_id, caller, target)

    def _generations(
        self, request: GenerationBody, request_id: str, caller: Identity, target: str
    ) -> tuple[GenerationRequest, ...]:
        model, lora = self.resolve(target or request.model)
        tokenizer = self._tokenizers[model]
        limits = self._known_limits(model, request.model)
        if Task.GENERATE not in (limits.supported_tasks or (Task.GENERATE,)):
            raise wrong_task(request.model, limits, Task.GENERATE)
        defaults = {} if request.search_width else self._sampling_defaults.get(model, {})  # a search draws nothing
        prompts, output_limits = _prompts(request, tokenizer, limits, defaults.get("max_tokens"))
        structured = structured_of(request, tokenizer, prompts[0])
        first = GenerationRequest(
            request_id=request_id,
            model=model,
            lora=lora,
            prompt_token_ids=prompts[0],
            params=sampling_of(request, {**defaults, "max_tokens": output_limits[0]}, tokenizer, limits, structured),
            stop=tuple(request.stop),
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            echo=isinstance(request, CompletionRequest) and bool(request.echo),
            priority=self._priority(request.priority, caller),
            operation="chat" if isinstance(request, ChatRequest) else "text_completion",
            tenant=caller.tenant,
            cache_salt=caller.cache_salt,
            stream=bool(request.stream),
            conversation=request.conversation,
            served_name=request.model if target else "",
        )
        generations = tuple(
            _for_prompt(first, number, prompt, most)
            for number, (prompt, most) in enumerate(zip(prompts, output_limits, strict=True))
        )
        if isinstance(request, CompletionRequest) and first.echo:
            sent = [each if isinstance(each, str) else "" for each in request.prompt]
            generations = _with_texts(generations, sent)
        if request.seed is None:
            generations = tuple(map(_with_random_seed, generations))
        check_response_size(generations, shows_prompts=bool(request.return_token_ids))
        return generations

    def pooling(self, request: PoolingBody, request_id: str, caller: Identity, target: str = "") -> PreparedPooling:
        """Returns one generation for each prompt that is pooled, in tokens; ``target`` as for ``generations``. Raises
        ``QuireError``.
        """
        model, lora = self.resolve(target or request.model)
        limits = self._known_limits(model, request.model)
        template = GenerationRequest(
            request_id=request_id,
            model=model,
            lora=lora,
            prompt_token_ids=(),
            params=_POOLED,
            priority=self._priority(request.priority, caller),
            operation="embeddings" if isinstance(request, EmbeddingRequest) else "score",
            tenant=caller.tenant,
            cache_salt=caller.cache_salt,
            served_name=request.model if target else "",
        )
        with _naming_as_sent(request):
            return pooled_requests(request, template, self._tokenizers[model], limits)

    def _known_limits(self, model: str, name: str) -> ServedModelLimits:
        """Returns the limits of a model, which a request calls ``name``. Raises ``QuireError`` while none are known."""
        limits = self._limits(model)
        if limits is None:
            raise model_not_ready(name)
        return limits

    def resolve(self, name: str) -> tuple[str, LoRA | None]:
        """Returns the configured model that a request names, and the adapter; of several targets, the one with the
        largest weight. Raises ``QuireError`` NOT_FOUND.
        """
        if name in self._tokenizers:
            return name, None
        if (group := self._targets.get(name)) is not None:
            return max(group.targets, key=lambda target: target.weight).model, None
        served = self._loras().get(name)
        if served is None:
            raise unknown_model(name)
        return served.model, served.lora

    def can_do(self, name: str, tasks: Sequence[Task]) -> bool:
        """Returns whether what requests name so can do one of these ``tasks``, as far as its engines are known."""
        limits = self._limits(self.resolve(name)[0])
        supported = None if limits is None else limits.supported_tasks
        return not tasks or supported is None or not set(tasks).isdisjoint(supported)

    def tokenizer(self, model: str) -> ModelTokenizer:
        """Returns the tokenizer of what requests name so. Raises ``QuireError`` NOT_FOUND."""
        return self._tokenizers[self.resolve(model)[0]]

    def _priority(self, given: int | None, caller: Identity) -> int:
        """Returns the tenant's priority plus the one ``given`` in a request. Raises ``QuireError``."""
        own = given or 0
        if own and not (self._allow_priority or caller.policy.allow_priority):
            raise invalid("priority", "priority is not taken from clients here; only 0 is.")
        priority = own + caller.policy.priority
        if not _MIN_PRIORITY <= priority < BEST_EFFORT:
            raise invalid("priority", f"priority must be between {_MIN_PRIORITY} and {BEST_EFFORT - 1}.")
        return priority


def _for_prompt(first: GenerationRequest, number: int, prompt: Sequence[int], output_limit: int) -> GenerationRequest:
    """Returns the generation of another prompt, under an id of its own."""
    if number == 0:
        return first
    params = first.params if first.params.max_tokens == output_limit else replace(first.params, max_tokens=output_limit)
    request_id = prompt_request_id(first.request_id, number)
    return replace(first, request_id=request_id, prompt_token_ids=prompt, params=params)


def _with_texts(generations: Sequence[GenerationRequest], sent: Sequence[str]) -> tuple[GenerationRequest, ...]:
    """Returns generations that echo their prompts with the texts that were ``sent``, empty for prompts in tokens."""
    return tuple(replace(each, conversation=text) for each, text in zip(generations, sent, strict=True))


def _with_random_seed(generation: GenerationRequest) -> GenerationRequest:
    return replace(generation, params=replace(generation.params, seed=randbits(64)))


def _prompts(
    request: GenerationBody, tokenizer: ModelTokenizer, limits: ServedModelLimits, usual_output: int | None
) -> tuple[list[Sequence[int]], list[int]]:
    """Returns the tokens of each prompt, and the most tokens of its outputs, which is ``usual_output`` for a
    conversation that does not say. Raises ``QuireError``.
    """
    if isinstance(request, ChatRequest):
        return _conversation(request, tokenizer, limits, usual_output)
    assert isinstance(request, CompletionRequest)
    prompts, output_limits = [], []
    for number, given in enumerate(request.prompt):
        name = f"prompt[{number}]" if len(request.prompt) > 1 else "prompt"
        with _naming_prompt(name):
            tokens = tokenizer.encode(given, limits.max_model_len) if isinstance(given, str) else given
        output_limits.append(_output_limit(request, name, len(tokens), COMPLETION_MAX_TOKENS, limits))
        check_ids(name, tokens, limits)
        prompts.append(array("i", tokens))
    return [*prompts], output_limits


def _conversation(
    request: ChatRequest, tokenizer: ModelTokenizer, limits: ServedModelLimits, usual_output: int | None
) -> tuple[list[Sequence[int]], list[int]]:
    tools = [tool.to_template() for tool in request.offered_tools]
    options = template_options(
        request.chat_template_kwargs, request.reasoning_effort, tokenizer, with_tools=bool(tools)
    )
    encode = partial(
        tokenizer.encode_chat,
        limit=limits.max_model_len,
        tools=tools,
        options=options,
        earlier=request.earlier_token_ids,
    )
    messages = to_template_messages(request.messages)
    with _naming_prompt("messages"):
        if request.drops_earliest_messages:
            prompt = encode_truncated(messages, encode, limits.max_model_len, request.output_limit)
        else:
            prompt = encode(messages)
    rest = max(1, limits.max_model_len - len(prompt))
    if request.output_limit is None and usual_output is not None:
        rest = min(rest, usual_output)
    return [array("i", prompt)], [_output_limit(request, "messages", len(prompt), rest, limits)]


def _output_limit(
    request: GenerationBody, param: str, prompt_tokens: int, default: int, limits: ServedModelLimits
) -> int:
    """Returns the most output tokens: the client's limit, or else ``default`` or what the model's context has room for.
    Some requests do not go beyond that. ``param`` names the prompt in errors.
    """
    given, name = request.output_limit, request.output_limit_name
    if given is not None and given < 1:
        raise invalid(name, f"{name} is {given} but must be at least 1.")
    fits = given is None or request.fits_output
    output_limit = default if given is None else given
    if fits:
        output_limit = min(output_limit, max(1, limits.max_model_len - prompt_tokens))
    check_length(prompt_tokens, output_limit, limits.max_model_len, prompt=param, output=None if fits else name)
    return output_limit


@contextmanager
def _naming_prompt(name: str) -> Iterator[None]:
    """Lets errors about the prompt name the parameter ``name``."""
    try:
        yield
    except QuireError as error:
        raise error.about(name if error.param == "prompt" else error.param or name) from None


@contextmanager
def _naming_as_sent(request: StrictModel) -> Iterator[None]:
    """Lets errors name a field as the client did, which may have used another server's name for it."""
    try:
        yield
    except QuireError as error:
        field, words = (error.param or "").partition("[")[0], error.message
        sent = request.sent_names
        for own, name in sent.items():
            if error.reason is None and name not in words:
                words = re.sub(rf"\b{own}\b", name, words)
        param = error.param and error.param.replace(field, sent.get(field, field), 1)
        raise error.about(param, words) from None


_COPIED_FIELDS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "n",
    "length_penalty", "early_stopping", "min_tokens", "ignore_eos", "seed",
)  # fmt: skip
_ALL_TOKENS = -1  # vLLM's other word for top_k 0


def sampling_of(
    request: GenerationBody,
    defaults: Mapping[str, Any],
    tokenizer: ModelTokenizer,
    limits: ServedModelLimits,
    structured: Structured | None,
) -> SamplingParams:
    """Returns how the request's tokens are sampled: as it says, and else by ``defaults``. ``structured`` is what
    constrains the output. Raises ``QuireError``.
    """
    given = {name: value for name in _COPIED_FIELDS if (value := getattr(request, name)) is not None}
    if request.top_k is not None:
        given["top_k"] = 0 if request.top_k == _ALL_TOKENS else request.top_k
    if request.top_p == 0 and not request.search_width:  # OpenAI's range begins with it: one token is kept at least
        given |= {"top_p": 1.0, "top_k": 1}
    params = SamplingParams(
        best_of=request.effective_best_of or 0,
        beam_width=request.search_width,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=tuple(sorted((request.logit_bias or {}).items())),
        bad_words=_bad_words(request, tokenizer),
        logprobs=request.output_logprobs,
        prompt_logprobs=request.all_prompt_logprobs,
        structured=structured,
        **{**defaults, **given},
    )
    _check_ids_of(params, limits)
    _check_search(request, params)
    return params


def check_stream(request: GenerationBody) -> None:
    """Raises ``QuireError`` for a stream whose response has parts that OpenAI's chunks cannot hold."""
    if not request.stream:
        return
    unstreamable = {
        "best_of": (request.effective_best_of or 0) > max(1, request.n or 1),
        "use_beam_search": bool(request.use_beam_search),
        "beam_width": bool(request.beam_width),
        "prompt_logprobs": request.prompt_logprobs is not None,
    }
    for param, is_requested in unstreamable.items():
        if is_requested:
            raise _excluded(param, "stream")


def check_ids(param: str, token_ids: Sequence[int], limits: ServedModelLimits) -> None:
    """Raises ``QuireError`` for a token id that the model does not have."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
        raise invalid(param, f"{param} holds a token id outside of this model's vocabulary of {limits.vocab_size}.")


def _bad_words(request: GenerationBody, tokenizer: ModelTokenizer) -> tuple[tuple[int, ...], ...]:
    given = request.bad_words or []
    as_tokens = tuple(tuple(word) for word in given if not isinstance(word, str))
    return encode_bad_words([word for word in given if isinstance(word, str)], tokenizer) + as_tokens


def _check_ids_of(params: SamplingParams, limits: ServedModelLimits) -> None:
    check_ids("stop_token_ids", params.stop_token_ids, limits)
    check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], limits)
    check_ids("bad_words", [token_id for word in params.bad_words for token_id in word], limits)


def _check_search(request: GenerationBody, params: SamplingParams) -> None:
    """Raises ``QuireError`` for a beam search with stop strings: it compares whole outputs."""
    if params.beam_width and request.stop:
        raise _excluded("beam_width", "stop")


def _excluded(param: str, other: str) -> QuireError:
    return invalid(param, f"{param} and {other} exclude each other.")
