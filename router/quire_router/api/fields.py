"""Parts of the request schemas: how single fields are read, and which are known but not supported yet."""

from typing import Annotated

from pydantic import BeforeValidator, Field, PlainValidator
from quire_proto.errors import invalid
from quire_proto.sampling import MAX_STOP_TOKEN_IDS

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_LABEL_CHARACTERS = 512
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


def _prompt(value: object) -> str | list[int]:
    """One text, one list of tokens, or a list of exactly one of those."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise invalid("prompt", f"prompt holds {len(value)} prompts; this service takes one in a request for now.")
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise invalid("prompt", "prompt must be a string or a list of token ids.")


def _stop(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop", "stop must be a string or a list of strings.")
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop holds {len(stops)} strings but at most {MAX_STOPS} are allowed.")
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


Prompt = Annotated[str | list[int], PlainValidator(_prompt)]
Stops = Annotated[list[str], PlainValidator(_stop)]
Content = Annotated[str, BeforeValidator(_content)]
StopTokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)]
Number = float | None
Integer = Annotated[int, Field(gt=-_MOST, lt=_MOST)] | None  # wide enough: the true ranges are quire_proto's
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)] | None
