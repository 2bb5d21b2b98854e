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
    plain = {name: read(fields.pop(name)) for name, read in _FIELD_DECODERS.items() if name in fields}
    return GenerationRequest(
        prompt_token_ids=prompt,
        params=decode_params(fields.pop("params")),
        stop=tuple(map(_as_str, fields.pop("stop"))),
        parts=tuple(map(_as_str, fields.pop("parts", ()))),
        cache_salt=bytes.fromhex(fields.pop("cache_salt")),
        **plain,
        **fields,
    )


def decode_params(fields: Mapping[str, Any]) -> SamplingParams:
    """The request's parameters. Raises as ``decode_request``."""
    read = {name: _decode_param(name, value) for name, value in fields.items() if name != "structured"}
    structured = fields.get("structured")
    if structured is not None:
        structured = Structured(StructuredKind(structured["kind"]), _as_str(structured["text"]))
    return SamplingParams(**read, structured=structured)


def _decode_param(name: str, value: Any) -> Any:
    """A parameter that has the type of its default; the ranges are the parameters' own to check."""
    default = _PARAM_DEFAULTS[name]
    if isinstance(default, tuple):
        return tuple(map(_as_int_or_tuple, value))
    if name == "early_stopping":
        return value if value == "never" else _as_bool(value)
    if isinstance(default, bool):
        return _as_bool(value)
    if default is None:
        return None if value is None else _as_int(value)
    return _as_int(value) if isinstance(default, int) else _as_float(value)


def _as_int_or_tuple(value: Any) -> Any:
    """A number, or several of them; JSON knows no tuples, and parameters know no lists."""
    return tuple(map(_as_float, value)) if isinstance(value, list) else _as_int(value)


def _as_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("this is no text")
    return value


def _as_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("this is neither true nor false")
    return value


def _as_int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("this is no whole number")
    return value


def _as_float(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise TypeError("this is no number")
    return value


def _as_optional_float(value: Any) -> float | None:
    return None if value is None else _as_float(value)


_PARAM_DEFAULTS = {each.name: each.default for each in fields_of(SamplingParams)}
_FIELD_DECODERS: dict[str, Callable[[Any], Any]] = {
    "request_id": _as_str,
    "model": _as_str,
    "include_stop": _as_bool,
    "skip_special_tokens": _as_bool,
    "echo": _as_bool,
    "priority": _as_int,
    "operation": _as_str,
    "tenant": _as_str,
    "stream": _as_bool,
    "created": _as_float,
    "shape": _as_str,
    "digest": _as_str,
    "background": _as_bool,
    "session": _as_str,
    "deadline": _as_optional_float,
}
