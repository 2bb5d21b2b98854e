"""``StrictModel``: request bodies as pydantic models that take values as they are, refuse parameters of other servers
where they would change the response, and explain errors in this API's words. Below it: the types of single fields.
"""

import functools
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    ValidationError,
    create_model,
)
from pydantic.json_schema import SkipJsonSchema
from quire_proto.errors import QuireError, invalid
from quire_proto.pooling import Task
from quire_proto.sampling import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_TOKEN_IDS,
)
from quire_proto.text.conversation import Hidden, text_content, tool_output

from quire_router.api.schemas.parameters import Column, Parameter, Table
from quire_router.core.complexity import check_complexity
from quire_router.core.errors import invalid_body

T = TypeVar("T")
_MAX_PROBLEMS = 100
Model = TypeVar("Model", bound="StrictModel")

_MAX_PARAM = 128  # characters
_MAX_NAMES, _MAX_NAME = 16, 64  # of a header, and characters of one
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\[\]-]")


class StrictModel(BaseModel):
    """Takes values as they are, without conversion. Unknown fields are kept in ``model_extra``. ``foreign`` says which
    of them are fields of this object under another name, and which are refused; ``ignored_parameters`` names the rest.
    A request that was made from one of another API has its fields' ``names`` there, where they are others.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)
    foreign: ClassVar[Table] = {}
    tasks: ClassVar[Sequence[Task]] = ()
    """What a request needs of its model, one of these; nothing in particular if there are none."""
    names: ClassVar[Mapping[str, str]] = {}

    @property
    def is_ignored(self) -> bool:
        """Whether all of it changes nothing."""
        return False

    def with_model(self, model: str) -> Self:
        """Returns this request for a ``model``, which it does not name itself."""
        return self.model_copy(update={"model": model})

    @property
    def sent_names(self) -> dict[str, str]:
        """The names under which the client sent fields that have other names elsewhere, by the fields' own."""
        return {known.same_as: name for name, known, _ in _meant(self) if known.same_as is not None}

    @property
    def as_sent(self) -> "StrictModel":
        """The request as the client sent it, where this one was made from it."""
        return self

    def unseen(self, hidden: Hidden) -> Iterator[str]:  # noqa: ARG002 - where there is no conversation
        """Yields the paths of what the model does not see of a conversation: no template shows it, or its own template
        has it ``hidden``.
        """
        yield from ()

    @classmethod
    def from_json(cls, body: bytes | bytearray) -> Self:
        """Returns the object in a request's body. Raises ``QuireError`` INVALID with the field at fault."""
        check_complexity(body)
        text = (
            body[len(BOM_UTF8) :] if body.startswith(BOM_UTF8) else body
        )  # RFC 8259 lets a parser ignore it, and .NET and PowerShell write one
        return _in_own_names(_refusing(lambda: cls.model_validate_json(text)))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Returns the object with these fields. Raises as ``from_json`` does."""
        return _in_own_names(_refusing(lambda: cls.model_validate(fields)))


class LenientModel(StrictModel):
    """A part of a conversation: unknown fields are dropped, because client libraries add some to the messages that they
    send back.
    """

    model_config = ConfigDict(extra="ignore")


def ignored_parameters(request: StrictModel) -> Iterator[tuple[str, bool]]:
    """Yields each field of a request that has no effect: its name with its path, and whether the parameter is known, so
    that only its value is not followed. Leaves out nulls.
    """
    for owner, prefix in _objects(request.as_sent):
        if owner.is_ignored:
            yield prefix.removesuffix("."), True
            continue
        for name, value in (owner.model_extra or {}).items():
            known = owner.foreign.get(name)
            if value is not None and (known is None or not (known.same_as or known.is_neutral(value))):
                yield prefix + name, known is not None


def as_header_value(params: Sequence[str]) -> str:
    """Returns names of parameters as the value of a header. Clients chose them, so they are cut to a few short names of
    plain letters; ``+7`` stands for seven more.
    """
    names = [_UNPRINTABLE.sub("?", param[:_MAX_NAME]) or "?" for param in params[:_MAX_NAMES]]
    return ", ".join([*names, f"+{len(params) - _MAX_NAMES}"] if len(params) > _MAX_NAMES else names)


def unknown_parameter(param: str) -> QuireError:
    """Returns the error of an unknown parameter."""
    return invalid(param[:_MAX_PARAM], f"{param[:_MAX_PARAM]} is not a known parameter.")


def _in_own_names(request: Model) -> Model:
    """Returns the request with the values of parameters that have other names elsewhere in its own fields. Raises
    ``QuireError`` INVALID for those that would change the answer, and are not supported.
    """
    for owner, prefix in _objects(request):
        for name, known, _ in _meant(owner):
            if known.column is Column.REFUSED:
                raise invalid(prefix + name, f"{prefix}{name} is not supported here: {known.instead}.")
    own: dict[str, Any] = {}
    for name, known, value in _meant(request):
        field = known.same_as
        if field is not None:
            given = own.get(field, getattr(request, field) if field in request.model_fields_set else None)
            own[field] = _validated(type(request), name, known, value)
            if given is not None and given != own[field]:
                raise invalid(name, f"{name} and {field} mean the same but differ.")
    return request.model_copy(update=own) if own else request


def _meant(owner: StrictModel) -> Iterator[tuple[str, Parameter, Any]]:
    """Yields the parameters of other servers in an object that mean something, with their values."""
    for name, value in (owner.model_extra or {}).items():
        known = owner.foreign.get(name)
        if known is not None and value is not None and not known.is_neutral(value):
            yield name, known, value


def _validated(kind: type[StrictModel], name: str, known: Parameter, value: object) -> Any:
    """Returns the value of a parameter as that of the field that it stands for. Raises ``QuireError`` INVALID."""
    try:
        value = value if known.convert is None else known.convert(value)
    except ValueError as error:
        raise invalid(name, f"{name}: {error}.") from None
    field = known.same_as or name
    alone = _one_field(kind, name, field)
    try:
        return getattr(_refusing(lambda: alone.model_validate({name: value})), name)
    except QuireError as error:
        if error.param != field:
            raise
        raise invalid(name, re.sub(rf"\b{field}\b", name, error.message)) from None


@functools.cache
def _one_field(kind: type[StrictModel], name: str, field: str) -> type[BaseModel]:
    """Returns a model of one field of ``kind`` alone, under another name, which its errors have."""
    info = kind.model_fields[field]
    kind_of_value: Any = Annotated[(info.annotation, Field(), *info.metadata)]
    fields: Any = {name: (kind_of_value, ...)}
    return create_model("OneField", __config__=StrictModel.model_config, **fields)


def _objects(model: StrictModel, prefix: str = "") -> Iterator[tuple[StrictModel, str]]:
    """Yields the object, and those in it that keep unknown fields, with the path before the names of their fields.
    Leaves out conversations, which may be long.
    """
    yield model, prefix
    for name, value in model.__dict__.items():
        if isinstance(value, StrictModel) and not isinstance(value, LenientModel):
            yield from _objects(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and not isinstance(value[0], int | LenientModel):  # those may be long
            for number, each in enumerate(value):
                if isinstance(each, StrictModel):  # a list may hold texts beside objects
                    yield from _objects(each, f"{prefix}{name}[{number}].")


def _refusing(read: Callable[[], T]) -> T:
    try:
        return read()
    except ValidationError as error:
        raise _validation_error(error) from None
    except RecursionError:
        raise invalid_body("The body is nested too deeply.") from None


def _validation_error(error: ValidationError) -> QuireError:
    """Returns the first problem in the words of this API, without the input. pydantic renders every problem before the
    first can be read, so thousands of them are only counted.
    """
    if error.error_count() > _MAX_PROBLEMS:
        return invalid_body(f"{error.error_count()} values in the body are not what was expected.")
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location, kind, text = problem["loc"], problem["type"], problem["msg"]
    if kind == "json_invalid":
        return invalid_body(f"The body is not valid JSON: {text.removeprefix('Invalid JSON: ')}.")
    if not location:
        return invalid_body("The body must be a JSON object.")
    param = _param(location)
    if kind == "missing":
        return invalid(param, f"{param} is missing.")
    return invalid(param, f"{param}: {text.removeprefix('Value error, ').replace(' after validation', '')}.")


def _param(location: tuple[int | str, ...]) -> str:
    """Returns ``("messages", 0, "content")`` as ``messages[0].content``."""
    param = ""
    for part in location:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    return param[:_MAX_PARAM]


MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_LABEL_CHARACTERS = 512
MAX_METADATA, MAX_METADATA_KEY_CHARACTERS = 16, 64
MAX_PROMPT_TOKENS = 2**18  # so many ids are read in ten milliseconds; a longer prompt can come as text
MAX_PROMPTS = 128
MAX_INPUTS = 2048  # of prompts that are pooled, as OpenAI has it
_MAX_ABS = 2**64
_TOKENS_REFUSAL = f"it must be a list of at most {MAX_PROMPT_TOKENS} token ids"
_SHOWN, _SHOWN_NAMES = 32, 4  # characters of a wrong name that an error shows, and wrong names
_TOKEN_ID = re.compile("0|-?[1-9][0-9]{0,9}")  # one way to write each, so that none comes twice


@dataclass(frozen=True)
class Parsed:
    """Marks a field that is validated as ``kind``; any problem inside of it is one error, ``refusal``, at the field."""

    kind: Any
    refusal: str

    def __get_pydantic_core_schema__(self, _source: object, handler: GetCoreSchemaHandler) -> Any:
        return {
            "type": "custom-error",
            "schema": handler.generate_schema(self.kind),
            "custom_error_type": "refusal",
            "custom_error_message": self.refusal,
        }


def _seed(value: int) -> int | None:
    """Returns a seed as 64 bits without a sign. -1 is a random one, as in vLLM and llama.cpp."""
    if value == -1:
        return None
    return value + 2**64 if -(2**63) <= value < 0 else value


def _model_name(value: object) -> object:
    return "" if value is None else value


def _as_list(prompt: Any) -> list[Any]:
    """Returns a list of prompts, also where there is only one."""
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return prompt if several else [prompt]


def _stop(value: object) -> list[str]:
    return _stops("stop", [value] if isinstance(value, str) else value)


def _stop_sequences(value: object) -> list[str]:
    return _stops("stop_sequences", value)


def _stops(param: str, stops: object) -> list[str]:
    if stops is None:
        return []
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise invalid(param, f"{param} holds {len(stops)} strings but at most {MAX_STOPS} are allowed.")
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        one = "a string or " if param == "stop" else ""
        raise invalid(param, f"{param} must be {one}a list of strings.")
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise invalid(param, f"Each stop string must have 1 to {MAX_STOP_CHARACTERS} characters.")
    return stops


def _logit_bias(value: object) -> dict[int, float]:
    """Returns biases by token id, which JSON can only write as text."""
    if not isinstance(value, dict):
        raise invalid("logit_bias", "logit_bias must be an object of token ids and numbers.")
    if len(value) > MAX_BIASES:
        raise invalid("logit_bias", f"logit_bias names {len(value)} tokens but at most {MAX_BIASES} are allowed.")
    ids = {key: _token_id(key) for key in value}
    if wrong := [repr(str(key)[:_SHOWN]) for key, token in ids.items() if token is None]:
        more = f" and {len(wrong) - _SHOWN_NAMES} more" if len(wrong) > _SHOWN_NAMES else ""
        names = ", ".join(wrong[:_SHOWN_NAMES]) + more
        raise invalid("logit_bias", f"Each name in logit_bias must be a token id in decimal digits, not {names}.")
    return {token: _bias(value[key]) for key, token in ids.items() if token is not None}


def _token_id(key: object) -> int | None:
    """Returns the token id that a name in ``logit_bias`` is; None for others."""
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    return int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else None


def _bias(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_MAX_ABS < value < _MAX_ABS:
        raise invalid("logit_bias", "Each value in logit_bias must be a number.")
    return float(value)


def _whole(value: object) -> object:
    """Returns a number that is whole as an integer: some clients write 1.0, which JSON Schema takes for one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _integers(tokens: list[float]) -> list[int]:
    return list(map(int, tokens))


