"""Tokenizers, special tokens and chat templates of unusual folders are those of transformers."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_proto.errors import QuireError, TokenizerLoadError
from quire_proto.text.file_names import is_text_file
from quire_proto.text.model_folder import folder_vocabulary_digest
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.text.tokenizer_files import named_special_tokens

from tests.support.folder_changes import Change, both, edit, file, lost
from tests.support.model_folders import byte_level, write_model_folder
from tests.support.tool_models import HERMES_TEMPLATE, OTHER_TEMPLATE

TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
ASKED = [{"role": "user", "content": "hello world"}]
TEXT = "hello <|end|> world <new> how are you"
PIECE = next(piece for piece in sorted(byte_level().get_vocab()) if len(piece) > 1 and piece in "how are you")
SIZE = byte_level().get_vocab_size()
SAID = "{% for m in messages %}{{ m.content }}{% endfor %}"
DEFAULT = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}" + SAID
WITH_TOOLS = "{{ tools | tojson }}" + SAID
INSIDE = lost("chat_template.jinja")
NAMED = file("chat_template.jinja", DEFAULT)
TOOL_FILE = file("additional_chat_templates/tool_use.jinja", WITH_TOOLS)
FLAGS: dict[str, Any] = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
BEGIN = {"0": {"content": "<|begin|>", "special": True, **FLAGS}}


def tokenizer(**changes: Any) -> Change:
    return edit("tokenizer_config.json", **changes)


def both_forms(default: str, tool_use: str) -> list[dict[str, str]]:
    return [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]


SAME: dict[str, Change] = {
    "as it is written": lambda folder: None,
    "a template inside": both(INSIDE, tokenizer(chat_template=DEFAULT)),
    "templates in a list": both(INSIDE, tokenizer(chat_template=both_forms(DEFAULT, WITH_TOOLS))),
    "two of a name in a list": both(
        INSIDE, tokenizer(chat_template=[*both_forms("x", "y"), *both_forms(DEFAULT, WITH_TOOLS)])
    ),
    "templates by name": both(INSIDE, tokenizer(chat_template={"default": DEFAULT, "tool_use": WITH_TOOLS})),
    "one template by name": both(INSIDE, tokenizer(chat_template={"default": DEFAULT})),
    "a template for tools in a file": TOOL_FILE,
    "both templates in files": both(file("additional_chat_templates/default.jinja", DEFAULT), TOOL_FILE),
    "another template in a file": file("additional_chat_templates/rag.jinja", "never"),
    "a file before a list": both(NAMED, tokenizer(chat_template=both_forms("old", "old"))),
    "a token of the older file": both(
        NAMED, tokenizer(bos_token=None), file("special_tokens_map.json", {"bos_token": "<|begin|>"})
    ),
    "a token of the older file with properties": both(
        NAMED, file("special_tokens_map.json", {"bos_token": {"content": "<|begin|>", **FLAGS}})
    ),
    "another token in the older file": both(
        NAMED, tokenizer(bos_token="<|start|>"), file("special_tokens_map.json", {"bos_token": "<|begin|>"})
    ),
    "another token in the older file, which no longer counts": both(
        NAMED,
        tokenizer(bos_token="<|start|>", added_tokens_decoder=BEGIN),
        file("special_tokens_map.json", {"bos_token": "<|begin|>"}),
    ),
    "a token with properties": both(
        NAMED, tokenizer(bos_token={"__type": "AddedToken", "content": "<|begin|>", **FLAGS})
    ),
    "a token of the model's own": both(NAMED, tokenizer(image_token="<|start|>")),
    "extra tokens by name": both(NAMED, tokenizer(extra_special_tokens={"image_token": "<|start|>"})),
    "extra tokens by name in the older file": both(
        NAMED, file("special_tokens_map.json", {"extra_special_tokens": {"image_token": "<|start|>"}})
    ),
    "extra tokens in a list": tokenizer(extra_special_tokens=["are"]),
    "additional tokens": tokenizer(additional_special_tokens=["are"]),
    "additional tokens with properties": tokenizer(
        additional_special_tokens=[{"__type": "AddedToken", "content": "are", "special": True, **FLAGS}]
    ),
    "additional tokens of the older file": file("special_tokens_map.json", {"additional_special_tokens": ["are"]}),
    "extra tokens in both files": both(
        tokenizer(extra_special_tokens=["are"]), file("special_tokens_map.json", {"extra_special_tokens": ["how"]})
    ),
    "an end token that is only in the vocabulary": both(NAMED, tokenizer(eos_token=PIECE)),
    "an added token of the settings": tokenizer(
        added_tokens_decoder={str(SIZE): {"content": "<new>", "special": True, **FLAGS}}
    ),
    "an added token of the settings that is in the vocabulary": tokenizer(
        added_tokens_decoder={"280": {"content": "wor", "special": False, **FLAGS}}
    ),
    "an added token with other properties": tokenizer(
        added_tokens_decoder={"2": {"content": "<|end|>", "special": True, **FLAGS, "lstrip": True, "rstrip": True}}
    ),
    "an added token of the older file": file("added_tokens.json", {"<new>": SIZE}),
    "no settings": both(lost("tokenizer_config.json"), NAMED),
    "no token at the beginning": tokenizer(add_bos_token=False),
    "a token at the end": tokenizer(add_eos_token=True),
    "a class of Llama": both(NAMED, tokenizer(tokenizer_class="LlamaTokenizerFast")),
}


@pytest.mark.parametrize("name", SAME)
def test_texts_and_conversations_have_the_tokens_that_they_have_in_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    folder = write_model_folder(tmp_path / "model")
    file("config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})(folder)
    SAME[name](folder)
    ours, theirs = ModelTokenizer.load(folder), AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert ours.encode(TEXT) == theirs(TEXT)["input_ids"]
    for tools in (None, TOOLS):
        rendered = theirs.apply_chat_template(ASKED, tools=tools, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat_text(ASKED, tools or ()) == rendered
        tokens = theirs.apply_chat_template(ASKED, tools=tools, return_dict=False, add_generation_prompt=True)
        assert ours.encode_chat(ASKED, tools=tools or ()) == tokens
    assert ours.vocabulary_digest == folder_vocabulary_digest(folder), "what an engine tells of its folder"


def test_a_default_inside_is_used_beside_other_templates_in_files(tmp_path: Path) -> None:
    """transformers then has no default, and refuses conversations without tools."""
    folder = write_model_folder(tmp_path)
    both(INSIDE, TOOL_FILE, tokenizer(chat_template=SAID))(folder)
    loaded = ModelTokenizer.load(folder)
    assert loaded.render_chat_text(ASKED) == "hello world"
    assert loaded.render_chat_text(ASKED, TOOLS).startswith("[{")


def test_a_processors_template_is_used_where_there_is_no_other(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    both(INSIDE, file("chat_template.json", {"chat_template": SAID}))(folder)
    assert ModelTokenizer.load(folder).render_chat_text(ASKED) == "hello world"
    tokenizer(chat_template="other")(folder)
    assert ModelTokenizer.load(folder).render_chat_text(ASKED) == "other"


def test_a_token_that_only_the_older_file_names_is_found(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, config={"added_tokens_decoder": BEGIN})
    file("special_tokens_map.json", {"bos_token": "<|begin|>", "eos_token": "<|start|>"})(folder)
    assert named_special_tokens(folder) == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def test_without_a_template_for_all_conversations_only_those_with_tools_are_rendered(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, template=None)
    TOOL_FILE(folder)
    loaded = ModelTokenizer.load(folder)
    assert loaded.render_chat_text(ASKED, TOOLS).startswith("[{")
    with pytest.raises(QuireError, match="no chat template for conversations without tools"):
        loaded.render_chat_text(ASKED)


def test_the_notation_of_calls_is_the_one_of_the_template_for_tools(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    assert ModelTokenizer.load(folder).tool_format is None
    file("additional_chat_templates/tool_use.jinja", HERMES_TEMPLATE)(folder)
    loaded = ModelTokenizer.load(folder)
    assert loaded.tool_format is not None
    assert loaded.tool_format.name == "hermes"
    assert "tools" in loaded.template_variables(with_tools=True) - loaded.template_variables(with_tools=False)


# Refusals


def make(name: str, content: str = "") -> Callable[[Path], object]:
    return both(lost("tokenizer.json"), file(name, content))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (make("tokenizer.model"), "tokenizer.model is another form of tokenizer, which is not read: run pip install"),
        (make("tekken.json"), "tekken.json is another form"),
        (make("vocab.json"), "vocab.json is another form of tokenizer, which is not read: run python -c"),
        (lost("tokenizer.json"), "the tokenizer cannot be read"),
        (both(INSIDE, tokenizer(chat_template=5)), "chat_template must be a string"),
        (both(INSIDE, tokenizer(chat_template={"default": 5})), "chat_template must be a string"),
        (both(INSIDE, tokenizer(chat_template=[{"name": "default"}])), "chat_template must be a string"),
        (file("special_tokens_map.json", "["), "this is not JSON"),
        (file("additional_chat_templates/tool_use.jinja", "{% if %}"), "the chat template is not valid"),
    ],
)
def test_a_folder_whose_text_cannot_be_read_is_refused(tmp_path: Path, change: Change, said: str) -> None:
    folder = write_model_folder(tmp_path / "model")
    change(folder)
    with pytest.raises(TokenizerLoadError) as caught:
        ModelTokenizer.load(folder)
    assert said in str(caught.value)
    assert str(folder) in str(caught.value)


# What is said at the start

NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + SAID
ONE_CALL = HERMES_TEMPLATE.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no results') }}{% endif %}",
)
GUESSED = "{% if tools %}{# <tool_call> {content} #}{{ tools | tojson }}{% endif %}" + SAID


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (HERMES_TEMPLATE, None),
        (SAID, None),
        (NO_SYSTEM, "the chat template cannot render a system message (The model's chat template refuses these"),
        (ONE_CALL, "the chat template cannot render a call and its result"),
        (OTHER_TEMPLATE, "the chat template writes tool calls in a notation that is not known"),
        (GUESSED, "the notation of tool calls is a guess, hermes"),
        ("{% if tools %}{{ raise_exception('never') }}{% endif %}" + SAID, "the chat template cannot render tools"),
        ("{{ messages.nothing.here }}", "the chat template cannot render a user's message"),
    ],
)
def test_what_a_template_cannot_do_is_said_in_one_line_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, said: str | None
) -> None:
    with caplog.at_level(logging.WARNING):
        ModelTokenizer.load(write_model_folder(tmp_path, template=template))
    assert len(caplog.messages) == (said is not None)
    assert said is None or caplog.messages[0].startswith(f"{tmp_path}: ")
    assert said is None or said in caplog.messages[0]


def test_variables_may_take_the_place_of_special_tokens(tmp_path: Path) -> None:
    loaded = ModelTokenizer.load(write_model_folder(tmp_path, template="{{ eos_token }}"))
    assert loaded.render_chat_text(ASKED) == "<|end|>"
    assert loaded.render_chat_text(ASKED, options={"eos_token": "mine"}) == "mine"


def test_templates_make_dictionaries_of_keys(tmp_path: Path) -> None:
    source = "{{ dict.fromkeys(['a', 'b'], 1) }}{{ dict(a=1) }}{{ dict.fromkeys('ab') }}"
    loaded = ModelTokenizer.load(write_model_folder(tmp_path, template=source))
    assert loaded.render_chat_text(ASKED) == "{'a': 1, 'b': 1}{'a': 1}{'a': None, 'b': None}"


def test_all_files_of_a_models_text_are_known_by_name() -> None:
    files = ["tokenizer.json", "special_tokens_map.json", "chat_template.json"]
    assert all(map(is_text_file, [*files, "additional_chat_templates/tool_use.jinja"]))
    assert is_text_file("gguf/tokenizer.json", "gguf")
    assert not any(map(is_text_file, ["config.json", "original/tokenizer.json", "additional_chat_templates/x.py"]))
