"""Where stop strings count in the text of an offline chat's answer."""

import pytest
from quire_engine.core.request import Request
from quire_engine.llm.output_text import new_text_stream, tool_names
from quire_engine.llm.types import SamplingParams
from quire_proto import sampling

from tests.support.tool_models import HERMES_TEMPLATE, OPENING_TEMPLATE, THINKING_TEMPLATE, tokenizer_with

CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "END"}}\n</tool_call>'


def written(template: str, said: str, tools: tuple[str, ...] | None, **rules: object) -> tuple[str, str | None]:
    tokenizer, least = tokenizer_with(template), int(rules.pop("min_tokens", 0))
    prompt = tokenizer.encode_plain("<think>\n" if template is OPENING_TEMPLATE else "hi")
    request = Request("r", prompt, sampling.SamplingParams(max_tokens=99, min_tokens=least))
    stream = new_text_stream(tokenizer, request, SamplingParams(stop=["END"], **rules), tools)
    out = "".join(stream.push([token_id]) for token_id in tokenizer.encode_plain(said))
    return out if stream.stopped else out + stream.finish(), stream.stop_string


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("template", "said"),
    [
        (OPENING_TEMPLATE, "so END</think>one END two"),
        (THINKING_TEMPLATE, "<think>END</think>\n\none END two"),
        (HERMES_TEMPLATE, f"{CALL}\nso END two"),
        (HERMES_TEMPLATE, "one END two"),
    ],
)
def test_the_text_of_a_chat_ends_at_the_stop_string_of_its_content(template: str, said: str, include: bool) -> None:
    text = said.removesuffix(" two")
    shown = text if include else text.removesuffix("END")
    assert written(template, said, ("get",), include_stop_str_in_output=include) == (shown, "END")


@pytest.mark.parametrize("said", ["<think>END</think>", CALL, f"<think>END</think>{CALL}", "<think>so END"])
def test_what_is_no_content_is_not_searched(said: str) -> None:
    assert written(THINKING_TEMPLATE, said, ("get",)) == (said, None)


def test_all_text_of_a_completion_is_searched() -> None:
    assert written(THINKING_TEMPLATE, "<think>so END</think>", None) == ("<think>so ", "END")


def test_the_first_tokens_of_a_chat_are_not_searched() -> None:
    said = "ENDENDx"
    count = len(tokenizer_with(HERMES_TEMPLATE).encode_plain("END"))
    assert written(HERMES_TEMPLATE, said, ("get",), min_tokens=count) == ("END", "END")
    assert written(HERMES_TEMPLATE, said, ("get",), min_tokens=50) == (said, None)


def test_tools_have_names_in_both_forms() -> None:
    tools = [{"type": "function", "function": {"name": "get"}}, {"name": "now"}, {"function": 3}, {}]
    assert tool_names(tools) == ("get", "now")
