"""The demo model's chat template, and the other one with tools, that shows whole schemas."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.tool_formats import HERMES

DEMO = Path(__file__).parents[3] / "demo"
FILES = (DEMO / "model" / "chat_template.jinja", DEMO / "templates" / "hermes.jinja")
OWN, WHOLE = TEMPLATES = [ChatTemplate(file.read_text(), {}, file.name) for file in FILES]
BOTH = pytest.mark.parametrize("template", TEMPLATES, ids=["own", "whole"])
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}), min_size=1
)
TEXTS = st.text().filter(lambda text: "tool_call>" not in text)  # by which the test below finds the call
ARGUMENTS = st.dictionaries(TEXTS, st.none() | st.booleans() | st.integers() | TEXTS)


@BOTH
@given(messages=MESSAGES, asks=st.booleans())
def test_without_tools_each_message_stands_between_marks(
    template: ChatTemplate, messages: list[dict[str, str]], asks: bool
) -> None:
    turns = [f"<|im_start|>{each['role']}\n{each['content'].strip()}<|im_end|>\n" for each in messages]
    expected = "".join(turns) + ("<|im_start|>assistant\n" if asks else "")
    assert template.render(messages, add_generation_prompt=asks) == expected


@BOTH
@given(messages=MESSAGES, arguments=ARGUMENTS)
def test_with_tools_each_message_is_rendered_once_and_calls_unchanged(
    template: ChatTemplate, messages: list[dict[str, str]], arguments: dict[str, Any]
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    made = {"role": "assistant", "content": None, "tool_calls": [call]}
    prompt = template.render([*messages, made, {"role": "tool", "tool_call_id": "c", "content": "sunny"}], [WEATHER])
    head, *calls = prompt.rsplit("<tool_call>", 1)
    told, _, rest = calls[0].rpartition("</tool_call>")
    assert json.loads(told) == {"name": "weather", "arguments": arguments}
    result = "Result: sunny" if template is OWN else "sunny"
    assert rest == f"<|im_end|>\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
    plain = template.render(messages, add_generation_prompt=False)
    after = plain.partition("<|im_end|>\n")[2] if messages[0]["role"] == "system" else plain
    assert head.endswith(after + "<|im_start|>assistant\n" + ("" if template is OWN else "\n"))


def test_its_own_shows_names_and_required_parameters() -> None:
    properties = {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}}
    schema = {"type": "object", "properties": properties, "required": ["city"]}
    weather = {"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": schema}}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"text": "Hello"}]}]
    assert OWN.render(messages, [weather, {"type": "function", "function": {"name": "now"}}]) == (
        "<|im_start|>system\nBe brief.\n\nFunctions: get_weather(city), now()<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_its_own_shows_all_parameters_of_a_function_that_requires_none() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}}
    weather = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    assert "\nFunctions: weather(city, unit)<|im_end|>" in OWN.render([{"role": "user", "content": "Hi"}], [weather])


def test_its_own_writes_text_and_calls_of_one_message_in_lines() -> None:
    calls = [{"id": n, "type": "function", "function": {"name": n, "arguments": {}}} for n in ("a", "b")]
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Yes.", "tool_calls": calls}]
    shown = [f'<tool_call>\n{{"name": "{n}", "arguments": {{}}}}\n</tool_call>' for n in ("a", "b")]
    assert OWN.render(messages, add_generation_prompt=False).endswith(
        "assistant\nYes.\n" + "\n".join(shown) + "<|im_end|>\n"
    )


@BOTH
def test_the_router_sees_which_format_it_has(template: ChatTemplate) -> None:
    assert template.tool_format is HERMES
    assert template.reasoning is None


TRAINED = """
from itertools import islice
import calls
from quire_proto.text.chat_template import ChatTemplate
from tokenizer import CHAT_TEMPLATE, segments

with open("model/chat_template.jinja") as file:
    assert file.read() == CHAT_TEMPLATE
template, called = ChatTemplate(CHAT_TEMPLATE, {}, "own"), 0
for document in islice(calls.documents(1, (1, 6)), 200):
    messages = [{"role": message.role, "content": message.content} for message in document.messages]
    tools = [function.tool() for function in document.functions]
    text = template.render(messages, tools, add_generation_prompt=False)
    assert text == "".join(piece for piece, _ in segments(document))
    learned = [piece for piece, is_learned in segments(document) if is_learned]
    assert len(learned) == len(document.skills)
    called += sum(piece.startswith("<tool_call>") for piece in learned)
assert called > 100, called
"""


def test_the_model_is_trained_on_what_its_template_writes() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINED], cwd=DEMO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
