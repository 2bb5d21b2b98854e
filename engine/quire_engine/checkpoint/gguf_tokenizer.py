"""The tokenizer of a GGUF file without a ``tokenizer.json`` next to it. It is written from the file's metadata into a
cache folder, which engine and router read like any other.

    python -m quire_engine.checkpoint.gguf_tokenizer FILE      prints the folder

The metadata has the tokens and their merges. ``tokenizer.ggml.pre`` names how the original model's tokenizer splits
text before merging. Names that are not in ``SPLITS`` are refused, because another split gives other tokens.
"""

import atexit
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quire_proto.folders import trusted_folder, user_cache_folder
from quire_proto.text.file_names import TEMPLATE, TEMPLATE_FOLDER
from tokenizers import Tokenizer

from quire_engine.checkpoint.gguf import GGUF_SUFFIX, GgufFile, find_gguf, gguf_config
from quire_engine.errors import ModelError

log = logging.getLogger(__name__)
TOKENIZER_FILE = "tokenizer.json"
_FORMAT = b"2"  # changes when the written files change
_PREFIX = "tokenizer.ggml."
_TEMPLATE = re.compile(r"tokenizer\.chat_template(?:\.(?P<name>\w{1,64}))?")
_ARRAYS = [f"{_PREFIX}{name}" for name in ("tokens", "token_type", "scores", "merges")]
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # types of tokens
_SPACE = "\u2581"  # as SentencePiece writes it
MAX_PIECE_LENGTH = 512
"""Maximum length, in characters, of a token that is cut at every place to find its merges, which takes quadratic time.
SentencePiece's own default limit is 16.
"""


@dataclass(frozen=True, slots=True)
class Split:
    """How a byte-level tokenizer splits text: by ``regex``, or by GPT-2's if that is None. ``digits``: each digit is
    split off first. ``whole_tokens``: a part that is a token stays whole, even if no merges lead to it. ``composed``:
    text is brought into Unicode's normal form C first. ``add_bos`` is the default for files that do not specify it.
    """

    regex: str | None = None
    digits: bool = False
    whole_tokens: bool = False
    composed: bool = False
    add_bos: bool = False


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = Split(_WORDS + r"\p{N}{1,3}" + _REST, whole_tokens=True, add_bos=True)
_QWEN2 = Split(_WORDS + r"\p{N}" + _REST, composed=True)
_TEKKEN = Split(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_tokens=True,
    add_bos=True,
)
SPLITS = {
    "gpt-2": Split(),
    "smollm": Split(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
"""By ``tokenizer.ggml.pre``."""


def tokenizer_folder(model: Path) -> Path:
    """Returns the folder with the tokenizer of ``model``: its own folder, or the folder of a GGUF file. If that has no
    ``tokenizer.json``, a cache folder that is written once from the GGUF file. Raises ``ModelError`` if that fails.
    """
    folder = _own_folder(model)
    if (folder / TOKENIZER_FILE).is_file():
        return folder
    path = find_gguf(model)
    return folder if path is None else make_tokenizer(path)


@cache
def tokenizer_folder_if_any(model: Path) -> Path:
    """Returns ``tokenizer_folder``, or the model's own folder if no tokenizer can be made: serving tokens needs none.
    Cached per process, because reading a file's metadata may take 0.5 s.
    """
    try:
        return tokenizer_folder(model)
    except ModelError as error:
        log.warning("%s", error)
        return _own_folder(model)


def make_tokenizer(path: Path) -> Path:
    """Returns the cache folder with ``tokenizer.json``, ``tokenizer_config.json``, ``config.json`` and the chat
    template of a GGUF file. Its name is a hash of the file's metadata, so that copies share it. Raises ``ModelError``.
    """
    parent, file = _cache_folder(), GgufFile.read(path, _ARRAYS, _FORMAT)
    folder = parent / f"tokenizer-{file.digest}"
    if folder.is_dir():
        return _trusted(folder, parent)
    texts = _texts(file)
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=parent))
    try:
        for name, text in texts.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_text(text, encoding="utf-8")
        made.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # otherwise another process was quicker
            raise ModelError(f"The tokenizer of {path} cannot be written to {parent}: {error.strerror}.") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return _trusted(folder, parent)


