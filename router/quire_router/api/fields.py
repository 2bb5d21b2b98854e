"""Parts of the request schemas: how single fields are read."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, PlainValidator
from quire_proto.errors import invalid
from quire_proto.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASES, MAX_STOP_TOKEN_IDS

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_LABEL_CHARACTERS = 512
MAX_METADATA, MAX_METADATA_KEY_CHARACTERS = 16, 64
MAX_PROMPT_TOKENS = 2**18  # so many ids are read in ten milliseconds; a longer prompt can come as text
MAX_PROMPTS = 128
_MAX_ABS = 2**64
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_TOKEN_ID = re.compile("0|-?[1-9][0-9]{0,9}")  # one way to write each, so that none comes twice


@dataclass(frozen=True)
class Parsed:
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


def _prompts(prompt: Any) -> list[Any]:
    """All prompts, also where there is only one."""
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return prompt if several else [prompt]


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


def _logit_bias(value: object) -> dict[int, float]:
    """Biases by token id, which JSON can only write as text."""
    if not isinstance(value, dict):
        raise invalid("logit_bias", "logit_bias must be an object of token ids and numbers.")
    if len(value) > MAX_BIASES:
        raise invalid("logit_bias", f"logit_bias names {len(value)} tokens but at most {MAX_BIASES} are allowed.")
    return {_token_id(key): _bias(bias) for key, bias in value.items()}


def _token_id(key: object) -> int:
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if isinstance(key, str) and _TOKEN_ID.fullmatch(key):
        return int(key)
    raise invalid("logit_bias", "Each name in logit_bias must be a token id in decimal digits.")


def _bias(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_MAX_ABS < value < _MAX_ABS:
        raise invalid("logit_bias", "Each value in logit_bias must be a number.")
    return float(value)


def _content(value: object) -> object:
    """A message's text, also where it comes as a list of text parts that belong together."""
    return "".join(map(_text_part, value)) if isinstance(value, list) else value


def _text_part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise ValueError("each part must be an object with a type")
    field = _TEXT_PARTS.get(kind)
    if field is None:
        raise ValueError(f"parts of type {kind[:32]!r} are not supported; only text is")
    if not isinstance(part.get(field), str):
        raise ValueError(f"a part of type {kind} has the field {field}, which must be a string")
    return str(part[field])


_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Tokens = Annotated[list[_Token], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
_Several = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
_Word = Annotated[list[_Token], Field(max_length=MAX_BAD_WORD_TOKENS)]
_MetadataKey = Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARACTERS)]
_MetadataValue = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]

Prompts = Annotated[
    list[str | list[int]],
    Parsed(
        Annotated[
            str | _Tokens | Annotated[list[str], _Several] | Annotated[list[_Tokens], _Several],
            AfterValidator(_prompts),
        ],
        f"it must be one text, or one list of at most {MAX_PROMPT_TOKENS} token ids, "
        f"or a list of at most {MAX_PROMPTS} of the one or of the other",
    ),
]
Metadata = Annotated[
    dict[str, str],
    Parsed(
        Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=MAX_METADATA)],
        f"it must be an object of at most {MAX_METADATA} texts of at most {MAX_LABEL_CHARACTERS} characters, "
        f"under keys of at most {MAX_METADATA_KEY_CHARACTERS}",
    ),
]
Stops = Annotated[list[str], PlainValidator(_stop)]
Content = Annotated[str, BeforeValidator(_content)]
LogitBias = Annotated[dict[int, float], PlainValidator(_logit_bias)]
BadWords = Annotated[
    list[str | list[int]],
    Parsed(
        Annotated[list[str | _Word], Field(max_length=MAX_BAD_WORDS)],
        f"it must be a list of at most {MAX_BAD_WORDS} texts or lists of at most {MAX_BAD_WORD_TOKENS} token ids",
    ),
]
EarlyStopping = Annotated[bool | Literal["never"], Parsed(bool | Literal["never"], 'it must be true, false or "never"')]
StopTokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)]
Number = float | None
Integer = Annotated[int, Field(gt=-_MAX_ABS, lt=_MAX_ABS)] | None  # wide enough: the true ranges are quire_proto's
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)] | None
Effort = Annotated[
    str,
    Parsed(Annotated[str, Field(pattern="^[a-z0-9_-]{1,32}$")], "it must be a word, such as none, low, medium or high"),
]
