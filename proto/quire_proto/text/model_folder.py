"""What a model's folder says beside its weights: digests of its ``config.json`` and ``tokenizer.json``, by which
engines tell routers which model they have, and the sampling that its authors recommend. An engine needs no text.
"""

import json
import logging
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quire_proto.errors import QuireError, TokenizerLoadError
from quire_proto.sampling import SamplingParams
from quire_proto.text.tokenizer_files import read_tokenizer

log = logging.getLogger(__name__)
DIGEST_BYTES = 16
_MAX_CONFIG_BYTES = 1 << 20
# What ``generation_config.json`` says of sampling, and its name here; as vLLM reads it.
_RECOMMENDED = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
_MOST = 2**31
_WHOLE = ("top_k", "max_new_tokens")  # some files have them as 50.0
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
        return vocabulary_digest(read_tokenizer(folder))
    except TokenizerLoadError:
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
    A hint that cannot be used is left out, and logged. Raises ``ValueError`` for a file that holds no object.
    """
    path = folder / "generation_config.json"
    try:
        config = json.loads(path.read_bytes()) if path.is_file() else {}
        if not isinstance(config, dict):
            raise TypeError("it is not an object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
    hints = {name: value for name in _RECOMMENDED if (value := config.get(name)) is not None}
    return {_RECOMMENDED[name]: value for name, hint in hints.items() for value in _usable(path, name, hint)}


def _usable(path: Path, name: str, hint: object) -> Iterator[float]:
    """Yields the value of a hint, if it can be used: 0 for -1 of ``top_k``, which are all tokens in vLLM."""
    value = int(hint) if isinstance(hint, float) and hint.is_integer() and name in _WHOLE else hint
    value = 0 if name == "top_k" and value == -1 else value
    try:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError("it is not a number")
        if name in _WHOLE and not (isinstance(value, int) and value < _MOST):
            raise TypeError(f"it is not a whole number below {_MOST}")
        fields: dict[str, Any] = {_RECOMMENDED[name]: value}
        SamplingParams(**fields)
    except (ValueError, TypeError, OverflowError, QuireError) as error:
        log.warning("%s: %s is %.80r, which is ignored: %s", path, name, hint, error)
        return
    yield value
