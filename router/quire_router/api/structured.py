"""What a client says about the form of an output, in OpenAI's words, in vLLM's newer and older ones and in SGLang's, as
one ``Structured``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from quire_proto.errors import QuireError, invalid
from quire_proto.structured import MAX_OPTIONS, MAX_TEXT, Structured, StructuredKind, choice

from quire_router.api.fields import Parsed
from quire_router.api.strict import StrictModel, Unsupported, unknown_parameter

_OBJECT = TypeAdapter(dict[str, Any])

JsonSchema = Annotated[
    str | dict[str, Any] | None,
    Parsed(str | dict[str, Any] | None, "it must be a JSON Schema, as an object or as text"),
]
Choices = Annotated[
    list[str] | None,
    Parsed(
        Annotated[list[str], Field(max_length=MAX_OPTIONS)] | None, f"it must be a list of at most {MAX_OPTIONS} texts"
    ),
]


class NamedSchema(StrictModel):
    """OpenAI's envelope of a JSON Schema. ``strict`` changes nothing: the schema always holds."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """``response_format``: any text, any JSON object, or JSON of a schema."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "schema": Unsupported((), "use the type json_schema, with the schema in json_schema.schema"),
    }

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(StrictModel):
    """vLLM's ``structured_outputs``: one of its fields. Of what else it may say nothing is ignored: it would be about
    the form of the output.
    """

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "disable_additional_properties": Unsupported((False,), "set additionalProperties to false in the schema"),
        "disable_any_whitespace": Unsupported((False,), "there is never more than a line break between two tokens"),
        "disable_fallback": Unsupported((False, True)),
        "structural_tag": Unsupported((), "use tools with strict set to true, or grammar"),
        "whitespace_pattern": Unsupported((), "use regex or grammar"),
    }

    json_: Annotated[JsonSchema, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in self.unsupported:
                raise unknown_parameter(f"structured_outputs.{name}")
        return self


class StructuredBody(StrictModel):
    """The fields of a request that say what its output must look like."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema = None
    guided_regex: str | None = None
    guided_choice: Choices = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None  # there is one, for which the words mean the same
    regex: str | None = None
    ebnf: str | None = None

    @property
    def structured(self) -> Structured | None:
        """What is asked for; None for any text. Raises ``QuireError`` INVALID with the field at fault, or with both
        names of two that differ.
        """
        asked = [*_from_response_format(self.response_format), *_from_others(self)]
        forms = [field.read() for field in asked]
        for field, form in zip(asked, forms, strict=True):
            if form != forms[0]:  # some clients send one form in the words of several versions of vLLM
                raise invalid(asked[0].param, f"{asked[0].param} and {field.param} exclude each other.")
        return forms[0] if forms else None


@dataclass(frozen=True, slots=True)
class _StructuredField:
    """One wish: which field said it, and what."""

    param: str
    kind: StructuredKind
    value: Any = ""

    def read(self) -> Structured:
        try:
            if self.kind is StructuredKind.CHOICE:
                return choice(self.value)
            return Structured(self.kind, self._schema() if self.kind is StructuredKind.JSON_SCHEMA else self.value)
        except QuireError as error:
            raise invalid(self.param, error.message) from None

    def _schema(self) -> str:
        """One text for one schema, however it was spaced; its order is kept, for it is the order of the output."""
        if isinstance(self.value, str) and len(self.value) > MAX_TEXT:
            return self.value  # refused for its length, and not read first
        try:
            schema = _OBJECT.validate_json(self.value) if isinstance(self.value, str) else self.value
            return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (ValidationError, ValueError):
            raise invalid(self.param, f"{self.param} is not a JSON Schema: it must be a JSON object.") from None


def _from_response_format(given: ResponseFormat | None) -> Iterator[_StructuredField]:
    if given is None:
        return
    if (given.json_schema is not None) != (given.type == "json_schema"):
        param = "response_format.json_schema"
        raise invalid(param, f"{param} and the type json_schema go together.")
    if given.json_schema is not None:
        yield _StructuredField("response_format", StructuredKind.JSON_SCHEMA, given.json_schema.schema_)
    elif given.type == "json_object":
        yield _StructuredField("response_format", StructuredKind.JSON_OBJECT)


def _from_others(request: StructuredBody) -> Iterator[_StructuredField]:
    newer = request.structured_outputs or StructuredOutputs()
    fields = [
        ("structured_outputs.json", StructuredKind.JSON_SCHEMA, newer.json_),
        ("structured_outputs.regex", StructuredKind.REGEX, newer.regex),
        ("structured_outputs.choice", StructuredKind.CHOICE, newer.choice),
        ("structured_outputs.grammar", StructuredKind.GRAMMAR, newer.grammar),
        ("structured_outputs.json_object", StructuredKind.JSON_OBJECT, "" if newer.json_object else None),
        ("guided_json", StructuredKind.JSON_SCHEMA, request.guided_json),
        ("guided_regex", StructuredKind.REGEX, request.guided_regex),
        ("guided_choice", StructuredKind.CHOICE, request.guided_choice),
        ("guided_grammar", StructuredKind.GRAMMAR, request.guided_grammar),
        ("regex", StructuredKind.REGEX, request.regex),
        ("ebnf", StructuredKind.GRAMMAR, request.ebnf),
    ]
    return (_StructuredField(param, kind, value) for param, kind, value in fields if value is not None)
