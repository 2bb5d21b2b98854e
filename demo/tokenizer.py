"""The tokenizer and the chat template: byte-level pairs learned from the corpus, with every digit on its own.

It knows the corpus only as text. Any input can be encoded, because all 256 bytes are in the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
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

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Roles are system, user and assistant, not ' + message['role']) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- else %}
        {%- for part in message['content'] %}
            {{- part['text'] | trim }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def segments(document: Document) -> list[tuple[str, bool]]:
    """The document as pieces of text, each with whether the model is to learn it.

    Joined, the pieces of a conversation are what the chat template makes of it.
    """
    if not document.messages:
        return [(document.given, False), (document.text + TURN_END, True)]
    pieces = []
    for message in document.messages:
        answer = message.role == "assistant"
        pieces += [
            (f"{TURN_START}{message.role}\n", False),
            (message.content + TURN_END, answer),
            ("\n", False),
        ]
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
