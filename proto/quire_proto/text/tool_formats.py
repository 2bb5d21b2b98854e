"""The formats in which models write tool calls, as data: one ``ToolFormat`` for each family of models, and how a
chat template's family is recognised.

A format says with which marks calls begin and end, and which of five notations is between them:

* ``JsonCall``: a JSON object that holds the name and the arguments;
* ``NamedCall``: a name, then the arguments in JSON;
* ``TaggedCall``: tags around each argument;
* ``PythonCall``: the call of a function in Python;
* ``GemmaCall``: Gemma's own notation.

The parsers (``tool_parser``) and the grammars (``tool_grammar``) are both made from it. Texts of a format are what a
grammar writes; a parser takes any white space, or none, wherever they have some.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

PLACES = re.compile(r"\{(name|key|kind|number)\}")
"""What stands for the tool's name in a text, for an argument's, for whether its value is a string, and for a number."""


@dataclass(frozen=True, slots=True)
class JsonCall:
    """``{"name": "get", "arguments": {"city": "Rome"}}``. ``head`` is what grammars write up to the arguments, and
    ``tail`` what they write after them; ``listed`` calls are elements of one list.
    """

    head: str = '{"name": "{name}", "arguments": '
    tail: str = "}"
    listed: bool = False


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A name between marks, then the arguments as a JSON object. ``skipped`` is a mark that may follow the name, with
    a word of no meaning.
    """

    head: str
    tail: str = ""
    skipped: str = ""
    listed: bool = False


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """A name, and the arguments one after the other: each name in ``key``, then its value up to ``value_end``. A value
    is bare text where it is a string, else JSON; ``{kind}`` in ``key`` says which (``true`` for a string), and
    otherwise the tool's schema. Where ``key`` ends with a line break, one belongs to the marks at each end of a value.
    """

    head: str
    key: str
    value_end: str
    tail: str

    @property
    def value_marks(self) -> tuple[str, ...]:
        """What ends a value, wherever it stands."""
        return (self.value_end.split()[0],)


@dataclass(frozen=True, slots=True)
class PythonCall:
    """``get(city="Rome", days=3)``, ``listed`` as in ``[get(city="Rome"), now()]``."""

    listed: bool = True

    @property
    def value_marks(self) -> tuple[str, ...]:
        """No mark ends a value, since strings are in quotes."""
        return ()


@dataclass(frozen=True, slots=True)
class GemmaCall:
    """``call:get{city:<quote>Rome<quote>,days:3}``: a name, and an object without quotes around its names."""

    quote: str
    tail: str

    @property
    def value_marks(self) -> tuple[str, ...]:
        """What ends a value, wherever it stands."""
        return (self.quote, self.tail)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family writes calls: ``call`` between ``begin`` and ``end``, anywhere in a text.

    ``between`` are calls of one section, which share ``begin`` and ``end``; None where each call has its own. ``gap``
    is written between sections. With ``bare``, calls stand at the beginning of the output, where ``begin`` may be
    missing. ``preface`` may stand before an answer and is no part of it. ``signs`` are the texts, each with its
    alternatives, that all have to be in a template of this family.
    """

    name: str
    signs: tuple[str | tuple[str, ...], ...]
    begin: str
    call: JsonCall | NamedCall | TaggedCall | PythonCall | GemmaCall
    end: str = ""
    between: str | None = None
    gap: str = "\n"
    bare: bool = False
    preface: str = ""

    def matches(self, text: str) -> bool:
        """Whether ``text`` has all signs of this family."""
        return all(any(each in text for each in _alternatives(sign)) for sign in self.signs)

    @property
    def listed(self) -> bool:
        """Whether the calls are elements of a list."""
        return getattr(self.call, "listed", False)

    @property
    def texts(self) -> Iterator[str]:
        """Everything that the format writes itself."""
        yield from (self.begin, self.end, self.preface)
        for field in ("head", "tail", "skipped", "key", "value_end", "quote"):
            yield getattr(self.call, field, "")


def _alternatives(sign: str | tuple[str, ...]) -> tuple[str, ...]:
    return (sign,) if isinstance(sign, str) else sign


_JSON_LIST = JsonCall(listed=True)
_PARAMETERS = JsonCall('{"name": "{name}", "parameters": ')
_INVOKE = '<{0}invoke name="{{name}}">\n'

HARMONY = ToolFormat(
    "harmony",
    ("<|channel|>", "<|message|>", "<|start|>assistant", "commentary"),
    "<|channel|>commentary to=",
    NamedCall("functions.{name} <|constrain|>json<|message|>", "<|call|>"),
)
HERMES = ToolFormat(
    "hermes", ("<tool_call>", ('"arguments', "{content}")), "<tool_call>\n", JsonCall(), "\n</tool_call>"
)
LLAMA3 = ToolFormat(
    "llama3", ('"name', '"parameters'), "<|python_tag|>", _PARAMETERS, between="; ", bare=True
)  # fmt: skip


def _dsml(name: str, section: str) -> ToolFormat:
    """DeepSeek's markup, the section of which was renamed."""
    call = TaggedCall(
        _INVOKE.format("｜DSML｜"),
        '<｜DSML｜parameter name="{key}" string="{kind}">',
        "</｜DSML｜parameter>\n",
        "</｜DSML｜invoke>",
    )
    begin, end = f"<｜DSML｜{section}>\n", f"\n</｜DSML｜{section}>"
    return ToolFormat(name, (f"<｜DSML｜{section}>",), begin, call, end, between="\n")


