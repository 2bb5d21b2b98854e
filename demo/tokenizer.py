"""The tokenizer and the chat template: byte-level pairs learned from the corpus, with every digit on its own.

It knows the corpus only as text. Any input can be encoded, because all 256 bytes are in the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from corpus import Document
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT_END = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL = [TEXT_END, TURN_START, TURN_END]

# One digit, one word with the space before it, one sign with the space before it, or white space. Signs never join,
# so that a word is cut in the same way whatever follows it: repeating it is then copying.
PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]|\s+(?!\S)|\s+"

# Of each function, the template shows the name and the parameters that a call must have, or all if it needs none. A
# result follows a colon and a space, as in the answer, because a word is other tokens without a space before it.
CHAT_TEMPLATE = """\
{%- macro text(content) %}
    {%- if content is string %}
        {{- content | trim }}
    {%- else %}
        {%- for part in content %}
            {{- part['text'] | trim }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- text(messages[0]['content']) + '\\n\\n' }}
    {%- endif %}
    {{- 'Functions: ' }}
    {%- for tool in tools %}
        {%- set schema = tool['function']['parameters'] or {} %}
        {%- set names = schema['required'] or schema['properties'] or [] %}
        {{- tool['function']['name'] + '(' + names | join(', ') + (')' if loop.last else '), ') }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Roles are system, user, assistant and tool, not ' + message['role']) }}
    {%- endif %}
    {%- if not (tools and loop.first and message['role'] == 'system') %}
        {{- '<|im_start|>' + message['role'] + '\\n' }}
        {{- 'Result: ' if message['role'] == 'tool' }}
        {%- set calls = message['tool_calls'] or [] %}
        {{- text(message['content'] or '' if calls else message['content']) }}
        {%- for call in calls %}
            {{- '\\n' if message['content'] or not loop.first }}
            {%- set made = {'name': call['function']['name'], 'arguments': call['function']['arguments']} %}
            {{- '<tool_call>\\n' + made | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def turns(document: Document) -> Iterator[tuple[str, str]]:
    """The roles and texts of a conversation as the chat template writes them."""
    messages = list(document.messages)
    if document.functions:
        shown = f"Functions: {', '.join(function.shown() for function in document.functions)}"
        if messages[0].role == "system":
            shown = f"{messages.pop(0).content}\n\n{shown}"
        yield "system", shown
    for message in messages:
        yield message.role, f"Result: {message.content}" if message.role == "tool" else message.content


def segments(document: Document) -> list[tuple[str, bool]]:
    """The document as pieces of text, each with whether the model is to learn it.

    Joined, the pieces of a conversation are what the chat template makes of it.
    """
    if not document.messages:
        return [(document.given, False), (document.text + TURN_END, True)]
    pieces = []
    for role, text in turns(document):
        pieces += [(f"{TURN_START}{role}\n", False), (text + TURN_END, role == "assistant"), ("\n", False)]
    return pieces


def train_tokenizer(documents: Iterable[Document], vocabulary: int) -> Tokenizer:
    """Learn byte-level pairs (Sennrich; the byte alphabet is GPT-2's) up to `vocabulary` entries in all."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text.removeprefix(TURN_START).removesuffix(TURN_END) for d in documents for text, _ in segments(d))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config(context: int) -> dict[str, object]:
    """The `tokenizer_config.json` of the folder; nothing is added to a raw prompt."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": TEXT_END,
        "eos_token": TURN_END,
        "pad_token": TEXT_END,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write the tokenizer's three files."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(context), indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
