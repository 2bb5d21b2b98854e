"""The template that gives the demo model tools: it is the model's own where no tools are offered."""

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.tool_formats import HERMES

DEMO = Path(__file__).parents[3] / "demo"
FILES = (DEMO / "model" / "chat_template.jinja", DEMO / "templates" / "hermes.jinja")
PLAIN, TOOLS = (ChatTemplate(file.read_text(), {}, file.name) for file in FILES)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}), min_size=1
)
TEXTS = st.text().filter(lambda text: "tool_call>" not in text)  # by which the test below finds the call
ARGUMENTS = st.dictionaries(TEXTS, st.none() | st.booleans() | st.integers() | TEXTS)


@given(MESSAGES, st.booleans())
def test_without_tools_it_is_the_models_own(messages: list[dict[str, str]], asks: bool) -> None:
    assert TOOLS.render(messages, add_generation_prompt=asks) == PLAIN.render(messages, add_generation_prompt=asks)


@given(MESSAGES, ARGUMENTS)
def test_with_tools_each_message_is_rendered_once_and_calls_unchanged(
    messages: list[dict[str, str]], arguments: dict[str, Any]
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    made = {"role": "assistant", "content": None, "tool_calls": [call]}
    prompt = TOOLS.render([*messages, made, {"role": "tool", "tool_call_id": "c", "content": "sunny"}], [WEATHER])
    head, *calls = prompt.rsplit("<tool_call>", 1)
    told, _, rest = calls[0].rpartition("</tool_call>")
    assert json.loads(told) == {"name": "weather", "arguments": arguments}
    assert rest == "<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"
    own = PLAIN.render(messages, add_generation_prompt=False)
    after = own.partition("<|im_end|>\n")[2] if messages[0]["role"] == "system" else own
    assert head.endswith(after + "<|im_start|>assistant\n\n")


def test_the_router_sees_which_format_it_has() -> None:
    assert TOOLS.tool_format is HERMES
    assert TOOLS.reasoning is None
