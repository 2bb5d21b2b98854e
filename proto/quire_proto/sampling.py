"""How tokens are drawn and why an output ends; ranges are checked here once, for REST, gRPC, engine and offline
API.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from quire_proto.errors import ErrorCode, QuireError, invalid

MAX_TEMPERATURE = 2.0
MAX_STOP_TOKEN_IDS = 16
MAX_SEED = 2**64 - 1
MAX_TOP_K = 2**31 - 1


class FinishReason(StrEnum):
    """Why an output ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn, and where its output ends.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep every token. ``seed`` keys the stateless draw
    together with the position and the token id (see ``quire_engine.sampling``), so equal seeds make equal draws
    anywhere. Raises ``QuireError`` with the name of the first parameter out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not (isfinite(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE):
            raise _out_of_range("temperature", self.temperature, f"between 0 and {MAX_TEMPERATURE:g}")
        if not (isfinite(self.top_p) and 0 < self.top_p <= 1):
            raise _out_of_range("top_p", self.top_p, "above 0 and at most 1")
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise _out_of_range("top_k", self.top_k, f"between 0 (off) and {MAX_TOP_K}")
        if not 0 <= self.seed <= MAX_SEED:
            raise _out_of_range("seed", self.seed, f"between 0 and {MAX_SEED}")
        if self.max_tokens < 1:
            raise _out_of_range("max_tokens", self.max_tokens, "at least 1")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise invalid("stop_token_ids", f"stop_token_ids holds at most {MAX_STOP_TOKEN_IDS} ids.")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0


def check_length(prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Raises ``QuireError`` unless prompt and output fit the model together; the text names the limit."""
    if prompt_tokens < 1:
        raise invalid("prompt", "The prompt is empty.")
    if prompt_tokens + max_tokens > max_model_len:
        raise QuireError(
            ErrorCode.INVALID,
            f"The prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, "
            f"but this model's limit is {max_model_len} tokens for both together.",
            param="prompt" if prompt_tokens >= max_model_len else "max_tokens",
        )


def _out_of_range(param: str, value: float, allowed: str) -> QuireError:
    return invalid(param, f"{param} is {value} but must be {allowed}.")
