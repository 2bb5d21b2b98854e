"""Request bodies of what pools prompts: ``/v1/embeddings`` in OpenAI's fields, ``/score`` in vLLM's, and ``/rerank`` in
Cohere's and Jina's, with the fields that vLLM adds to all of them.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from quire_proto.errors import invalid
from quire_proto.pooling import Task

from quire_router.api.schemas import parameters
from quire_router.api.schemas.base import MAX_INPUTS, WHOLE, Inputs, Integer, Label, ModelName, Parsed, StrictModel
from quire_router.api.schemas.parameters import Table


class PoolingBody(StrictModel):
    """What all of them have in common. ``truncate_prompt_tokens`` cuts what is longer, -1 to the model's length."""

    model: ModelName = ""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1), WHOLE] | None = None
    use_activation: bool | None = None
    priority: Integer = None
    user: Label = None

    @property
    def size(self) -> int:
        """The length of its texts in characters, or of its prompts in tokens."""
        raise NotImplementedError


class EmbeddingRequest(PoolingBody):
    """The body of ``POST /v1/embeddings``. ``prompt_name`` is sentence-transformers' word, for what its folder says is
    put before texts.
    """

    foreign: ClassVar[Table] = parameters.EMBEDDINGS
    tasks: ClassVar[Sequence[Task]] = (Task.EMBED,)

    input: Inputs = parameters.named(parameters.EMBEDDINGS, "input")
    dimensions: Integer = None
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = None
    prompt_name: Label = None

    @property
    def size(self) -> int:
        """See ``PoolingBody``."""
        return sum(map(len, self.input))


class ScoringBody(PoolingBody):
    """A request for the scores of ``pairs`` of texts."""

    tasks: ClassVar[Sequence[Task]] = (Task.EMBED, Task.CLASSIFY)

    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        """Each query with each document that it is compared with, in the order of the scores."""
        raise NotImplementedError

    @property
    def fields_of_pairs(self) -> Sequence[tuple[str, str]]:
        """The fields that hold the two texts of each pair."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """See ``PoolingBody``."""
        return sum(len(one) + len(other) for one, other in self.pairs)


_Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Texts = Annotated[str | list[str], Parsed(str | _Texts, f"it must be a text, or a list of 1 to {MAX_INPUTS} of them")]


class ScoreRequest(ScoringBody):
    """The body of ``POST /score``: one text with each of several, or each with the one in its place."""

    foreign: ClassVar[Table] = parameters.SCORE

    text_1: Texts = parameters.named(parameters.SCORE, "text_1")
    text_2: Texts = parameters.named(parameters.SCORE, "text_2")

    @model_validator(mode="after")
    def _check(self) -> Self:
        ones, others = _listed(self.text_1), _listed(self.text_2)
        if len(ones) not in (1, len(others)):
            raise invalid(
                "text_1", f"text_1 has {len(ones)} texts and text_2 {len(others)}: it must be one, or as many."
            )
        return self

    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        """See ``ScoringBody``."""
        ones, others = _listed(self.text_1), _listed(self.text_2)
        return _paired(ones, others)

    @property
    def fields_of_pairs(self) -> Sequence[tuple[str, str]]:
        """See ``ScoringBody``."""
        return _paired(_fields("text_1", self.text_1), _fields("text_2", self.text_2))


class Document(StrictModel):
    """A document as an object."""

    text: str


Documents = Annotated[
    list[str | Document],
    Parsed(
        Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)],
        f"it must be a list of 1 to {MAX_INPUTS} texts, or of objects with a text",
    ),
]


class RerankRequest(ScoringBody):
    """The body of ``POST /rerank``. The best ``top_n`` documents are returned, by default all, with their texts unless
    ``return_documents`` is off.
    """

    foreign: ClassVar[Table] = parameters.RERANK

    query: str
    documents: Documents = parameters.named(parameters.RERANK, "documents")
    top_n: Annotated[int, Field(ge=0), WHOLE] | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> Sequence[str]:
        """The documents' texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        """See ``ScoringBody``."""
        return [(self.query, text) for text in self.texts]

    @property
    def fields_of_pairs(self) -> Sequence[tuple[str, str]]:
        """See ``ScoringBody``."""
        return [("query", field) for field in _fields("documents", self.texts)]


def _paired(ones: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    return [*zip([*ones] * len(others) if len(ones) == 1 else ones, others, strict=True)]


def _fields(name: str, texts: str | Sequence[str]) -> list[str]:
    """Returns the field of each text."""
    return [name] if isinstance(texts, str) else [f"{name}[{number}]" for number in range(len(texts))]


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
