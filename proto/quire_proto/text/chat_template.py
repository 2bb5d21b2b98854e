"""A model's chat template: messages in, prompt text out. Templates come from model folders only.

Templates are programs, so they run in a sandbox (``quire_proto.text.sandbox``), with the helpers that Hugging Face
templates expect.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from time import thread_time
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from quire_proto.errors import QuireError, TokenizerLoadError, invalid
from quire_proto.text.reasoning import THINK_END
from quire_proto.text.sandbox import Sandbox, SandboxLimitError, bounded, checked, compared, size_of
from quire_proto.text.tool_formats import ToolFormat, detect_tool_format

_RENDER_ERRORS = (
    TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError, MemoryError,
)  # fmt: skip

# Limits of one rendering, of processor time and of characters: far more than published templates need.
_SECONDS, _SECONDS_PER_MESSAGE, _SECONDS_PER_CHARACTER = 0.5, 0.002, 1e-6
_SLOW = 0.02  # seconds; a longer rendering of a short conversation delays other streams
_CHARACTERS, _TIMES = 2**20, 16
_MAX_SIZE = 2**26  # characters at which counting a conversation's size stops


class ChatTemplate:
    """A compiled template with the special tokens that it may name (``bos_token`` and so on).

    ``variables`` are the names of the variables that it uses. ``tool_format`` is the format of its tool calls, None if
    it has no tools or an unknown format. ``has_reasoning`` says that its model writes reasoning between markers before
    it answers, and ``is_slow`` that even short conversations took long.

    Raises ``TokenizerLoadError`` when ``source`` is not a template; ``origin`` names the file in that message.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(environment.counted(source))
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except (TemplateSyntaxError, RecursionError) as error:
            raise TokenizerLoadError(f"{origin}: the chat template is not valid: {error}.") from error
        self.tool_format: ToolFormat | None = detect_tool_format(source) if "tools" in self.variables else None
        self.has_reasoning = THINK_END in source
        self.is_slow = False
        with suppress(QuireError):
            self.render([{"role": "user", "content": "Hello"}])

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
        the template's own words where it refuses them, and where it takes too much time or memory for them.
        """
        start = thread_time()
        size, number = size_of(tools, _MAX_SIZE) + sum(map(_size, messages)), len(messages) + len(tools)
        seconds = _SECONDS + _SECONDS_PER_MESSAGE * number + _SECONDS_PER_CHARACTER * size
        try:
            with bounded(seconds, _CHARACTERS + _TIMES * size):
                return self._template.render(
                    **options,
                    messages=[dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._special_tokens,
                )
        except SandboxLimitError as error:
            raise invalid("messages", "The model's chat template takes too much time or memory.") from error
        except _RefusalError as refusal:
            raise invalid("messages", f"The model's chat template refuses these messages: {refusal}") from refusal
        except _RENDER_ERRORS as error:
            raise _unrenderable() from error
        finally:
            expected = _SLOW + _SECONDS_PER_MESSAGE * number + _SECONDS_PER_CHARACTER * size
            self.is_slow = self.is_slow or thread_time() - start > expected


def _size(message: Mapping[str, Any]) -> int:
    """The approximate number of characters of a message."""
    return sum(len(each) if isinstance(each, str) else size_of(each, _MAX_SIZE) for each in message.values())


def _unrenderable() -> QuireError:
    return invalid("messages", "The model's chat template cannot render these messages.")


class _RefusalError(TemplateError):
    """Raised by a template through ``raise_exception``."""


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

    def __repr__(self) -> str:
        return "<Namespace>"  # its contents could be deeply nested


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError("a namespace takes no names that begin with an underscore")


def _plain_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*(each if isinstance(each, Mapping) else compared(each) for each in args), **kwargs)


def _raise_exception(message: object) -> NoReturn:
    raise _RefusalError(str(checked(message)))


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


def _environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(_GLOBALS)
    environment.limit_filters()
    return environment