_TAGS = ("<function={name}>\n", "<parameter={key}>\n", "\n</parameter>\n")

TOOL_FORMATS = (
    HARMONY,
    _dsml("deepseek-v4", "tool_calls"),
    _dsml("deepseek-v3.2", "function_calls"),
    ToolFormat(
        "minimax-m2",
        ("<minimax:tool_call>",),
        "<minimax:tool_call>\n",
        TaggedCall(_INVOKE.format(""), '<parameter name="{key}">', "</parameter>\n", "</invoke>"),
        "\n</minimax:tool_call>",
        between="\n",
    ),
    ToolFormat(
        "seed-oss",
        ("<seed:tool_call>",),
        "<seed:tool_call>\n",
        TaggedCall("<function={name}>\n", "<parameter={key}>", "</parameter>\n", "</function>"),
        "\n</seed:tool_call>",
    ),
    ToolFormat(
        "step3",
        ("<steptml:invoke",),
        "<｜tool_calls_begin｜>",
        TaggedCall(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">',
            '<steptml:parameter name="{key}">',
            "</steptml:parameter>",
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        "<｜tool_calls_end｜>",
        between="",
    ),
    ToolFormat(
        "qwen3-coder",
        ("<tool_call>", "<function=", "<parameter="),
        "<tool_call>\n",
        TaggedCall(*_TAGS, "</function>"),
        "\n</tool_call>",
    ),
    ToolFormat(
        "glm",
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        "<tool_call>",
        TaggedCall("{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
    ),
    ToolFormat(
        "hunyuan-3",
        ("<tool_calls:opensource>", "<tool_sep:opensource>"),
        "<tool_calls:opensource>\n",
        TaggedCall(
            "<tool_call:opensource>{name}<tool_sep:opensource>\n",
            "<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>",
            "</arg_value:opensource>\n",
            "</tool_call:opensource>",
        ),
        "\n</tool_calls:opensource>",
        between="\n",
    ),
    ToolFormat(
        "kimi-k2",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        "<|tool_calls_section_begin|>",
        NamedCall("<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        "<|tool_calls_section_end|>",
        between="",
    ),
    ToolFormat(
        "deepseek-v3",
        ("<｜tool▁sep｜>", "```json"),
        "<｜tool▁calls▁begin｜>",
        NamedCall("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁end｜>",
        between="\n",
    ),
    ToolFormat(
        "deepseek-v3.1",
        ("<｜tool▁sep｜>",),
        "<｜tool▁calls▁begin｜>",
        NamedCall("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁end｜>",
        between="",
    ),
    ToolFormat("gemma-4", ("<|tool_call>call:",), "<|tool_call>", GemmaCall('<|"|>', "<tool_call|>"), gap=""),
    ToolFormat(
        "functiongemma",
        ("<start_function_call>",),
        "<start_function_call>",
        GemmaCall("<escape>", "<end_function_call>"),
        gap="",
    ),
    ToolFormat(
        "lfm2",
        (("<|tool_call_start|>", "<|tool_list_start|>"),),
        "<|tool_call_start|>",
        PythonCall(),
        "<|tool_call_end|>",
        between=", ",
    ),
    ToolFormat(
        "mistral", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", NamedCall("{name}[ARGS]", "", "[CALL_ID]"), gap=""
    ),
    ToolFormat("mistral-7b", ("[TOOL_CALLS]",), "[TOOL_CALLS]", _JSON_LIST, between=", "),
    ToolFormat("nemotron-nano-2", ("<TOOLCALL>",), "<TOOLCALL>", _JSON_LIST, "</TOOLCALL>", between=", "),
    ToolFormat("phi-4-mini", ("<|tool|>", "<|/tool|>"), "<|tool_call|>", _JSON_LIST, "<|/tool_call|>", between=", "),
    ToolFormat("granite-3", ("<|tool_call|>",), "<|tool_call|>", _JSON_LIST, between=", "),
    ToolFormat(
        "command-r7b",
        ("<|START_ACTION|>",),
        "<|START_ACTION|>",
        JsonCall('{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": ', listed=True),
        "<|END_ACTION|>",
        between=", ",
    ),
    ToolFormat(
        "command-r",
        ("Action:", "```json", "tool_name"),
        "Action:\n```json\n",
        JsonCall('{"tool_name": "{name}", "parameters": ', listed=True),
        "\n```",
        between=", ",
    ),
    ToolFormat(
        "apertus",
        ("<|tools_prefix|>",),
        "<|tools_prefix|>",
        NamedCall('{"{name}": ', "}", listed=True),
        "<|tools_suffix|>",
        between=", ",
    ),
    ToolFormat(
        "internlm", ("<|action_start|>", "<|plugin|>"), "<|action_start|> <|plugin|>\n", _PARAMETERS, "<|action_end|>"
    ),
    ToolFormat("firefunction", ("functools[",), "functools", _JSON_LIST, between=", "),
    ToolFormat("jamba", ("<tool_calls>[",), "<tool_calls>", _JSON_LIST, "</tool_calls>", between=", "),
    ToolFormat("minimax-m1", ("<tool_calls>",), "<tool_calls>\n", JsonCall(), "\n</tool_calls>", between="\n"),
    ToolFormat("longcat", ("<longcat_tool_call>",), "<longcat_tool_call>\n", JsonCall(), "\n</longcat_tool_call>"),
    ToolFormat("gigachat-3.1", ("<|function_call|>",), "<|function_call|>", JsonCall()),
    ToolFormat(
        "olmo-3", ("<function_calls>",), "<function_calls>", PythonCall(listed=False), "</function_calls>", between="\n"
    ),
    ToolFormat(
        "functionary-3.1", ("<function=", "</function>"), "<function=", NamedCall("{name}>", "</function>"), gap=""
    ),
    ToolFormat(
        "functionary-3.2",
        (">>>all", ">>>${recipient}"),
        ">>>",
        NamedCall("{name}\n"),
        gap="",
        bare=True,
        preface="all\n",
    ),
    HERMES,
    ToolFormat(
        "llama-4", ("[func_name1(",), "<|python_start|>", PythonCall(), "<|python_end|>", between=", ", bare=True
    ),
    ToolFormat("xlam", ("additional parallel tool calls",), "", _JSON_LIST, between=", ", bare=True),
    LLAMA3,
)
"""Every family, the most specific signs first."""

_OTHER_FAMILIES = (
    "<|open|>call",
    "function call<|role_sep|>",
    "<atem:function_calls>",
    "<function name=",
    "<|tool_call:begin|>",
    "]<]minimax[>[",
)
"""Signs of notations that are none of the above, but have some of their signs."""


def detect_tool_format(template: str, written: str = "") -> ToolFormat | None:
    """The format that a chat template writes calls in, by its text and by what it has ``written`` of a conversation
    with calls. Returns None if it is none of these.
    """
    text = template + "\n" + written
    if any(sign in text for sign in _OTHER_FAMILIES):
        return None
    return next((each for each in TOOL_FORMATS if each.matches(text)), None)
