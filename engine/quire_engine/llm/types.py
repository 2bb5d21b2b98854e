"""The arguments and results of ``LLM``, named as in vLLM: ``SamplingParams`` in, ``RequestOutput`` out."""

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from numbers import Integral, Real
from typing import Any

from quire_proto import sampling
from quire_proto.errors import QuireError, invalid
from quire_proto.sampling import FinishReason
from quire_proto.structured_output import Structured, StructuredKind, choice


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the output. Exactly one is given: a JSON Schema (as text or as an object), any JSON object, a
    regular expression for the whole output, a list of texts to choose from, or a grammar in Lark's notation or EBNF.

    Raises ``QuireError`` INVALID.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [self.json, self.json_object or None, self.regex, self.choice, self.grammar]
        if sum(value is not None for value in given) != 1:
            text = "structured_outputs needs exactly one of json, json_object, regex, choice and grammar."
            raise invalid("structured_outputs", text)
        self.structured()

    def structured(self) -> Structured:
        """Returns the constraint in the engine's form."""
        if self.json is not None:
            schema = self.json if isinstance(self.json, str) else json_text.dumps(self.json, ensure_ascii=False)
            return Structured(StructuredKind.JSON_SCHEMA, schema)
        if self.regex is not None:
            return Structured(StructuredKind.REGEX, self.regex)
        if self.choice is not None:
            return choice(list(self.choice))
        if self.grammar is not None:
            return Structured(StructuredKind.GRAMMAR, self.grammar)
        return Structured(StructuredKind.JSON_OBJECT)