def _trusted(folder: Path, parent: Path) -> Path:
    try:
        return trusted_folder(folder, parent)
    except OSError as error:
        raise ModelError(f"The tokenizer in {folder} is not read: {error.strerror}.") from None


def _own_folder(model: Path) -> Path:
    return model if model.is_dir() or model.suffix != GGUF_SUFFIX else model.parent


def _cache_folder() -> Path:
    """Returns the user's cache folder. If it cannot be written or is not trusted, returns one that is removed when this
    process ends.
    """
    try:
        folder = trusted_folder(user_cache_folder())
    except (OSError, RuntimeError):
        folder = Path("/nonexistent")
    return folder if os.access(folder, os.W_OK) else _private_folder()


@cache
def _private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="quire-tokenizer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _texts(file: GgufFile) -> dict[str, str]:
    """Returns the contents of each file of the folder."""
    vocabulary = _Vocabulary(file)
    texts = {
        TOKENIZER_FILE: json.dumps(vocabulary.tokenizer(), ensure_ascii=False),
        "tokenizer_config.json": json.dumps(vocabulary.special_tokens(), ensure_ascii=False),
        "config.json": json.dumps(gguf_config(file)),
    }
    try:
        Tokenizer.from_str(texts[TOKENIZER_FILE])
    except Exception as error:  # noqa: BLE001 - what tokenizers raises
        raise _refusal(file, f"it is not whole: {error}") from None
    return texts | dict(_templates(file))


def _templates(file: GgufFile) -> Iterator[tuple[str, str]]:
    """Yields the chat templates with their file names: the default one, and the named ones."""
    for key, template in file.metadata.items():
        found = _TEMPLATE.fullmatch(key)
        if found and isinstance(template, str):
            yield f"{TEMPLATE_FOLDER}/{found['name']}.jinja" if found["name"] else TEMPLATE, template


