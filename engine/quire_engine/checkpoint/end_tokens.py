"""The tokens that end an output: the union of the tokens that a model's folder names in two configurations and in its
tokenizer. Fine-tunes often change the chat template and the tokenizer's ``eos_token``, but not the configurations.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def end_token_ids(named: Iterable[tuple[Path, object]], folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end an output: the ids that files have ``named`` (each an id, a list of ids or None), and
    the ``eos_token`` of the tokenizer in ``folder``. Logs and leaves out ids that the model does not have.
    """
    found: dict[int, None] = {}
    for path, value in (*named, *_tokenizers_end_token(folder)):
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(each, int) and not isinstance(each, bool) and 0 <= each < vocab_size:
                found[each] = None
            else:
                log.warning(
                    "ignored the end token %.80r of %s: ids are whole numbers from 0 to %d", each, path, vocab_size - 1
                )
    return tuple(found)


def _tokenizers_end_token(folder: Path) -> Iterator[tuple[Path, object]]:
    """Yields the id of the tokenizer's ``eos_token`` and the file that names it, if there is one."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        config = _read(folder / name)
        token = config.get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str) or not content:
            continue
        token_id = _id_in_config(config, content)
        token_id = _id_in_tokenizer(_read(folder / "tokenizer.json"), content) if token_id is None else token_id
        if token_id is None:
            log.warning("ignored the end token %.80r of %s: tokenizer.json does not have it", content, folder / name)
        yield folder / name, token_id
        return


def _id_in_config(config: dict[str, Any], content: str) -> int | None:
    """Returns the id of a token in ``added_tokens_decoder`` of a ``tokenizer_config.json``, which is quick to read."""
    added = config.get("added_tokens_decoder")
    for token_id, token in added.items() if isinstance(added, dict) else ():
        if isinstance(token, dict) and token.get("content") == content and token_id.isascii() and token_id.isdigit():
            return int(token_id)
    return None


def _id_in_tokenizer(tokenizer: dict[str, Any], content: str) -> int | None:
    """Returns the id of a token in a ``tokenizer.json``."""
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == content and isinstance(token.get("id"), int):
            return int(token["id"])
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        token_id = vocabulary.get(content)
        return token_id if isinstance(token_id, int) else None
    pieces = vocabulary if isinstance(vocabulary, list) else ()  # of a Unigram model, with their scores
    return next((at for at, piece in enumerate(pieces) if isinstance(piece, list) and piece[:1] == [content]), None)


def _read(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one on any error, which loading the tokenizer reports."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
