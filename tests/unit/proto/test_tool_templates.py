"""What a chat template says of its model's calls, and how it takes those of earlier turns.

With ``QUIRE_CHAT_TEMPLATES``, a folder of published templates (``*.jinja``, such as those in the packages of trl and of
llama-cpp-python), each one's own calls are read back; without it, only templates in their manner are.
"""

import json
import os
from pathlib import Path

import pytest
from quire_proto.errors import QuireError, TokenizerLoadError
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.stream_scanner import ToolCallArguments, ToolCallStart, merge_adjacent
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.text.tool_arguments import parameter_types
from quire_proto.text.tool_formats import HERMES, TOOL_FORMATS
from quire_proto.text.tool_parser import new_tool_parser

from tests.support.model_folders import byte_level, write_model_folder
from tests.support.tool_models import HERMES_TEMPLATE, family_template, tool

CALL = {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": {"city": "Rome"}}}
ASKED = {"role": "user", "content": "hello"}
MESSAGES = [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
LOOP = "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
BY_NAME = {each.name: each for each in TOOL_FORMATS}


def rendered(source, messages=MESSAGES):
    return ChatTemplate(source, {}, "the test").render(messages)


def test_arguments_are_objects_to_templates_that_take_them_so():
    assert rendered(LOOP + "{{ call.function.arguments.city }}{% endfor %}{% endfor %}") == "helloRome"


def test_arguments_are_texts_to_templates_that_join_them():
    source = LOOP + "{{ '(' + call.function.arguments + ')' }}{% endfor %}{% endfor %}"
    assert rendered(source) == 'hello({"city": "Rome"})'


def test_ids_are_short_to_templates_that_take_no_others():
    refusal = "{% if call.id | length != 9 %}{{ raise_exception('too long') }}{% endif %}{{ call.id }}"
    source = (
        LOOP + refusal + "{% endfor %}{% if message.tool_call_id %}={{ message.tool_call_id }}{% endif %}{% endfor %}"
    )
    result = {"role": "tool", "tool_call_id": "call_1", "content": ""}
    called, _, answered = rendered(source, [*MESSAGES, result]).removeprefix("hello").partition("=")
    assert called == answered
    assert (len(called), called.isalnum()) == (9, True)
    kept = [ASKED, {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "abcdefghi"}]}]
    assert rendered(source, kept) == "helloabcdefghi"


def test_ids_are_kept_where_the_template_takes_them():
    assert rendered(LOOP + "{{ call.id }}{% endfor %}{% endfor %}") == "hellocall_1"


def test_the_format_is_seen_in_what_the_template_writes():
    mark = "{% set mark = 'DSML' %}"
    begin = "{{ '<｜' + mark + '｜function_calls>' }}"
    source = mark + "{% if tools %}{% endif %}" + LOOP + begin + "{% endfor %}{% endfor %}"
    assert ChatTemplate(source, {}, "the test").tool_format is BY_NAME["deepseek-v3.2"]


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=[each.name for each in TOOL_FORMATS])
def test_each_family_is_seen_in_its_template(form):
    assert ChatTemplate(family_template(form), {}, "the test").tool_format is form


BARE = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"


def test_what_the_template_leaves_open_its_tokens_or_its_response_template_say(tmp_path):
    tokenizer = byte_level()
    assert ModelTokenizer.load(write_model_folder(tmp_path / "a", tokenizer, BARE)).tool_format is None
    fields = {
        "tool_calls": {"open_pattern": r"\s*<tool_call>", "content": "json", "transform": {"function": "{content}"}}
    }
    config = {"response_template": {"fields": fields}}
    assert ModelTokenizer.load(write_model_folder(tmp_path / "b", tokenizer, BARE, config)).tool_format is HERMES
    more = tokenizer.from_str(tokenizer.to_str())
    more.add_special_tokens(["<|tool_call_start|>", "<|tool_call_end|>"])
    assert ModelTokenizer.load(write_model_folder(tmp_path / "c", more, BARE)).tool_format is BY_NAME["lfm2"]
    assert ModelTokenizer.load(write_model_folder(tmp_path / "d", more, HERMES_TEMPLATE)).tool_format is HERMES


FOLDER = os.environ.get("QUIRE_CHAT_TEMPLATES", "")
PUBLISHED = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "flag": {"type": "boolean"},
        "more": {"type": "object", "properties": {"list": {"type": "array"}}},
    },
    "required": ["city"],
}
ARGUMENTS = {"city": 'Ro"me\nX', "days": 3, "flag": True, "more": {"list": [1, "a"]}}


@pytest.mark.skipif(not PUBLISHED, reason="QUIRE_CHAT_TEMPLATES names no folder of templates")
@pytest.mark.parametrize("path", PUBLISHED, ids=[path.name for path in PUBLISHED])
def test_calls_that_a_published_template_writes_are_read_back(path):
    try:
        template = ChatTemplate(
            path.read_text(encoding="utf-8"), {"bos_token": "<bos>", "eos_token": "<eos>"}, path.name
        )
    except TokenizerLoadError:
        pytest.skip("it is no template")
    call = {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": ARGUMENTS}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    form, tools = template.tool_format, [tool("get", parameters=SCHEMA)]
    try:
        before = template.render([ASKED], tools, add_generation_prompt=form is not None and form.bare)
        after = template.render([ASKED, said], tools, add_generation_prompt=False)
    except QuireError as refusal:
        pytest.skip(refusal.message)
    same = next(
        (place for place, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), len(before)
    )
    answer = after[same:]
    if form is None or "Ro" not in answer:
        pytest.skip("it writes no calls, or in a format that is not known")
    parser = new_tool_parser(form, ["get"], {"get": parameter_types(SCHEMA)})
    pieces = merge_adjacent([*parser.push(answer), *parser.finish()])
    assert ToolCallStart("get") in pieces, answer
    (arguments,) = [piece.text for piece in pieces if isinstance(piece, ToolCallArguments)]
    assert json.loads(arguments) == ARGUMENTS
