"""Prompts that are pooled instead of continued: texts and pairs of texts in tokens, cut to a length where that is asked
for, and what sentence-transformers' folders put before texts.

A text may be in thousands of pairs. So each is encoded once, without what the tokenizer adds, and its tokens are put
into each of its prompts, whose number of tokens in all is checked before the first is made.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
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
PROMPTS = "prompts"
"""The field that errors about all prompts together name."""
_CHARACTERS_AT_ONCE = 2**18  # of texts: each of their tokens takes a hundred bytes until it is a number


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """The tokens of a text or of a pair, and the index of the second text's first token; 0 if there is none, or if the
    tokenizer does not tell it.
    """

    token_ids: Sequence[int]
    second_text_start: int = 0


def parts_of(texts: Sequence[Texts]) -> dict[str, int]:
    """Returns all texts, those of pairs too, each once, with the number of the prompt that it is in first."""
    parts: dict[str, int] = {}
    for number, text in enumerate(texts):
        for part in _parts(text):
            parts.setdefault(part, number)
    return parts


def encode_pooled(
    tokenizer: Tokenizer,
    texts: Sequence[Texts],
    truncate: int | None,
    *,
    add_special_tokens: bool,
    max_tokens: int | None = None,
) -> list[PooledPrompt]:
    """The prompts of ``texts``, with ``max_tokens`` in all at most. With ``truncate`` each has so many tokens at most,
    with those that the tokenizer adds: a text keeps its beginning, and of a pair the longer text is cut first, as
    transformers does (``longest_first``). Raises ``QuireError`` INVALID for what is no text, for a length that has no
    room for what is added, and for too many tokens in all, which it counts before it makes the first prompt.
    """
    encoded = dict(_encoded(tokenizer, [*parts_of(texts)], truncate))
    sample = min((part for part, each in encoded.items() if each.length), key=len, default="")
    frames = {
        is_pair: _Frame.of(tokenizer, (sample, sample) if is_pair else sample, special=add_special_tokens)
        for is_pair in {not isinstance(text, str) for text in texts}
    }
    prompts = [(frames[not isinstance(text, str)], [encoded[part] for part in _parts(text)]) for text in texts]
    kept = [frame.kept([part.length for part in parts], truncate) for frame, parts in prompts]
    total = sum(frame.size + sum(counts) for (frame, _), counts in zip(prompts, kept, strict=True))
    if max_tokens is not None and total > max_tokens:
        message = f"The prompts have {total} tokens in all, and at most {max_tokens} are allowed: send fewer texts."
        raise invalid(PROMPTS, message)
    return [frame.around(parts, counts) for (frame, parts), counts in zip(prompts, kept, strict=True)]


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A text's number of tokens, and as many of them as a prompt may have."""

    length: int
    token_ids: "array[int]"


@dataclass(frozen=True, slots=True)
class _Frame:
    """The tokens that the tokenizer puts before, between and behind the texts of a prompt. ``typed_from`` is the index
    in ``between`` from which on it gives tokens the second text's type; None if it does not.
    """

    before: "array[int]"
    between: "array[int]"
    behind: "array[int]"
    typed_from: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, sample: Texts, *, special: bool) -> Self:
        """Finds them around a ``sample``, which has tokens unless no text has any."""
        (encoding,) = _encode_all(tokenizer, [sample], special=special)
        ids, sequences = array("i", encoding.ids), encoding.sequence_ids
        typed = encoding.type_ids.index(1) if 1 in encoding.type_ids else None
        if 0 not in sequences:
            return cls(ids, array("i"), array("i"), None if typed is None else typed - len(ids))
        begin, end = sequences.index(0), _last(sequences, 0) + 1
        if isinstance(sample, str):
            return cls(ids[:begin], array("i"), ids[end:], None)
        second, last = sequences.index(1), _last(sequences, 1) + 1
        return cls(ids[:begin], ids[end:second], ids[last:], None if typed is None else typed - end)

    @property
    def size(self) -> int:
        """The number of its tokens."""
        return len(self.before) + len(self.between) + len(self.behind)

    def kept(self, lengths: Sequence[int], truncate: int | None) -> Sequence[int]:
        """Returns how many tokens are left of texts of these lengths. Raises ``QuireError`` if there is no room."""
        if truncate is None:
            return lengths
        if self.size > truncate:
            message = f"truncate_prompt_tokens is {truncate}, and the tokenizer adds {self.size} tokens to each text."
            raise invalid("truncate_prompt_tokens", message)
        return _longest_first(lengths, truncate - self.size)

    def around(self, parts: Sequence[_Encoded], kept: Sequence[int]) -> PooledPrompt:
        """Returns the prompt of texts, of which so many tokens are ``kept``."""
        first, *others = (part.token_ids[:count] for part, count in zip(parts, kept, strict=True))
        head = self.before + first
        second = 0 if self.typed_from is None else len(head) + self.typed_from
        for other in others:
            head += self.between + other
        ids = head + self.behind
        return PooledPrompt(ids, second if second < len(ids) else 0)


def _encoded(tokenizer: Tokenizer, parts: Sequence[str], keep: int | None) -> Iterator[tuple[str, _Encoded]]:
    """Yields each text with its tokens, of which a prompt has ``keep`` at most."""
    begin = size = 0
    for end, part in enumerate(parts, 1):
        size += len(part)
        if size >= _CHARACTERS_AT_ONCE or end == len(parts):
            encodings = _encode_all(tokenizer, parts[begin:end], special=False)
            for text, encoding in zip(parts[begin:end], encodings, strict=True):
                yield text, _Encoded(len(encoding), array("i", encoding.ids[:keep]))
            begin, size = end, 0


def _encode_all(tokenizer: Tokenizer, texts: Sequence[Texts], *, special: bool) -> list[Encoding]:
    """Encodes on several threads, without offsets, and releases the GIL meanwhile."""
    try:
        return tokenizer.encode_batch_fast([*texts], add_special_tokens=special)
    except TypeError:  # a lone surrogate, which JSON inside of JSON can contain
        raise invalid("prompt", "The text holds half of a surrogate pair, which is not a character.") from None


def _longest_first(lengths: Sequence[int], room: int) -> list[int]:
    """What is left of one or two texts of these lengths where ``room`` tokens are all there is."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    short = min(*lengths, room // 2)
    long = min(max(lengths), room - short)
    return [long, short] if lengths[0] > lengths[1] else [short, long]


def _parts(text: Texts) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


def _last(values: Sequence[int | None], value: int) -> int:
    return len(values) - 1 - values[::-1].index(value)


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
            raise TokenizerLoadError(f"{path} has prompts that are not texts.")
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
