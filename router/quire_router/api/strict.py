"""How requests are read: values as they are, unknown fields refused, and what is wrong told in this API's words."""

from collections.abc import Callable
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from quire_proto.errors import ErrorCode, QuireError, invalid

from quire_router.api.weight import check_weight

T = TypeVar("T")
_MOST_PROBLEMS = 100


class Strict(BaseModel):
    """Reads values as they are, without guessing, and refuses fields that it does not know."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """The object in a request's body. Raises ``QuireError`` INVALID with the field at fault."""
        check_weight(body)
        return _refusing(lambda: cls.model_validate_json(body))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """The object with these fields. Raises as ``from_json`` does."""
        return _refusing(lambda: cls.model_validate(fields))


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
    if kind == "extra_forbidden":
        return invalid(param, f"{param} is not a known parameter.")
    if kind == "missing":
        return invalid(param, f"{param} is missing.")
    return invalid(param, f"{param}: {text.removeprefix('Value error, ').replace(' after validation', '')}.")


def _param(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``."""
    param = ""
    for part in location:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    return param[:128]