class RequestOutputKind(Enum):
    """What each ``RequestOutput`` of ``AsyncLLM.generate`` contains: all so far, the new part since the last one, or
    all in a single output at the end. Named as in vLLM.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How the outputs of one prompt are sampled, where they end, and which tokens become text.

    Fields with names of ``quire_proto.sampling.SamplingParams`` mean the same, with these exceptions. ``seed`` None
    draws a seed for each prompt. ``max_tokens`` None allows as many as fit. ``top_k`` may also be -1 for all.
    ``bad_words`` are texts, whose two tokenised forms (at the beginning, and after a space) are banned.

    An output also ends at the first string of ``stop``. Its text includes that string only with
    ``include_stop_str_in_output``. Special tokens have no text unless ``skip_special_tokens`` is off. Without
    ``detokenize``, outputs and the tokens of their log-probabilities have no text. ``output_kind`` is for ``AsyncLLM``;
    ``LLM`` returns whole outputs.

    Numbers may be NumPy's. Raises ``QuireError`` INVALID for a value of the wrong type or out of range, and for
    parameters that exclude each other. Values assigned later are checked when a request is made with them.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: sampling.EarlyStopping = False

    def __post_init__(self) -> None:
        if not all(isinstance(stop, str) and stop for stop in self.stops):
            raise invalid("stop", "stop must be a string or a list of strings, none of them empty.")
        if self.stops and self.beam_width:
            raise invalid("stop", "beam_width and stop exclude each other.")
        if self.stops and not self.detokenize:
            raise invalid("stop", "stop needs detokenize: it is looked for in the text.")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise invalid("output_kind", "output_kind must be a RequestOutputKind.")
        if isinstance(self.bad_words, str):
            raise invalid("bad_words", "bad_words must be a list of strings.")
        if not (self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputsParams)):
            raise invalid("structured_outputs", "structured_outputs must be StructuredOutputsParams.")
        least = max(1, whole_number("min_tokens", self.min_tokens))
        self._to_engine(0 if self.seed is None else self.seed, least if self.max_tokens is None else self.max_tokens)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def resolve(self, *, seed: int, max_output: int, bad_words: tuple[tuple[int, ...], ...]) -> sampling.SamplingParams:
        """Returns the engine's parameters: with ``seed`` if none is set, and ``max_output`` tokens if ``max_tokens`` is
        None. ``bad_words`` are this object's bad words as tokens. Raises ``QuireError`` INVALID.
        """
        limit = max_output if self.max_tokens is None else self.max_tokens
        return replace(self._to_engine(seed if self.seed is None else self.seed, limit), bad_words=bad_words)

    def _to_engine(self, seed: int, max_tokens: int) -> sampling.SamplingParams:
        return sampling.SamplingParams(
            temperature=_number("temperature", self.temperature),
            top_p=_number("top_p", self.top_p),
            top_k=0 if self.top_k == -1 else whole_number("top_k", self.top_k),
            seed=whole_number("seed", seed),
            max_tokens=whole_number("max_tokens", max_tokens),
            stop_token_ids=tuple(whole_number("stop_token_ids", each) for each in self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            min_p=_number("min_p", self.min_p),
            presence_penalty=_number("presence_penalty", self.presence_penalty),
            frequency_penalty=_number("frequency_penalty", self.frequency_penalty),
            repetition_penalty=_number("repetition_penalty", self.repetition_penalty),
            logit_bias=tuple(
                sorted(
                    (whole_number("logit_bias", token_id), _number("logit_bias", bias))
                    for token_id, bias in (self.logit_bias or {}).items()
                )
            ),
            min_tokens=whole_number("min_tokens", self.min_tokens),
            n=whole_number("n", self.n),
            best_of=whole_number("best_of", self.best_of or 0),
            beam_width=whole_number("beam_width", self.beam_width),
            length_penalty=_number("length_penalty", self.length_penalty),
            early_stopping=self.early_stopping,
            logprobs=_optional("logprobs", self.logprobs),
            prompt_logprobs=_optional("prompt_logprobs", self.prompt_logprobs),
            structured=None if self.structured_outputs is None else self.structured_outputs.structured(),
        )


def whole_number(param: str, value: object) -> int:
    """Returns ``value`` as an int. Raises ``QuireError`` INVALID if it is not a whole number."""
    if not isinstance(value, Integral):
        raise invalid(param, f"{param}: {value!r} is not a whole number.")
    return int(value)


def _optional(param: str, value: object) -> int | None:
    return None if value is None else whole_number(param, value)


def _number(param: str, value: object) -> float:
    if not isinstance(value, Real):
        raise invalid(param, f"{param}: {value!r} is not a number.")
    return float(value)


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural log-probability under the model's own distribution. ``rank`` is 1 for the most probable
    token; None for a token outside of the requested top ones. ``decoded_token`` is None without ``detokenize``.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


PositionLogprobs = dict[int, Logprob]
"""Log-probabilities at one position by token id: the token of the text, then the most probable ones, best first."""


@dataclass(slots=True)
class CompletionOutput:
    """One output of a prompt.

    ``finish_reason`` is ``stop``, ``length``, ``error`` or ``abort``; None for an unfinished output of ``AsyncLLM``.
    With ``stop``, ``stop_reason`` is the stop string or the one of ``stop_token_ids``; None for an end-of-sequence
    token. ``token_ids`` end with the token that completed the stop string. They do not include the end-of-sequence or
    stop token, with which vLLM's ``token_ids`` and ``logprobs`` end. ``logprobs`` has one entry for each of
    ``token_ids`` if requested. ``cumulative_logprob`` is their sum, also known with ``best_of``. ``score`` is a beam's:
    the sum of its tokens' log-probabilities, divided by its length to the power of ``length_penalty``. With
    ``RequestOutputKind.DELTA``, ``text``, ``token_ids`` and ``logprobs`` are only the new part.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When a request went through its stages, in seconds since 1970; None for stages that it has not reached. With
    several outputs, the first that was scheduled and the first that had a token count. ``finished_time`` is None if a
    stop string ended an output. ``num_preemptions`` and ``away_seconds`` describe the output that was away longest: how
    often it was preempted, and the total time until it had caught up each time.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    away_seconds: float = 0.0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from the arrival until the request was first scheduled."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """The outputs of one prompt.

    ``prompt`` is the text, for a conversation as rendered by its template; None for a prompt of token ids.
    ``prompt_logprobs`` has one entry for each of ``prompt_token_ids`` if requested, None for the first.
    ``num_cached_tokens`` of the prompt were found in the prefix cache. With an ``error``, ``outputs`` are incomplete,
    and unfinished ones have the finish reason ``error``. ``AsyncLLM`` yields outputs that are not ``finished`` before
    the last one. With ``RequestOutputKind.DELTA``, ``outputs`` are only those with anything new, and
    ``prompt_logprobs`` come once. ``metrics`` is set after the engine has made any output.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: QuireError | None = None
    request_id: str = ""
    finished: bool = True
    metrics: RequestMetrics | None = None
