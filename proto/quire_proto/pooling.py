"""What is asked of a prompt that is not continued: ``Task`` and ``PoolingParams``, as REST, gRPC, engine and offline
API share them, in vLLM's words. Ranges are checked here once for all of them.
"""

from dataclasses import dataclass
from enum import StrEnum

from quire_proto.errors import invalid

MAX_DIMENSIONS = 1 << 16
FLOAT_BYTES = 4


class Task(StrEnum):
    """What an engine can do with a prompt. An engine has one task, or ``GENERATE``."""

    GENERATE = "generate"
    EMBED = "embed"
    CLASSIFY = "classify"


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How the hidden states of a prompt become one list of float32 numbers.

    ``EMBED`` makes an embedding of ``dimensions`` numbers, the first ones; None for all. ``CLASSIFY`` makes a score for
    each class. ``use_activation`` says whether an embedding is normalised, after its dimensions were chosen, and
    whether scores become probabilities (a sigmoid for one class, a softmax for several); with None the model's folder
    does. ``second_text_start`` is the index of the first token of the second text of a pair, for models with token
    types, and 0 where there is one text.

    Raises ``QuireError`` with the name of the first parameter out of range.
    """

    task: Task = Task.EMBED
    dimensions: int | None = None
    use_activation: bool | None = None
    second_text_start: int = 0

    def __post_init__(self) -> None:
        if self.task is Task.GENERATE:
            raise invalid("task", "A prompt that is continued is not pooled.")
        if self.dimensions is not None and not 1 <= self.dimensions <= MAX_DIMENSIONS:
            message = f"dimensions is {self.dimensions} but must be between 1 and {MAX_DIMENSIONS}."
            raise invalid("dimensions", message)
        if self.dimensions is not None and self.task is Task.CLASSIFY:
            raise invalid("dimensions", "Scores have no dimensions to choose.")
        if self.second_text_start < 0:
            raise invalid("second_text_start", "second_text_start must be at least 0.")

    def output_size(self, pooled_size: int) -> int:
        """How many numbers come of a model that makes ``pooled_size``."""
        return self.dimensions or pooled_size


def check_dimensions(dimensions: int | None, pooled_size: int, matryoshka: tuple[int, ...]) -> None:
    """Raises ``QuireError`` INVALID, with what there is, for a number of dimensions that a model's embeddings, of
    ``pooled_size`` numbers, cannot be cut to: more than these, or none of those that it was trained for
    (``matryoshka``), where its folder lists them.
    """
    if dimensions is None or dimensions == pooled_size:
        return
    if dimensions > pooled_size:
        message = f"dimensions is {dimensions}, and this model's embeddings have {pooled_size} numbers."
        raise invalid("dimensions", message)
    if matryoshka and dimensions not in matryoshka:
        allowed = ", ".join(map(str, sorted({*matryoshka, pooled_size})))
        raise invalid("dimensions", f"dimensions is {dimensions}, and this model was trained for {allowed}.")
