"""A request as its record has it in JSON, read again field by field: whatever is in it has the type that it had."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from math import isfinite
from typing import Any

from quire_proto.sampling import SamplingParams
from quire_proto.structured import Structured, StructuredKind

from quire_router.generation import GenerationRequest


def decode_request(fields: dict[str, Any], prompt: "array[int]") -> GenerationRequest:
    """The request. Raises ``ValueError``, ``TypeError``, ``KeyError``, ``AttributeError`` or ``QuireError`` for what is
    none.
    """
    if min(prompt, default=0) < 0:
        raise ValueError("the prompt is not made of tokens")
    plain = {name: read(fields.pop(name)) for name, read in _FIELDS.items() if name in fields}
    return GenerationRequest(
        prompt_token_ids=prompt,
        params=decode_params(fields.pop("params")),
        stop=tuple(map(_text, fields.pop("stop"))),
        parts=tuple(map(_text, fields.pop("parts", ()))),
        cache_salt=bytes.fromhex(fields.pop("cache_salt")),
        **plain,
        **fields,
    )


def decode_params(fields: Mapping[str, Any]) -> SamplingParams:
    """The request's parameters. Raises as ``decode_request``."""
    read = {name: _read_param(name, value) for name, value in fields.items() if name != "structured"}
    structured = fields.get("structured")
    if structured is not None:
        structured = Structured(StructuredKind(structured["kind"]), _text(structured["text"]))
    return SamplingParams(**read, structured=structured)


def _read_param(name: str, value: Any) -> Any:
    """A parameter that has the type of its default; the ranges are the parameters' own to check."""
    default = _DEFAULTS[name]
    if isinstance(default, tuple):
        return tuple(map(_numbers, value))
    if name == "early_stopping":
        return value if value == "never" else _truth(value)
    if isinstance(default, bool):
        return _truth(value)
    if default is None:
        return None if value is None else _whole(value)
    return _whole(value) if isinstance(default, int) else _number(value)


def _numbers(value: Any) -> Any:
    """A number, or several of them; JSON knows no tuples, and parameters know no lists."""
    return tuple(map(_number, value)) if isinstance(value, list) else _whole(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("this is no text")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("this is neither true nor false")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("this is no whole number")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise TypeError("this is no number")
    return value


def _moment(value: Any) -> float | None:
    return None if value is None else _number(value)


_DEFAULTS = {each.name: each.default for each in fields_of(SamplingParams)}
_FIELDS: dict[str, Callable[[Any], Any]] = {
    "request_id": _text,
    "model": _text,
    "include_stop": _truth,
    "skip_special_tokens": _truth,
    "echo": _truth,
    "priority": _whole,
    "operation": _text,
    "tenant": _text,
    "stream": _truth,
    "created": _number,
    "shape": _text,
    "digest": _text,
    "background": _truth,
    "session": _text,
    "deadline": _moment,
}
