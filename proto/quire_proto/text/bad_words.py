"""Words that an output may not have, as the tokens that write them."""

from collections.abc import Iterator, Sequence

from quire_proto.errors import invalid
from quire_proto.sampling import MAX_BAD_WORDS
from quire_proto.text.model_text import ModelTokenizer

MAX_WORDS = MAX_BAD_WORDS // 2  # each may be written in two ways
MAX_WORD_CHARACTERS = 256

TokenIds = tuple[int, ...]


def encode_bad_words(words: Sequence[str], text: ModelTokenizer) -> tuple[TokenIds, ...]:
    """What ``SamplingParams.bad_words`` must hold so that the tokenizer's own way to write any of ``words`` never
    occurs: each both at the beginning of a text and after a space, in order. Raises ``QuireError`` INVALID.

    A text can still come about from other tokens than the tokenizer would choose for it.
    """
    if len(words) > MAX_WORDS:
        raise invalid("bad_words", f"bad_words holds {len(words)} texts but at most {MAX_WORDS} are allowed.")
    forbidden: list[TokenIds] = []
    for form in _forms(words, text):
        # What ends with a forbidden form cannot be completed anyway.
        if not any(form[-len(end) :] == end for end in forbidden):
            forbidden.append(form)
    return tuple(forbidden)


def _forms(words: Sequence[str], text: ModelTokenizer) -> Iterator[TokenIds]:
    for word in words:
        bare = word.lstrip(" ")
        if not 1 <= len(bare) <= MAX_WORD_CHARACTERS:
            raise invalid("bad_words", f"Each of bad_words must have 1 to {MAX_WORD_CHARACTERS} characters.")
        for form in (bare, f" {bare}"):
            yield tuple(text.encode_plain(form))
