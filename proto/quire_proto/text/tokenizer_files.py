"""What a model's folder says of its text: the tokenizer, its special tokens by name, and its chat templates by name.

Folders name the same things in several files. What counts is what counts in transformers: ``tokenizer_config.json``,
before or after the older ``special_tokens_map.json`` and ``added_tokens.json``, and templates in files of their own
before those in ``tokenizer_config.json``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from quire_proto.errors import TokenizerLoadError
from quire_proto.text.file_names import (
    ADDED,
    CONFIG,
    PROCESSOR_TEMPLATE,
    SPECIAL_MAP,
    TEMPLATE,
    TEMPLATE_FOLDER,
    TOKENIZER,
    missing_tokenizer,
)

DEFAULT, TOOL_USE = "default", "tool_use"
"""The names of the templates that are used: one of all conversations, and one of conversations with tools."""
_MAX_CONFIG_BYTES = 1 << 26
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TemplateSource(NamedTuple):
    """A chat template, and the file that it is from."""

    text: str
    origin: Path


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """``special_tokens`` are texts by the names that templates use (``bos_token``). ``templates`` are by name.
    ``response_template`` is transformers' description of what the model writes.
    """

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    templates: Mapping[str, TemplateSource]
    response_template: Any

    @classmethod
    def read(cls, folder: Path) -> "TokenizerFiles":
        """Reads a folder in Hugging Face's layout, of which only ``tokenizer.json`` has to be there. Raises
        ``TokenizerLoadError``.
        """
        if folder.is_file():
            raise TokenizerLoadError(
                f"{folder} is a file: name the folder that it is in, which must have a tokenizer.json next to it."
            )
        config = read_object(folder / CONFIG)
        templates = _read_templates(folder, config)
        return cls(read_tokenizer(folder), named_special_tokens(folder), templates, config.get("response_template"))


def read_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a folder, with the tokens that other files than ``tokenizer.json`` add, as transformers
    adds them. Raises ``TokenizerLoadError``, with the command that converts another tokenizer.
    """
    path = folder / TOKENIZER
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise TokenizerLoadError(missing_tokenizer(folder)) from None
    except OSError as error:
        raise TokenizerLoadError(f"{path}: the tokenizer cannot be read: {error.strerror}.") from error
    except Exception as error:  # what tokenizers raises
        raise TokenizerLoadError(f"{path}: this is not a tokenizer: {error}.") from error
    tokenizer.add_tokens(list(_more_tokens(folder, tokenizer)))
    return tokenizer


def named_special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens of a folder by their names: those that all tokenizers have (``eos_token``), and a
    model's own (``image_token``, or in ``extra_special_tokens``). Raises ``TokenizerLoadError``.
    """
    settings = _settings(folder)
    extra = settings.get("extra_special_tokens")
    given = {name: value for name, value in settings.items() if name.endswith("_token")}
    given |= extra if isinstance(extra, dict) else {}
    return {name: text for name, value in given.items() if (text := _text(value)) is not None}


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is no file. Raises ``TokenizerLoadError``."""
    if not path.exists():
        return {}
    try:
        config = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerLoadError(f"{path}: this is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise TokenizerLoadError(f"{path}: an object was expected.")
    return config


def _settings(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` and ``special_tokens_map.json`` as one. The second counts in folders of a time when the
    first did not list the added tokens; else it only fills gaps.
    """
    config, older = read_object(folder / CONFIG), read_object(folder / SPECIAL_MAP)
    return {**older, **config} if "added_tokens_decoder" in config else {**config, **older}


def _text(token: object) -> str | None:
    """The text of a token, which is a string, or an object of its properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _more_tokens(folder: Path, tokenizer: Tokenizer) -> Iterator[AddedToken]:
    """The tokens that have to be found in texts though ``tokenizer.json`` does not add them, or adds them with other
    properties, in the order of their ids. One that the vocabulary lacks gets the next id.
    """
    settings, named = _settings(folder), named_special_tokens(folder)
    keys = ("extra_special_tokens", "additional_special_tokens")
    lists = [source.get(key) for source in (read_object(folder / CONFIG), settings) for key in keys]
    special = dict.fromkeys([*named.values(), *(text for each in lists for text in _texts(each))])
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for _, token in sorted(_decoded(decoder), key=lambda each: each[0]):
            known.add(token["content"])
            flags = {name: bool(token[name]) for name in _FLAGS if name in token}
            is_special = flags.get("special", False) or token["content"] in named.values()
            yield AddedToken(token["content"], **{**flags, "special": is_special})
    else:
        ids = {text: number for text, number in read_object(folder / ADDED).items() if isinstance(number, int)}
        for text in sorted(ids, key=ids.__getitem__):
            if text not in known:
                known.add(text)
                yield AddedToken(text, normalized=text not in special, special=text in special)
    yield from (AddedToken(text, special=True) for text in special if text not in known)


def _texts(tokens: object) -> list[str]:
    return [text for token in tokens if (text := _text(token)) is not None] if isinstance(tokens, list) else []


def _decoded(decoder: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    for token_id, token in decoder.items():
        if str(token_id).isdecimal() and isinstance(token, dict) and _text(token) is not None:
            yield int(token_id), token


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, TemplateSource]:
    """The templates by name. Files of templates count before ``tokenizer_config.json``, of which the default is then
    used if there is no other; a processor's file counts where nothing else has any.
    """
    path = folder / CONFIG
    inside = {name: TemplateSource(text, path) for name, text in _named(config.get("chat_template"), path).items()}
    beside = {}
    if (folder / TEMPLATE).exists():
        beside[DEFAULT] = folder / TEMPLATE
    beside |= {each.stem: each for each in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    files = {name: TemplateSource(_read_text(each), each) for name, each in beside.items()}
    if files:
        return {name: source for name, source in inside.items() if name == DEFAULT} | files
    if inside:
        return inside
    path = folder / PROCESSOR_TEMPLATE
    return {
        name: TemplateSource(text, path) for name, text in _named(read_object(path).get("chat_template"), path).items()
    }


def _named(value: object, origin: Path) -> dict[str, str]:
    """The templates of a ``chat_template``: one text, an object of texts, or a list of objects with names."""
    if value is None:
        return {}
    if isinstance(value, list):
        value = {each["name"]: each.get("template") for each in value if isinstance(each, dict) and "name" in each}
    named = {DEFAULT: value} if isinstance(value, str) else value
    if not isinstance(named, dict) or not all(isinstance(text, str) for text in named.values()):
        raise TokenizerLoadError(f"{origin}: chat_template must be a string, or strings by name.")
    return {str(name): text for name, text in named.items()}


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_CONFIG_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise TokenizerLoadError(f"{path}: the file cannot be read as text: {error}.") from error
