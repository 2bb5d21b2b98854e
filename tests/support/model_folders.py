"""Small tokenizers of the kinds that models use, and model folders around them."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = ["hello world", "how are you", "the naïve café costs 5 €", "schöne Grüße 😀", "stop and go", "你好 世界"]
SPECIAL = ["<|begin|>", "<|start|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@cache
def byte_level() -> Tokenizer:
    """Byte pairs over bytes, as GPT-2, Llama 3 and Qwen have them. Adds ``<|begin|>`` by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
    )
    tokenizer.train_from_iterator(WORDS * 20, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    return tokenizer


@cache
def sentencepiece_like() -> Tokenizer:
    """Pieces with a visible space and a fallback to bytes, as Llama 2 and Mistral have them."""
    letters = sorted(set("".join(WORDS[:2]).replace(" ", "▁")))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pairs = [("▁", "h"), ("▁", "w"), ("l", "l"), ("▁h", "e"), ("o", "u")]
    pieces += ["".join(pair) for pair in pairs]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write_model_folder(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    template: str | None = CHAT_TEMPLATE,
    config: dict[str, object] | None = None,
) -> Path:
    """A Hugging Face folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
