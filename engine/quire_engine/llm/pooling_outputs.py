"""Pooling offline: the arguments and results of ``LLM.embed``, ``LLM.classify`` and ``LLM.score``, named as in vLLM."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum

from quire_proto.errors import QuireError, internal, invalid
from quire_proto.pooling import PoolingParams, Task
from quire_proto.text.pooled_prompt import PooledPrompt
from quire_proto.text.tokenizer import ModelTokenizer

from quire_engine.core.outputs import EngineCoreOutput
from quire_engine.core.request import Request
from quire_engine.llm.types import whole_number

PoolingPrompt = str | list[int] | tuple[str, str]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one prompt."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The scores of one prompt, one per class; probabilities unless ``use_activation`` is off."""

    probs: list[float]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How relevant one text is to another."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """The ``pooled`` output of one prompt, or the ``error`` with which it failed. ``num_cached_tokens`` of the prompt
    were found in the prefix cache.
    """

    prompt_token_ids: list[int]
    pooled: list[float]
    num_cached_tokens: int = 0
    error: QuireError | None = None
    request_id: str = ""
    finished: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of a prompt. ``outputs`` is None if the prompt failed with ``error``."""

    prompt_token_ids: list[int]
    outputs: EmbeddingOutput | None
    num_cached_tokens: int = 0
    error: QuireError | None = None
    request_id: str = ""
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """Like ``EmbeddingRequestOutput``, with the scores of the classes."""

    prompt_token_ids: list[int]
    outputs: ClassificationOutput | None
    num_cached_tokens: int = 0
    error: QuireError | None = None
    request_id: str = ""
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of a pair of texts. ``prompt_token_ids`` are the tokens of both, as they were computed. ``outputs`` is
    None if one of them failed with ``error``.
    """

    prompt_token_ids: list[int]
    outputs: ScoringOutput | None
    error: QuireError | None = None
    finished: bool = True


@dataclass(frozen=True, slots=True)
class PreparedPooling:
    """A request that the scheduler accepts."""

    request: Request


class PoolingProcessor:
    """Builds the ``PoolingRequestOutput`` of one request."""

    def __init__(self, prepared: PreparedPooling) -> None:
        self.prepared = prepared
        self._output: EngineCoreOutput | None = None
        self._is_aborted = False

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self._is_aborted or self._output is not None

    @property
    def error(self) -> QuireError | None:
        """The request's error; None if it has not failed."""
        if self._is_aborted:
            return invalid("request_id", "The request was aborted.")
        output = self._output
        return None if output is None else output.error or (None if output.pooled else internal())

    def abort(self) -> None:
        """Ends the request without a result, unless it has ended."""
        self._is_aborted = self._output is None

    def add_output(self, output: EngineCoreOutput) -> bool:
        """Adds the request's one output. Returns False: there is nothing to abort."""
        self._output = output
        return False

    def add_token(self, _index: int, _token_id: int) -> bool:
        """Not called: a pooled prompt has no tokens."""
        raise AssertionError("a pooled prompt has no tokens")

    def result(self) -> PoolingRequestOutput:
        """Returns the result of the request, which must have ended."""
        output, request = self._output, self.prepared.request
        assert output is not None, "it has ended"
        numbers = array("f")
        numbers.frombytes(output.pooled)
        return PoolingRequestOutput(
            prompt_token_ids=list(request.prompt_token_ids),
            pooled=numbers.tolist(),
            num_cached_tokens=output.cached_tokens,
            error=self.error,
            request_id=request.request_id,
        )


def embedding_output(output: PoolingRequestOutput) -> EmbeddingRequestOutput:
    """Returns a prompt's embedding."""
    own = None if output.error is not None else EmbeddingOutput(output.pooled)
    return EmbeddingRequestOutput(
        output.prompt_token_ids, own, output.num_cached_tokens, output.error, output.request_id
    )


def classification_output(output: PoolingRequestOutput) -> ClassificationRequestOutput:
    """Returns a prompt's scores."""
    own = None if output.error is not None else ClassificationOutput(output.pooled)
    return ClassificationRequestOutput(
        output.prompt_token_ids, own, output.num_cached_tokens, output.error, output.request_id
    )


def read_params(params: PoolingParams | None, task: Task) -> PoolingParams:
    """Returns the parameters of a call for ``task``. Raises ``QuireError`` INVALID if ``params`` are invalid."""
    if params is None:
        return PoolingParams(task)
    if not isinstance(params, PoolingParams):
        raise invalid("pooling_params", "pooling_params must be PoolingParams.")
    if params.dimensions is not None:
        whole_number("dimensions", params.dimensions)
    return replace(params, task=task)


def read_pairs(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Returns one text paired with each of several, or the texts at equal positions. Raises ``QuireError`` INVALID."""
    ones = [text_1] if isinstance(text_1, str) else [*text_1]
    others = [text_2] if isinstance(text_2, str) else [*text_2]
    if not all(isinstance(text, str) for text in (*ones, *others)):
        raise invalid("text_1", "text_1 and text_2 must be texts, or lists of them.")
    if len(ones) not in (1, len(others)):
        raise invalid("text_1", f"text_1 has {len(ones)} texts and text_2 {len(others)}: it must be one, or as many.")
    return [*zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True)]


def encode(tokenizer: ModelTokenizer, prompts: Sequence[PoolingPrompt], limit: int) -> list[PooledPrompt]:
    """Returns the tokens of texts, of pairs of texts, or of lists of tokens. Tokenises texts together. Raises
    ``QuireError`` INVALID.
    """
    texts = [prompt for prompt in prompts if not isinstance(prompt, list)]
    encoded = iter(tokenizer.encode_pooled(texts, limit))
    return [PooledPrompt(prompt) if isinstance(prompt, list) else next(encoded) for prompt in prompts]


def pair_output(one: PoolingRequestOutput, other: PoolingRequestOutput) -> ScoringRequestOutput:
    """Returns the score of two texts from their normalised embeddings: the cosine."""
    error = one.error or other.error
    score = fsum(a * b for a, b in zip(one.pooled, other.pooled, strict=error is None))
    tokens = [*one.prompt_token_ids, *other.prompt_token_ids]
    return ScoringRequestOutput(tokens, None if error is not None else ScoringOutput(score), error)


def scored_output(output: PoolingRequestOutput) -> ScoringRequestOutput:
    """Returns the score of a pair that was computed as one prompt."""
    own = None if output.error is not None else ScoringOutput(output.pooled[0])
    return ScoringRequestOutput(output.prompt_token_ids, own, output.error)
