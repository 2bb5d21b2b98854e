"""What a Submit asks of an engine, as far as the answer is held against it. Plain data."""

from dataclasses import dataclass
from typing import Self

from quire.v1 import engine_pb2, types_pb2

_ANY = 1 << 31


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """The choices that are to be run, and at which position of its output each goes on; each has at most
    ``max_tokens``, each below ``vocabulary``. ``logprobs`` tells whether tokens come with log-probabilities, and
    ``prompt_logprobs`` for how many of the prompt's tokens they come: all but the first, or none.
    """

    positions: dict[int, int]
    max_tokens: int
    logprobs: bool = False
    prompt_logprobs: int = 0
    vocabulary: int = _ANY

    @property
    def is_resumed(self) -> bool:
        """Whether another engine has made a part of it already."""
        return any(self.positions.values())

    @classmethod
    def of(cls, message: engine_pb2.Submit, vocabulary: int = 0) -> Self:
        """What the engine will answer to ``message``; 0 tokens are a vocabulary that is not known."""
        sampling = message.sampling
        return cls(
            positions=_positions(message),
            max_tokens=sampling.max_tokens,
            logprobs=sampling.HasField("logprobs") or sampling.best_of > max(1, sampling.n),
            prompt_logprobs=len(message.prompt_token_ids) - 1 if sampling.HasField("prompt_logprobs") else 0,
            vocabulary=vocabulary or _ANY,
        )


def max_sequences(message: engine_pb2.Submit) -> int:
    """How many sequences the engine decodes for the request at once."""
    return message.sampling.beam_width or len(_positions(message))


def _positions(message: engine_pb2.Submit) -> dict[int, int]:
    positions = dict.fromkeys(range(_num_choices(message.sampling)), 0)
    positions[0] = len(message.output_token_ids)
    for delivered in message.delivered:
        if delivered.finished:
            positions.pop(delivered.index, None)
        else:
            positions[delivered.index] = len(delivered.token_ids)
    return positions


def _num_choices(sampling: types_pb2.SamplingParams) -> int:
    """The choices that are told: of a search only the best, of draws every one."""
    return max(1, sampling.n) if sampling.beam_width else sampling.best_of or max(1, sampling.n)
