"""A model whose tokens are single bytes, so that a test can read what it says."""

from quire_proto.text.tokenizer import ModelTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def _letters() -> ModelTokenizer:
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(_ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return ModelTokenizer(tokenizer, None)


TOKENIZER = _letters()


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text)
