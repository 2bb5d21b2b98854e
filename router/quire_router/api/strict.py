"""How requests are read: values as they are, parameters of other servers refused where they would change the answer,
and what is wrong told in this API's words.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from quire_proto.errors import ErrorCode, QuireError, invalid

from quire_router.api.weight import check_complexity

T = TypeVar("T")
_MOST_PROBLEMS = 100
Model = TypeVar("Model", bound="StrictModel")

_MAX_PARAM = 128  # characters
_MAX_NAMES, _MAX_NAME = 16, 64  # of a header, and characters of one
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\[\]-]")


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A parameter that is known by its name only. ``neutral`` values of it say nothing, as null does. Any other would
    change the answer, so it is refused with what to use ``instead``, a phrase; with None there it would not change the
    answer, and is ignored.
    """

    neutral: tuple[object, ...] = ()
    instead: str | None = None

    def is_neutral(self, value: object) -> bool:
        """Whether a value says nothing. True is not 1 here."""
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.neutral)


class StrictModel(BaseModel):
    """Reads values as they are, without guessing. Fields that it does not know are kept aside in ``model_extra``; those
    of them that are ``unsupported`` are refused unless they change nothing, and ``ignored_parameters`` names the rest.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)
    unsupported: ClassVar[Mapping[str, Unsupported]] = {}

    @classmethod
    def from_json(cls, body: bytes | bytearray) -> Self:
        """The object in a request's body. Raises ``QuireError`` INVALID with the field at fault."""
        check_complexity(body)
        return _supported(_refusing(lambda: cls.model_validate_json(body)))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """The object with these fields. Raises as ``from_json`` does."""
        return _supported(_refusing(lambda: cls.model_validate(fields)))


class LenientModel(StrictModel):
    """A part of a conversation: what it does not know is dropped, because client libraries add to the messages that
    they hand back.
    """

    model_config = ConfigDict(extra="ignore")


def ignored_parameters(request: StrictModel) -> Iterator[tuple[str, bool]]:
    """What a request says beyond its schema, in its order: where it stands, and whether it is known so that only its
    value is not followed. Null says nothing.
    """
    for owner, prefix in _objects(request):
        known = owner.unsupported
        for name, value in (owner.model_extra or {}).items():
            if value is not None and not (name in known and known[name].is_neutral(value)):
                yield prefix + name, name in known


def as_header_value(params: Sequence[str]) -> str:
    """Names of parameters as the value of a header. Clients chose them, so they are few, short and of plain letters;
    ``+7`` stands for seven more.
    """
    names = [_UNPRINTABLE.sub("?", param[:_MAX_NAME]) or "?" for param in params[:_MAX_NAMES]]
    return ", ".join([*names, f"+{len(params) - _MAX_NAMES}"] if len(params) > _MAX_NAMES else names)


def unknown_parameter(param: str) -> QuireError:
    """The refusal of a parameter that is not known."""
    return invalid(param[:_MAX_PARAM], f"{param[:_MAX_PARAM]} is not a known parameter.")


def _supported(request: Model) -> Model:
    for owner, prefix in _objects(request):
        extra = owner.model_extra or {}
        for name in filter(owner.unsupported.__contains__, extra):
            known, value = owner.unsupported[name], extra[name]
            if known.instead is not None and value is not None and not known.is_neutral(value):
                raise invalid(prefix + name, f"{prefix}{name} is not supported here: {known.instead}.")
    return request


def _objects(model: StrictModel, prefix: str = "") -> Iterator[tuple[StrictModel, str]]:
    """The object, and those in it that keep what they do not know, with what stands before the names of their fields.
    Conversations, which may be long, are not gone through.
    """
    yield model, prefix
    for name, value in model.__dict__.items():
        if isinstance(value, StrictModel) and not isinstance(value, LenientModel):
            yield from _objects(value, f"{prefix}{name}.")
        elif (
            isinstance(value, list)
            and value
            and isinstance(value[0], StrictModel)
            and not isinstance(value[0], LenientModel)
        ):
            for number, each in enumerate(value):
                yield from _objects(each, f"{prefix}{name}[{number}].")


def _refusing(read: Callable[[], T]) -> T:
    try:
        return read()
    except ValidationError as error:
        raise _explain(error) from None
    except RecursionError:
        raise QuireError(ErrorCode.INVALID, "The body is nested too deeply.") from None


def _explain(error: ValidationError) -> QuireError:
    """The first problem in the words of this API; the input itself is not repeated. Each problem is written out by the
    library before one can be seen, so thousands of them are only counted.
    """
    if error.error_count() > _MOST_PROBLEMS:
        return QuireError(ErrorCode.INVALID, f"{error.error_count()} values in the body are not what was expected.")
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location, kind, text = problem["loc"], problem["type"], problem["msg"]
    if kind == "json_invalid":
        return QuireError(ErrorCode.INVALID, f"The body is not valid JSON: {text.removeprefix('Invalid JSON: ')}.")
    if not location:
        return QuireError(ErrorCode.INVALID, "The body must be a JSON object.")
    param = _param(location)
    if kind == "missing":
        return invalid(param, f"{param} is missing.")
    return invalid(param, f"{param}: {text.removeprefix('Value error, ').replace(' after validation', '')}.")


def _param(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``."""
    param = ""
    for part in location:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    return param[:_MAX_PARAM]