class _Vocabulary:
    """The tokenizer in the metadata. Raises ``ModelError`` if the metadata are incomplete."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._kind = file.metadata.get(f"{_PREFIX}model")
        if self._kind not in ("gpt2", "llama"):
            raise _refusal(file, f"its kind is {self._kind!r}, and read are 'gpt2' and 'llama'")
        self._tokens: list[str] = self._array("tokens", str)
        types: list[int] = self._array("token_type", int)
        if len(types) != len(self._tokens):
            raise _refusal(file, "it has not one type for each token")
        while types and types[-1] == _UNUSED:  # rows of the embedding without a token
            types.pop()
        self._types = types
        self._ids = {token: number for number, token in enumerate(self._tokens[: len(types)])}

    def tokenizer(self) -> dict[str, Any]:
        """Returns the contents of ``tokenizer.json``."""
        parts = self._byte_level() if self._kind == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            "post_processor": self._post_processor(),
            **parts,
        }

    def special_tokens(self) -> dict[str, str]:
        """Returns the special tokens, by their names in ``tokenizer_config.json``."""
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        found = {name: self._special(key) for name, key in names.items()}
        return {name: token for name, token in found.items() if token is not None}

    def _byte_level(self) -> dict[str, Any]:
        split = self._split()
        pieces: list[dict[str, Any]] = [_BYTE_LEVEL | {"add_prefix_space": False, "use_regex": split.regex is None}]
        if split.digits:
            pieces.insert(0, {"type": "Digits", "individual_digits": True})
        if split.regex is not None:
            pattern = {"Regex": split.regex}
            pieces.insert(0, {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
        return {
            "normalizer": {"type": "NFC"} if split.composed else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": pieces},
            "decoder": _BYTE_LEVEL,
            "model": _BPE
            | {"ignore_merges": split.whole_tokens, "vocab": self._ids, "merges": self._array("merges", str)},
        }

    def _sentencepiece(self) -> dict[str, Any]:
        """Returns the parts of a tokenizer like Llama 2's, as in llama.cpp: a space is added before a text, and after a
        special token, even if there are spaces already.
        """
        spaced = self._flag("add_space_prefix", default=True)
        normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if spaced:
            normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        merges = self._array("merges", str) if f"{_PREFIX}merges" in self._file.metadata else self._merges_by_score()
        unknown = {"unk_token": self._special("unknown"), "fuse_unk": True, "byte_fallback": True}
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": _BPE | unknown | {"vocab": self._ids, "merges": merges},
        }

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Returns the merges of SentencePiece, which merges the two neighbours that make the token with the highest
        score.
        """
        scores = self._array("scores", float)
        if len(scores) != len(self._tokens):
            raise _refusal(self._file, "it has not one score for each token")
        merges: list[tuple[float, int, int, str, str]] = []
        for token, number in self._ids.items():
            if self._types[number] == _NORMAL:
                if len(token) > MAX_PIECE_LENGTH:
                    raise _refusal(
                        self._file, f"token {number} has {len(token)} characters, at most {MAX_PIECE_LENGTH}"
                    )
                pairs = ((token[:end], token[end:]) for end in range(1, len(token)))
                known = [(left, right) for left, right in pairs if left in self._ids and right in self._ids]
                known.sort(key=lambda pair: (self._ids[pair[0]], self._ids[pair[1]]))
                merges += [(scores[number], len(left), len(right), left, right) for left, right in known]
        merges.sort(key=lambda merge: merge[:3], reverse=True)
        return [(left, right) for *_, left, right in merges]

    def _added_tokens(self) -> list[dict[str, Any]]:
        """Returns the tokens that are found in a text before it is split."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": number, "content": token, **plain, "special": self._types[number] != _USER_DEFINED}
            for token, number in self._ids.items()
            if self._types[number] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]

    def _post_processor(self) -> dict[str, Any] | None:
        """Returns the processor that adds the tokens at the start and the end of a text."""
        default = self._kind == "llama" or self._split().add_bos
        begin = self._special("bos") if self._flag("add_bos_token", default=default) else None
        end = self._special("eos") if self._flag("add_eos_token", default=False) else None
        if begin is None and end is None:
            return None

        def text(name: str, type_id: int) -> list[dict[str, Any]]:
            return [
                *([] if begin is None else [{"SpecialToken": {"id": begin, "type_id": type_id}}]),
                {"Sequence": {"id": name, "type_id": type_id}},
                *([] if end is None else [{"SpecialToken": {"id": end, "type_id": type_id}}]),
            ]

        added = [token for token in (begin, end) if token is not None]
        return {
            "type": "TemplateProcessing",
            "single": text("A", 0),
            "pair": [*text("A", 0), *text("B", 1)],
            "special_tokens": {
                token: {"id": token, "ids": [self._ids[token]], "tokens": [token]} for token in sorted(added)
            },
        }

    def _split(self) -> Split:
        name = self._file.metadata.get(f"{_PREFIX}pre")
        if name not in SPLITS:
            raise _refusal(self._file, f"it splits text as {name!r}, and known are {', '.join(SPLITS)}")
        return SPLITS[name]

    def _special(self, key: str) -> str | None:
        number = self._file.metadata.get(f"{_PREFIX}{key}_token_id")
        if number is None:
            return None
        if not isinstance(number, int) or not 0 <= number < len(self._types):
            raise _refusal(self._file, f"its {key}_token_id is {number}, which is not a token")
        return self._tokens[number]

    def _flag(self, name: str, *, default: bool) -> bool:
        return bool(self._file.metadata.get(f"{_PREFIX}{name}", default))

    def _array(self, name: str, kind: type) -> list[Any]:
        values = self._file.metadata.get(f"{_PREFIX}{name}")
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise _refusal(self._file, f"it has no {name}")
        return values


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_BPE = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def _refusal(file: GgufFile, why: str) -> ModelError:
    return ModelError(
        f"The tokenizer in {file.path} cannot be used ({why}): put the original model's {TOKENIZER_FILE} next to it."
    )


def main() -> None:
    """Prints the folder of a file's tokenizer."""
    try:
        sys.stdout.write(f"{make_tokenizer(Path(sys.argv[1]))}\n")
    except ModelError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
