"""The formats in which models call tools, and how to tell which one a model knows: by its chat template."""

from collections.abc import Collection
from enum import StrEnum

from quire_proto.text.tools.hermes import TOOL_CALL_BEGIN, HermesParser
from quire_proto.text.tools.llama import PYTHON_TAG, LlamaParser
from quire_proto.text.tools.parser import ToolParser


class ToolFormat(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"
    LLAMA3 = "llama3"


TOOL_MARKERS = {ToolFormat.HERMES: ("<tool_call>", "</tool_call>"), ToolFormat.LLAMA3: (PYTHON_TAG,)}
"""What a parser has to see, also where the tokenizer takes it for a special token."""

_OTHER_FORMATS = ("<function=", "<arg_key>")  # other things than JSON in the marks of Hermes


def detect_tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template writes calls in; None where it is none of these."""
    if TOOL_CALL_BEGIN in template:
        is_json = '"arguments' in template and not any(mark in template for mark in _OTHER_FORMATS)
        return ToolFormat.HERMES if is_json else None
    return ToolFormat.LLAMA3 if '"parameters' in template and '"name' in template else None


def new_tool_parser(tool_format: ToolFormat, names: Collection[str], *, exact: bool = False) -> ToolParser:
    """A parser for one output that may call the tools with these names, ``exact`` where a grammar writes its calls."""
    return (HermesParser if tool_format is ToolFormat.HERMES else LlamaParser)(names, exact=exact)
