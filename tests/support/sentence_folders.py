"""Small random models in the layout of sentence-transformers, with a tokenizer."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForSequenceClassification, BertConfig, PreTrainedConfig, Qwen3Config

from tests.support.model_folders import byte_level, write_model_folder

_TEXT = "the a fox dog cat runs sleeps jumps over under lazy quick brown red river city paris france capital of is"
WORDS = _TEXT.split()
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def decoder_folder(folder: Path, *, pooling: str = "lasttoken") -> Path:
    """An embedding model as Qwen3-Embedding is: a decoder with normalised embeddings, and a prompt for queries."""
    write_model_folder(folder, template=None, config={"pad_token": "<|end|>", "model_max_length": 256})
    size = byte_level().get_vocab_size()
    config = Qwen3Config(vocab_size=size, head_dim=32, num_key_value_heads=2, **_SIZES)
    _write_model(folder, config, AutoModel)
    _write_modules(folder, pooling)
    prompts = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def encoder_folder(folder: Path) -> Path:
    """An embedding model as all-MiniLM is: a BERT whose hidden states are averaged, and normalised."""
    write_model_folder(folder, word_level(), template=None, config=_BERT_TOKENS)
    _write_model(folder, _bert(), AutoModel)
    _write_modules(folder, "mean")
    return folder


def cross_encoder_folder(folder: Path) -> Path:
    """A BERT that scores pairs of texts."""
    write_model_folder(folder, word_level(), template=None, config=_BERT_TOKENS)
    _write_model(folder, _bert(num_labels=1), AutoModelForSequenceClassification)
    return folder


_BERT_TOKENS: dict[str, object] = {
    "tokenizer_class": "BertTokenizer",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "eos_token": None,
    "model_max_length": 256,
}


def word_level() -> Tokenizer:
    """Words, with BERT's marks around texts and between those of a pair, which have token types."""
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*marks, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(marks)
    return tokenizer


def _bert(**changes: object) -> BertConfig:
    return BertConfig(vocab_size=word_level().get_vocab_size(), **_SIZES, **changes)


def _write_model(folder: Path, config: PreTrainedConfig, kind: type) -> None:
    torch.manual_seed(11)
    kind.from_config(config, dtype=torch.float32).save_pretrained(folder)


def _write_modules(folder: Path, pooling: str) -> None:
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    modes = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken"}
    flags = {f"pooling_mode_{key}": mode == pooling for key, mode in modes.items()}
    pooled = {"word_embedding_dimension": 64, "include_prompt": True, **flags}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooled))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256, "do_lower_case": False}))
