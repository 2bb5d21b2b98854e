"""The schemas of ``/openapi.json``: of bodies, from the pydantic models that read them; of answers, from ``answers``;
and of parameters. Ranges that are checked behind the models (``quire_proto.sampling``) are put into their schemas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from pydantic import BaseModel, TypeAdapter
from quire_proto.pooling import MAX_DIMENSIONS
from quire_proto.sampling import (
    MAX_BEAM_WIDTH,
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LENGTH_PENALTY,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MIN_BEAM_WIDTH,
)

from quire_router.api.schemas.base import MAX_STOP_CHARACTERS, MAX_STOPS
from quire_router.api.schemas.openai import StructuredOutputs

_REFERENCE = "#/components/schemas/{model}"
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DescribedParameter:
    """A parameter of a path, a query or a header (``place``), and what it may be."""

    name: str
    place: str
    schema: Mapping[str, Any]
    description: str
    required: bool = False

    def to_object(self) -> Schema:
        """Returns it as the document has it."""
        return {
            "name": self.name,
            "in": self.place,
            "required": self.required,
            "description": self.description,
            "schema": dict(self.schema),
        }


def _range(least: float | None, most: float | None, *, above: float | None = None) -> Schema:
    bounds = {"minimum": least, "maximum": most, "exclusiveMinimum": above}
    return {name: bound for name, bound in bounds.items() if bound is not None}


_STOP: Final = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_STOPS: Final = {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}
_PENALTY: Final = _range(-MAX_PENALTY, MAX_PENALTY)
_LOGPROBS: Final = _range(0, MAX_LOGPROBS)
_NARROWER: Final[Mapping[str, Schema]] = {
    "temperature": _range(0, MAX_TEMPERATURE),
    "top_p": _range(0, 1),
    "top_k": _range(-1, MAX_TOP_K),
    "min_p": _range(0, 1),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _range(None, MAX_REPETITION_PENALTY, above=0),
    "seed": _range(-(2**63), MAX_SEED),
    "n": _range(1, MAX_CHOICES),
    "best_of": _range(1, MAX_CHOICES),
    "beam_width": {"enum": [0, *range(MIN_BEAM_WIDTH, MAX_BEAM_WIDTH + 1)]},
    "length_penalty": _range(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    "logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "max_tokens": _range(1, None),
    "max_completion_tokens": _range(1, None),
    "max_output_tokens": _range(1, None),
    "min_tokens": _range(0, None),
    "dimensions": _range(1, MAX_DIMENSIONS),
}
"""What is true of fields besides their models, in whatever body they are, where they are numbers."""
_TEXTS: Final = frozenset({"regex", "ebnf", "guided_regex", "guided_grammar", "grammar"})
_LISTS: Final = frozenset({"prompt", "input", "documents", "guided_choice", "choice"})
"""Fields that are not empty: texts, and lists with the lists and texts in them."""
_WRITTEN_OUT: Final[Mapping[str, Schema]] = {
    "stop": {"anyOf": [_STOP, _STOPS, {"type": "null"}]},
    "stop_sequences": {"anyOf": [_STOPS, {"type": "null"}]},
    "logit_bias": {
        "anyOf": [
            {
                "type": "object",
                "maxProperties": MAX_BIASES,
                "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
                "additionalProperties": {"type": "number", **_range(-MAX_BIAS, MAX_BIAS)},
            },
            {"type": "null"},
        ]
    },
}
"""Fields that are read by functions of their own, of which pydantic knows no schema."""


class Schemas:
    """The components of a document, each written once."""

    def __init__(self) -> None:
        self.components: dict[str, Schema] = {}

    def of_body(self, body: type[BaseModel]) -> Schema:
        """Returns the schema of a body: a reference to its component."""
        schema = body.model_json_schema(ref_template=_REFERENCE)
        for name, each in schema.pop("$defs", {}).items():
            self._add(name, _true(each))
        return self._add(body.__name__, _true(schema))

    def of_answer(self, answer: Any) -> Schema:
        """Returns the schema of an answer, as ``of_body`` does."""
        schema = TypeAdapter(answer).json_schema(mode="serialization", ref_template=_REFERENCE)
        for name, each in schema.pop("$defs", {}).items():
            self._add(name, each)
        if "title" not in schema:  # a reference, or several of them
            return schema
        items = "".join(item.__name__ for item in get_args(answer))
        return self._add(f"{schema['title']}{items}", schema)

    def _add(self, name: str, schema: Schema) -> Schema:
        assert self.components.setdefault(name, schema) == schema, f"two components are named {name}"
        return {"$ref": _REFERENCE.format(model=name)}


def _true(schema: Schema) -> Schema:
    """Returns a model's schema with what is checked behind the model."""
    properties = schema.get("properties", {})
    for name in properties.keys() & _WRITTEN_OUT.keys():
        if not _kinds(properties[name]) & {"number", "integer", "boolean"}:
            properties[name] = {**_WRITTEN_OUT[name], "title": properties[name].get("title", name)}
    for name in properties.keys() & _NARROWER.keys():
        _narrow(properties[name], _NARROWER[name])
    for name in properties.keys() & _TEXTS:
        _fill(properties[name])
    for name in properties.keys() & _LISTS:
        _fill(properties[name], texts=name.endswith("choice"))
    if schema.get("title") == StructuredOutputs.__name__:
        schema["additionalProperties"] = False
    return schema


def _fill(schema: Schema, *, texts: bool = True) -> None:
    """Says that the texts and lists of a field are not empty."""
    for branch in _branches(schema):
        if branch.get("type") == "string" and texts:
            branch["minLength"] = 1
        if branch.get("type") == "array":
            branch["minItems"] = 1
            _fill(branch["items"], texts=texts)


def _branches(schema: Schema) -> Sequence[Schema]:
    branches: Sequence[Schema] = schema.get("anyOf", [schema])
    return branches


def _kinds(schema: Schema) -> set[str]:
    return {str(branch.get("type")) for branch in _branches(schema)}


def _narrow(schema: Schema, narrower: Schema) -> None:
    for branch in _branches(schema):
        if branch.get("type") in ("number", "integer"):
            for end in ("inimum", "aximum"):
                if any(bound.endswith(end) for bound in narrower):
                    for bound in [name for name in branch if name.endswith(end)]:
                        del branch[bound]
            branch.update(narrower)
