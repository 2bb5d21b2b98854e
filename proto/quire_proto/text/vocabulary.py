"""Whether two programs have the same model: a digest of what its tokenizer calls its tokens, and one of the sizes that
its ``config.json`` tells.
"""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

DIGEST_BYTES = 16
_MOST_CONFIG_BYTES = 1 << 20
_SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
"""What tells models of one family apart. Whatever libraries add when they write the file again, or operators change for
one engine (its precision, quantization, length), is left out.
"""


def vocabulary_digest(tokenizer: Tokenizer) -> bytes:
    """``DIGEST_BYTES`` of BLAKE2b over all ids and the tokens they stand for, in the order of the ids. Files that only
    look different, or split text differently, have the same: an engine never splits text.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    for token_id, token in sorted((token_id, token) for token, token_id in vocabulary.items()):
        name = token.encode(errors="surrogatepass")
        digest.update(token_id.to_bytes(8, "little") + len(name).to_bytes(8, "little") + name)
    return digest.digest()


def folder_vocabulary_digest(folder: Path) -> bytes:
    """The digest of a model folder's ``tokenizer.json``; empty where there is none that can be read."""
    try:
        return vocabulary_digest(Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8")))
    except Exception:  # noqa: BLE001 - what tokenizers raises
        return b""


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's ``config.json``; empty where there is none that can be read."""
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(_MOST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def folder_config_digest(folder: Path) -> bytes:
    """``DIGEST_BYTES`` of BLAKE2b over the architecture and the sizes in a model folder's ``config.json``; empty where
    it does not tell the size of the vocabulary and of the hidden states.
    """
    config = read_config(folder)
    if not (type(config.get("vocab_size")) is int and type(config.get("hidden_size")) is int):
        return b""
    told = json.dumps([config.get(name) for name in _SIZES], separators=(",", ":"))
    return blake2b(told.encode(), digest_size=DIGEST_BYTES).digest()