WHOLE: Final = BeforeValidator(_whole)
Whole = Annotated[int, Field(gt=-_MAX_ABS, lt=_MAX_ABS), WHOLE]  # the true ranges are quire_proto's
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_WholeToken = Annotated[float, Field(ge=0, lt=2**31, multiple_of=1)]
_TOKENS: Any = Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)
_Tokens = Annotated[list[_Token], _TOKENS]
_WholeTokens = Annotated[list[_WholeToken], _TOKENS, AfterValidator(_integers)]
TokenIds = Annotated[list[int], Parsed(_Tokens | SkipJsonSchema[_WholeTokens], _TOKENS_REFUSAL)]
_Word = Annotated[str, Field(pattern="[^ ]", max_length=MAX_BAD_WORD_CHARACTERS)]
_WordIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31), WHOLE]], Field(min_length=1, max_length=MAX_BAD_WORD_TOKENS)
]
_MetadataKey = Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARACTERS)]
_MetadataValue = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]


def _prompts(most: int) -> Parsed:
    """One text or list of tokens, or a list of at most ``most`` of either."""
    bounds = Field(min_length=1, max_length=most, fail_fast=True)
    lists = Annotated[list[_Tokens], bounds] | SkipJsonSchema[Annotated[list[_WholeTokens], bounds]]
    one = str | _Tokens | SkipJsonSchema[_WholeTokens]
    either = Annotated[one | Annotated[list[str], bounds] | lists, AfterValidator(_as_list)]
    refusal = (
        f"it must be one text, or one list of at most {MAX_PROMPT_TOKENS} token ids, "
        f"or a list of at most {most} of the one or of the other"
    )
    return Parsed(either, refusal)


