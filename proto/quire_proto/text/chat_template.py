"""A model's chat template: messages in, prompt text out. Knows no tokens, and takes templates from model folders only.

Templates are programs, so they run in Jinja's immutable sandbox, with the helpers that Hugging Face templates expect.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quire_proto.errors import QuireError, invalid
from quire_proto.text.errors import ModelTextError
from quire_proto.text.reasoning import END as END_OF_REASONING
from quire_proto.text.tools.formats import ToolFormat, format_of

_RENDER_ERRORS = (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError)


class ChatTemplate:
    """A compiled template with the special tokens that it may name (``bos_token`` and so on).

    ``variables`` are the names that it asks for. ``tool_format`` is how calls are written in it, None where it knows no
    tools or another format. ``marks_reasoning`` says that its model thinks between marks before it answers.

    Raises ``ModelTextError`` when ``source`` is not a template; ``origin`` names the file in that message.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except (TemplateSyntaxError, RecursionError) as error:
            raise ModelTextError(f"{origin}: the chat template is not valid: {error}.") from error
        self.tool_format: ToolFormat | None = format_of(source) if "tools" in self.variables else None
        self.marks_reasoning = END_OF_REASONING in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] = {},
    ) -> str:
        """The prompt that asks the assistant to answer ``messages``, for which it may use ``tools``, in the shape of
        the OpenAI API with arguments as objects. ``options`` are further variables. Raises ``QuireError`` INVALID with
        the template's own words where it refuses them.
        """
        try:
            return self._template.render(
                **options,
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except _RefusalError as refusal:
            raise invalid("messages", f"The model's chat template refuses these messages: {refusal}") from refusal
        except _RENDER_ERRORS as error:
            raise _unrenderable() from error


def _unrenderable() -> QuireError:
    return invalid("messages", "The model's chat template cannot render these messages.")


class _RefusalError(TemplateError):
    """What a template says through ``raise_exception``."""


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; when serving it is only its contents."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """``namespace()`` without underscore names, which are a way out of sandboxes."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        given = dict(*rest, **kwargs)
        for name in given:
            _refuse_private(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError("a namespace takes no names that begin with an underscore")


def _plain_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> NoReturn:
    raise _RefusalError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_GLOBALS: dict[str, Callable[..., Any]] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
    "namespace": _PlainNamespace,
    "dict": _plain_dict,
}


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(_GLOBALS)
    return environment
