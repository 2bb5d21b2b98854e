"""Sampling parameters, finish reasons and log-probabilities, as REST, gRPC, engine and offline API share them. Ranges
are checked here once for all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from quire_proto.errors import QuireError, invalid
from quire_proto.structured_output import Structured

MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_STOP_TOKEN_IDS = 16
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 32
MAX_BAD_WORD_CHARACTERS = 256
MAX_SEED = 2**64 - 1
MAX_TOP_K = 2**31 - 1
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MIN_BEAM_WIDTH, MAX_BEAM_WIDTH = 2, 32


MAX_LENGTH_PENALTY = 10.0
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are sampled, and where its output ends.

    Which tokens: ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 keep every token. ``seed`` keys
    the stateless draw together with the position and the token id (see ``quire_engine.sampling``), so equal seeds make
    equal draws anywhere. ``presence_penalty`` and ``frequency_penalty`` are taken from the logits of tokens that the
    output has, once and once for each time; ``repetition_penalty`` divides positive and multiplies negative logits of
    tokens that prompt or output have. ``logit_bias`` pairs token ids with what is added to their logits.
    ``bad_words`` are token sequences that the output never completes. ``structured`` holds the output to a grammar.

    How many: ``n`` outputs are given to the client, of ``best_of`` (0 is ``n``) that are drawn, those whose tokens'
    mean log-probability is highest. ``beam_width`` above 0 searches for the most probable outputs instead of drawing
    them, with ``length_penalty`` and ``early_stopping`` as in transformers.

    Where they end: after ``max_tokens``, or with the model's end-of-sequence token (unless ``ignore_eos``) or one of
    ``stop_token_ids``, neither of which is drawn before ``min_tokens``.

    ``logprobs`` asks for the log-probability of each output token and of so many most probable ones beside it, and
    ``prompt_logprobs`` for the same of the prompt's tokens: of the model's own distribution, before any of the above.

    Raises ``QuireError`` with the name of the first parameter out of range, or with both names of two that exclude
    each other.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    n: int = 1
    best_of: int = 0
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: Structured | None = None

    def __post_init__(self) -> None:
        self._check_draws()
        self._check_penalties()
        self._check_ends()
        self._check_choices()
        self._check_exclusions()

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    @property
    def num_sequences(self) -> int:
        """Outputs that are sampled, of which the client gets ``n``; of a beam search, the beams."""
        return self.beam_width or self.best_of or self.n

    @property
    def num_returned(self) -> int:
        """Outputs that an engine returns: all that are sampled, and of a beam search the ``n`` best."""
        return self.n if self.beam_width else self.num_sequences

    @property
    def wants_logprobs(self) -> bool:
        """Whether output tokens need their log-probability: for the client, or to choose the best outputs."""
        return self.logprobs is not None or self.best_of > self.n

    def _check_draws(self) -> None:
        _check("temperature", self.temperature, 0, MAX_TEMPERATURE)
        if not 0 < self.top_p <= 1:
            raise _out_of_range("top_p", self.top_p, "above 0 and at most 1")
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise _out_of_range("top_k", self.top_k, f"between 0 (off) and {MAX_TOP_K}")
        _check("min_p", self.min_p, 0, 1)
        _check("seed", self.seed, 0, MAX_SEED)
        for name, asked in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if asked is not None:
                _check(name, asked, 0, MAX_LOGPROBS)

    def _check_penalties(self) -> None:
        _check("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        if not 0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            allowed = f"above 0 and at most {MAX_REPETITION_PENALTY:g}"
            raise _out_of_range("repetition_penalty", self.repetition_penalty, allowed)
        if len(self.logit_bias) > MAX_BIASES:
            raise invalid("logit_bias", f"logit_bias holds at most {MAX_BIASES} tokens.")
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise invalid("logit_bias", "logit_bias names a token twice.")
        for _, bias in self.logit_bias:
            _check("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise invalid("bad_words", f"bad_words holds at most {MAX_BAD_WORDS} entries.")
        if not all(1 <= len(word) <= MAX_BAD_WORD_TOKENS for word in self.bad_words):
            raise invalid("bad_words", f"Each of bad_words must have 1 to {MAX_BAD_WORD_TOKENS} tokens.")

    def _check_ends(self) -> None:
        if self.max_tokens < 1:
            raise _out_of_range("max_tokens", self.max_tokens, "at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise _out_of_range("min_tokens", self.min_tokens, "between 0 and max_tokens")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise invalid("stop_token_ids", f"stop_token_ids holds at most {MAX_STOP_TOKEN_IDS} ids.")

    def _check_choices(self) -> None:
        _check("n", self.n, 1, MAX_CHOICES)
        if self.best_of and not self.n <= self.best_of <= MAX_CHOICES:
            raise _out_of_range("best_of", self.best_of, f"between n and {MAX_CHOICES}")
        if self.beam_width and not MIN_BEAM_WIDTH <= self.beam_width <= MAX_BEAM_WIDTH:
            raise _out_of_range("beam_width", self.beam_width, f"0 (off) or {MIN_BEAM_WIDTH} to {MAX_BEAM_WIDTH}")
        _check("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if self.early_stopping not in (True, False, "never"):
            raise invalid("early_stopping", 'early_stopping must be true, false or "never".')
        if self.beam_width and self.n > self.beam_width:
            raise invalid("n", f"n is {self.n} but must be at most beam_width, which is {self.beam_width}.")

    def _check_exclusions(self) -> None:
        if self.beam_width:
            draws = {
                "temperature": self.temperature not in (0, 1),
                "top_p": self.top_p < 1,
                "top_k": self.top_k > 0,
                "min_p": self.min_p > 0,
                "best_of": self.best_of > 0,
                "logprobs": self.logprobs is not None,
            }
            if self.structured is not None:
                draws[self.structured.param] = True
            _refuse_together("beam_width", draws)
        if self.structured is not None:
            ends = {"ignore_eos": self.ignore_eos, "min_tokens": self.min_tokens > 0}
            _refuse_together(self.structured.param, ends)


def _check(param: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise _out_of_range(param, value, f"between {least:g} and {_plain(most)}")


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _refuse_together(param: str, others: dict[str, bool]) -> None:
    for other, is_set in others.items():
        if is_set:
            raise invalid(param, f"{param} and {other} exclude each other.")


def _out_of_range(param: str, value: float, allowed: str) -> QuireError:
    return invalid(param, f"{param} is {value} but must be {allowed}.")


def choice_seed(seed: int, index: int) -> int:
    """The seed of output ``index`` of a request: outputs of one request differ, and the first has the request's
    seed.
    """
    return (seed + index * 0x9E3779B97F4A7C15) & MAX_SEED


class FinishReason(StrEnum):
    """Why an output ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """At one position: the natural logarithm of the token's probability, and the most probable tokens with theirs, best
    first. Probabilities are the model's own, of a float32 softmax over the whole vocabulary.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StopToken:
    """The end-of-sequence or stop token that ended an output, which is not one of its tokens, and its
    log-probabilities, where they were asked for.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None


def mean_logprob(logprobs: Iterable[TokenLogprobs]) -> float:
    """An output's mean log-probability per token, which ``best_of`` compares; -inf for an empty one."""
    values = [each.logprob for each in logprobs]
    return sum(values) / len(values) if values else float("-inf")


def best_of(mean_logprobs: Sequence[float], n: int) -> list[int]:
    """The indexes of the ``n`` outputs with the highest mean log-probability, best first; of equal ones, the
    earlier.
    """
    return sorted(range(len(mean_logprobs)), key=lambda index: (-mean_logprobs[index], index))[:n]
