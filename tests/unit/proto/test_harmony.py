"""Harmony is read as the library ``openai-harmony`` reads it.

The library has to be installed, and to find its vocabulary: it downloads that, or finds it in the folder that
``TIKTOKEN_ENCODINGS_BASE`` names.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.text.harmony import HarmonyParser
from quire_proto.text.stream_scanner import Content, Reasoning, ToolCallStart, merge_adjacent

harmony = pytest.importorskip("openai_harmony")
NAMES = ("get", "now")
BODIES = st.lists(
    st.sampled_from(["hello ", "so <b> ", json.dumps({"a": 1}), "é😀", "\n\n", "a | b <| c "]), max_size=3
)


@pytest.fixture(scope="module")
def encoding():
    try:
        return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except harmony.HarmonyError as error:
        pytest.skip(f"the library has no vocabulary: {error}")


@st.composite
def outputs(draw):
    """Messages in channels, as the model writes them after ``<|start|>assistant``."""
    messages = []
    for number in range(draw(st.integers(1, 4))):
        body, name = "".join(draw(BODIES)), draw(st.sampled_from(NAMES))
        kind = draw(st.sampled_from(["analysis", "commentary", "final", "call", "call of a template"]))
        header = f"<|channel|>{kind}<|message|>{body}<|end|>"
        if kind == "call":
            header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}<|call|>"
        if kind == "call of a template":
            header = f" to=functions.{name}<|channel|>commentary json<|message|>{body}<|call|>"
        messages.append(("<|start|>assistant" if number else "") + header)
    return "".join(messages)


def read_by_library(encoding, text):
    """What the library makes of it: kind, name and text of each message that has any."""
    parser = harmony.StreamableParser(encoding, role=harmony.Role.ASSISTANT)
    for token in encoding.encode(text, allowed_special="all"):
        parser.process(token)
    parser.process_eos()
    found = []
    for message in parser.messages:
        body = "".join(part.text for part in message.content)
        if message.recipient:
            found.append(("call", message.recipient.removeprefix("functions."), body))
        elif body:
            found.append(("reasoning" if message.channel == "analysis" else "content", "", body))
    return found


def read_by_parser(text):
    parser = HarmonyParser(NAMES)
    found = []
    for piece in merge_adjacent([*parser.push(text), *parser.finish()]):
        if isinstance(piece, ToolCallStart):
            found.append(("call", piece.name, ""))
        elif isinstance(piece, (Content, Reasoning)):
            found.append(("content" if isinstance(piece, Content) else "reasoning", "", piece.text))
        else:
            kind, name, text = found[-1]
            found[-1] = (kind, name, text + piece.text)
    return found


def joined(found):
    """Neighbours of one kind are one, but for calls."""
    result = []
    for each in found:
        if result and each[0] != "call" and result[-1][0] == each[0]:
            result[-1] = (each[0], "", result[-1][2] + each[2])
        else:
            result.append(each)
    return result


@settings(deadline=None)
@given(outputs())
def test_an_output_is_what_the_library_reads(encoding, text):
    assert read_by_parser(text) == joined(read_by_library(encoding, text))
