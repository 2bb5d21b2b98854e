"""Prompts that are pooled instead of continued: texts and pairs of texts in tokens, cut to a length where that is asked
for, and what sentence-transformers' folders put before texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tokenizers import Encoding, Tokenizer

from quire_proto.errors import TokenizerLoadError, invalid

SENTENCE_CONFIG = "config_sentence_transformers.json"
Texts = str | tuple[str, str]
"""A text, or a pair of texts that are compared."""
MAX_TRUNCATED = 64
"""A text that is cut to a model's length may be so many times as long."""


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """The tokens of a text or of a pair, and the index of the second text's first token; 0 if there is none, or if the
    tokenizer does not tell it.
    """

    token_ids: Sequence[int]
    second_text_start: int = 0


def encode_pooled(
    tokenizer: Tokenizer, texts: Sequence[Texts], truncate: int | None, *, add_special_tokens: bool
) -> list[PooledPrompt]:
    """The prompts of ``texts``. With ``truncate`` each has so many tokens at most, with those that the tokenizer adds:
    a text keeps its beginning, and of a pair the longer text is cut first, as transformers does (``longest_first``).
    Raises ``QuireError`` INVALID for what is no text, and for a length that has no room for what is added.
    """
    if truncate is None:
        encodings = _encode_all(tokenizer, texts, special=add_special_tokens)
    else:
        encodings = [_truncated(tokenizer, text, truncate, special=add_special_tokens) for text in texts]
    return [PooledPrompt(encoding.ids, _second_start(encoding)) for encoding in encodings]


def _truncated(tokenizer: Tokenizer, text: Texts, length: int, *, special: bool) -> Encoding:
    parts = [text] if isinstance(text, str) else [*text]
    encodings = _encode_all(tokenizer, parts, special=False)
    added = tokenizer.num_special_tokens_to_add(len(parts) == 2) if special else 0
    if added > length:
        message = f"truncate_prompt_tokens is {length}, and the tokenizer adds {added} tokens to each text."
        raise invalid("truncate_prompt_tokens", message)
    kept = _longest_first([len(each) for each in encodings], length - added)
    for encoding, count in zip(encodings, kept, strict=True):
        encoding.truncate(count)
    first, *others = encodings
    return tokenizer.post_process(first, others[0] if others else None, add_special_tokens=special)


def _encode_all(tokenizer: Tokenizer, texts: Sequence[Texts], *, special: bool) -> list[Encoding]:
    """Encodes on several threads, without offsets, and releases the GIL meanwhile."""
    try:
        return tokenizer.encode_batch_fast([*texts], add_special_tokens=special)
    except TypeError:  # a lone surrogate, which JSON inside of JSON can contain
        raise invalid("prompt", "The text holds half of a surrogate pair, which is no character.") from None


def _longest_first(lengths: Sequence[int], room: int) -> list[int]:
    """What is left of one or two texts of these lengths where ``room`` tokens are all there is."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    short = min(*lengths, room // 2)
    long = min(max(lengths), room - short)
    return [long, short] if lengths[0] > lengths[1] else [short, long]


def _second_start(encoding: Encoding) -> int:
    """Where the second text of a pair begins, for tokenizers that give it a type of its own; else 0."""
    return encoding.type_ids.index(1) if 1 in encoding.type_ids else 0


@dataclass(frozen=True, slots=True)
class SentencePrompts:
    """What a folder of sentence-transformers says is put before texts, by the names of these prompts.
    ``default_prompt_name`` is used where a request names none.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None

    @classmethod
    def read(cls, path: Path, config: Mapping[str, Any]) -> Self:
        """Those of the file at ``path``, which says ``config``. Raises ``TokenizerLoadError``."""
        prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise TokenizerLoadError(f"{path} has prompts that are no texts.")
        return cls(prompts, default if isinstance(default, str) and default in prompts else None)

    def text(self, name: str | None) -> str:
        """What is put before texts under this name. Raises ``QuireError`` INVALID for a name that there is not."""
        name = name or self.default_prompt_name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise invalid("prompt_name", f"This model has no prompt named {name[:64]!r}; it has {known}.")
        return self.prompts[name]
