"""Whether two programs mean the same by a token's id: a digest of what a tokenizer calls its tokens."""

from hashlib import blake2b
from pathlib import Path

from tokenizers import Tokenizer

DIGEST_BYTES = 16


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


def digest_of_folder(folder: Path) -> bytes:
    """The digest of a model folder's ``tokenizer.json``; empty where there is none that can be read."""
    try:
        return vocabulary_digest(Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8")))
    except Exception:  # noqa: BLE001 - what tokenizers raises
        return b""
