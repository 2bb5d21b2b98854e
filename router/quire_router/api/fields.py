"""Parts of the request schemas: how single fields are read, and which are known but not supported yet."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, PlainValidator
from quire_proto.errors import invalid
from quire_proto.sampling import MAX_STOP_TOKEN_IDS

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_LABEL_CHARACTERS = 512
MAX_METADATA, MAX_METADATA_KEY_CHARACTERS = 16, 64
MAX_PROMPT_TOKENS = 2**18  # so many ids are read in ten milliseconds; a longer prompt can come as text
_MOST = 2**64


def only(*values: object) -> PlainValidator:
    """Marks a field that this service does not support yet: accepted where it changes nothing, which is null or one
    of ``values``.
    """

    def read(value: object) -> None:
        if value is not None and not any(_same(value, allowed) for allowed in values):
            raise ValueError("this is not supported by this service yet")

    return PlainValidator(read)


def _same(value: object, allowed: object) -> bool:
    """Equality that does not take True for 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


@dataclass(frozen=True)
class Read:
    """Marks a field that is read as ``kind``; whatever is wrong inside of it is told as ``refusal``, at the field."""

    kind: Any
    refusal: str

    def __get_pydantic_core_schema__(self, _source: object, handler: GetCoreSchemaHandler) -> Any:
        return {
            "type": "custom-error",
            "schema": handler.generate_schema(self.kind),
            "custom_error_type": "refusal",
            "custom_error_message": self.refusal,
        }


def _alone(prompt: Any) -> Any:
    """The prompt out of a list of one."""
    return prompt[0] if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else prompt


def _stop(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop holds {len(stops)} strings but at most {MAX_STOPS} are allowed.")
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop", "stop must be a string or a list of strings.")
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise invalid("stop", f"Each stop string must have 1 to {MAX_STOP_CHARACTERS} characters.")
    return stops


def _content(value: object) -> object:
    """A message's text, also where it comes as a list of text parts that belong together."""
    return "".join(map(_text_part, value)) if isinstance(value, list) and value else value


def _text_part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise ValueError("each part must be an object with a type")
    if kind != "text":
        raise ValueError(f"parts of type {kind[:32]!r} are not supported; only text is")
    if not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
        raise ValueError("a text part has the fields type and text, and text must be a string")
    return str(part["text"])


_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Tokens = Annotated[list[_Token], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
_OnePrompt = Annotated[list[str | _Tokens], Field(min_length=1, max_length=1, fail_fast=True)]
_MetadataKey = Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARACTERS)]
_MetadataValue = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]

Prompt = Annotated[
    str | list[int],
    Read(
        Annotated[str | _Tokens | _OnePrompt, AfterValidator(_alone)],
        f"it must be one text, or one list of at most {MAX_PROMPT_TOKENS} token ids",
    ),
]
Metadata = Annotated[
    dict[str, str],
    Read(
        Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=MAX_METADATA)],
        f"it must be an object of at most {MAX_METADATA} texts of at most {MAX_LABEL_CHARACTERS} characters, "
        f"under keys of at most {MAX_METADATA_KEY_CHARACTERS}",
    ),
]
Stops = Annotated[list[str], PlainValidator(_stop)]
Content = Annotated[str, BeforeValidator(_content)]
StopTokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)]
Number = float | None
Integer = Annotated[int, Field(gt=-_MOST, lt=_MOST)] | None  # wide enough: the true ranges are quire_proto's
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)] | None