Prompts = Annotated[list[str | list[int]], _prompts(MAX_PROMPTS)]
Inputs = Annotated[list[str | list[int]], _prompts(MAX_INPUTS)]
Metadata = Annotated[
    dict[str, str],
    Parsed(
        Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=MAX_METADATA)],
        f"it must be an object of at most {MAX_METADATA} texts of at most {MAX_LABEL_CHARACTERS} characters, "
        f"under keys of at most {MAX_METADATA_KEY_CHARACTERS}",
    ),
]
Stops = Annotated[list[str], PlainValidator(_stop)]
StopSequences = Annotated[list[str], PlainValidator(_stop_sequences)]
Content = Annotated[str, BeforeValidator(text_content)]
ToolOutput = Annotated[str, BeforeValidator(tool_output)]
LogitBias = Annotated[dict[int, float], PlainValidator(_logit_bias)]
BadWords = Annotated[
    list[str | list[int]],
    Parsed(
        Annotated[list[_Word | _WordIds], Field(max_length=MAX_BAD_WORDS)],
        f"it must be a list of at most {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_WORD_CHARACTERS} characters "
        f"or lists of 1 to {MAX_BAD_WORD_TOKENS} token ids",
    ),
]
EarlyStopping = Annotated[bool | Literal["never"], Parsed(bool | Literal["never"], 'it must be true, false or "never"')]
StopTokenIds = Annotated[list[Whole], Field(max_length=MAX_STOP_TOKEN_IDS)]
ModelName = Annotated[str, BeforeValidator(_model_name, json_schema_input_type=str | None), Field(max_length=128)]
"""What a request names its model; empty where it names none, and its caller may have only one."""
Number = float | None
Integer = Whole | None
Seed = Annotated[int, Field(gt=-_MAX_ABS, lt=_MAX_ABS), AfterValidator(_seed), WHOLE] | None
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)] | None
Effort = Annotated[
    str,
    Parsed(Annotated[str, Field(pattern="^[a-z0-9_-]{1,32}$")], "it must be a word, such as none, low, medium or high"),
]
