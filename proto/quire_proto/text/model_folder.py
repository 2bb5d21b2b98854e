"""What a model's folder says beside its weights: digests of its ``config.json`` and ``tokenizer.json``, by which
engines tell routers which model they have, and the sampling that its authors recommend. An engine needs no text.
"""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quire_proto.errors import QuireError
from quire_proto.sampling import SamplingParams

DIGEST_BYTES = 16
_MAX_CONFIG_BYTES = 1 << 20
# What ``generation_config.json`` says of sampling, and its name here; as vLLM reads it.
_RECOMMENDED = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
_SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
"""What distinguishes models of one family. Left out is what libraries add when they rewrite the file, and what
operators change for one engine (precision, quantization, length).
"""


def vocabulary_digest(tokenizer: Tokenizer) -> bytes:
    """``DIGEST_BYTES`` of BLAKE2b over all ids and their tokens, in the order of the ids. It does not depend on a
    file's formatting, nor on how the tokenizer splits text, which an engine never does.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    for token_id, token in sorted((token_id, token) for token, token_id in vocabulary.items()):
        name = token.encode(errors="surrogatepass")
        digest.update(token_id.to_bytes(8, "little") + len(name).to_bytes(8, "little") + name)
    return digest.digest()


def folder_vocabulary_digest(folder: Path) -> bytes:
    """``vocabulary_digest`` of a model folder's ``tokenizer.json``; empty if it is missing or cannot be read."""
    try:
        return vocabulary_digest(Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8")))
    except Exception:  # noqa: BLE001 - what tokenizers raises
        return b""


def folder_config_digest(folder: Path) -> bytes:
    """``DIGEST_BYTES`` of BLAKE2b over the architecture and the sizes in a model folder's ``config.json``; empty if
    ``vocab_size`` or ``hidden_size`` is missing there.
    """
    config = read_config(folder)
    if not (type(config.get("vocab_size")) is int and type(config.get("hidden_size")) is int):
        return b""
    sizes = json.dumps([config.get(name) for name in _SIZES], separators=(",", ":"))
    return blake2b(sizes.encode(), digest_size=DIGEST_BYTES).digest()


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's ``config.json``; empty if it is missing or cannot be read."""
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def recommended_sampling(folder: Path) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that a model folder's ``generation_config.json`` sets; none without that file.
    Raises ``ValueError`` for one that cannot be used.
    """
    path = folder / "generation_config.json"
    try:
        config = json.loads(path.read_bytes()) if path.is_file() else {}
        if not isinstance(config, dict):
            raise TypeError("it is no object")
        given = {ours: config[name] for name, ours in _RECOMMENDED.items() if config.get(name) is not None}
        if given.get("top_k") == -1:  # all tokens, as vLLM has it
            given["top_k"] = 0
        SamplingParams(**given)
    except (OSError, ValueError, TypeError, QuireError) as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
    return given
