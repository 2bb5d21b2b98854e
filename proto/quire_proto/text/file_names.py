"""The names of the files of a folder that say how a model's text is read and written. Quick to import."""

import shlex
from pathlib import Path

from quire_proto.folders import no_such_path

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
TEMPLATE, PROCESSOR_TEMPLATE = "chat_template.jinja", "chat_template.json"
TEMPLATE_FOLDER = "additional_chat_templates"
_CONVERT = (
    "import sys; from transformers import AutoTokenizer as T; f = sys.argv[1]; T.from_pretrained(f).save_pretrained(f)"
)
# Tokenizers that are not read, and what transformers needs beside itself to convert them.
_OTHERS = {
    "tokenizer.model": "sentencepiece protobuf",
    "spiece.model": "sentencepiece protobuf",
    "tekken.json": "",
    "tiktoken.model": "tiktoken",
    "vocab.json": "",
    "vocab.txt": "",
}


def is_text_file(file: str, folder: str = "") -> bool:
    """Returns whether ``file`` of a repository says something of the text of the model in its ``folder``."""
    name = file.removeprefix(f"{folder}/") if folder else file
    place, _, last = name.rpartition("/")
    if place:
        return place == TEMPLATE_FOLDER and last.endswith(".jinja")
    return name in (TOKENIZER, CONFIG, SPECIAL_MAP, ADDED, TEMPLATE, PROCESSOR_TEMPLATE)


def missing_tokenizer(folder: Path) -> str:
    """Returns the sentence for a folder without ``tokenizer.json``."""
    reason = "No such file or directory" if folder.exists() else no_such_path(str(folder))
    sentence = f"{folder / TOKENIZER}: the tokenizer cannot be read: {reason}"
    other = next((name for name in _OTHERS if (folder / name).is_file()), None)
    if other is None:
        return f"{sentence}."
    needs = f"pip install {_OTHERS[other]} && " if _OTHERS[other] else ""
    return (
        f"{sentence}. {other} is another form of tokenizer, which is not read: run {needs}python -c "
        f"{shlex.quote(_CONVERT)} {shlex.quote(str(folder))} to convert it."
    )
