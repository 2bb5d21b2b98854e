"""One model's text side: its tokenizer and chat template, loaded from a Hugging Face folder. Does no I/O afterwards."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from quire_proto.errors import invalid
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.errors import ModelTextError
from quire_proto.text.output import OutputText
from quire_proto.text.stop import StopMatcher
from quire_proto.text.tokens import TokenBytes

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_CHARACTERS_A_TOKEN = 8  # more than common text has
_TOKENS_OF_A_CUT = 512  # what may become of one long token that is cut in two


class ModelText:
    """Text to tokens and back for one model. ``template`` is None for a model without a chat template. ``token_bytes``
    tells what a single token writes.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        tokenizer.no_truncation()  # a file may carry the settings of a training run
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._special = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.token_bytes = TokenBytes(self._decode, tokenizer.id_to_token, self.vocab_size)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``; the last two may be
        missing. Raises ``ModelTextError``.
        """
        config = _read_config(folder / "tokenizer_config.json")
        return cls(_read_tokenizer(folder / "tokenizer.json"), _read_template(folder, config))

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """The tokens of ``text`` with those that the tokenizer adds by itself, such as a beginning of sequence. Raises
        ``QuireError`` INVALID where there are many more than ``limit``; a few more are left to the caller.
        """
        self._refuse_far_too_long(text, limit)
        return self._tokenizer.encode(text).ids

    def encode_part(self, text: str, limit: int | None = None) -> list[int]:
        """The tokens of ``text`` alone, as it may stand somewhere in a longer one: nothing is added by itself. Raises
        as ``encode`` does.
        """
        self._refuse_far_too_long(text, limit)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        """The text that asks the model to answer a conversation. The template writes the special tokens, so none must
        be added. Raises ``QuireError`` INVALID when the model has no template, and when it refuses the messages.
        """
        if self._template is None:
            raise invalid("messages", "This model has no chat template; use the completions API.")
        return self._template.render(messages)

    def render_chat(self, messages: list[dict[str, str]], limit: int | None = None) -> list[int]:
        """The prompt of a conversation in tokens. Raises as ``chat_prompt`` and ``encode`` do."""
        return self.encode_part(self.chat_prompt(messages), limit)

    def open_output(
        self,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str],
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> OutputText:
        """The text of one output that continues ``prompt_token_ids`` and ends with the first of ``stop``, which is
        part of the text only with ``include_stop``. Special tokens have no text unless ``skip_special_tokens`` is off.
        """
        visible = self._visible if skip_special_tokens else self._known
        matcher = StopMatcher(stop, include=include_stop) if stop else None
        return OutputText(self._decode, visible, prompt_token_ids, matcher)

    def _refuse_far_too_long(self, text: str, limit: int | None) -> None:
        """Counts a long text's tokens part by part, and stops when there are too many: tokens cost a hundred bytes and
        a microsecond each, also those of a text that can never fit. A cut makes more of them, hence the margins.
        """
        size = len(text) if limit is None else limit * _CHARACTERS_A_TOKEN
        if limit is None or len(text) <= size:
            return
        tokens, most = 0, limit + limit // 4
        for start in range(0, len(text), size):
            tokens += len(self._tokenizer.encode(text[start : start + size], add_special_tokens=False))
            most += _TOKENS_OF_A_CUT
            if tokens > most:
                raise invalid("prompt", f"The prompt has more than {limit} tokens, which is this model's limit.")

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _visible(self, token_id: int) -> bool:
        """Whether a token has text where special tokens have none."""
        return token_id not in self._special and self._known(token_id)

    def _known(self, token_id: int) -> bool:
        """Whether the tokenizer has this token: models may name more."""
        return self._tokenizer.id_to_token(token_id) is not None


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelTextError(f"{path}: the tokenizer cannot be read: {error.strerror}.") from error
    except Exception as error:  # what tokenizers raises
        raise ModelTextError(f"{path}: this is not a tokenizer: {error}.") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelTextError(f"{path}: this is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ModelTextError(f"{path}: an object was expected.")
    return config


def _read_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The file ``chat_template.jinja`` counts more than the configuration's ``chat_template``."""
    path = folder / "chat_template.jinja"
    if not path.exists():
        origin = folder / "tokenizer_config.json"
        source = _template_in_config(config.get("chat_template"), origin)
    else:
        origin, source = path, _read_text(path)
    return None if source is None else ChatTemplate(source, _special_tokens(config), str(origin))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelTextError(f"{path}: the file cannot be read as text: {error}.") from error


def _template_in_config(value: object, origin: Path) -> str | None:
    """A string, or a list of named templates of which ``default`` is for conversations."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        return _default_template(value)
    raise ModelTextError(f"{origin}: chat_template must be a string or a list.")


def _default_template(entries: Iterable[object]) -> str | None:
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name") == "default" and isinstance(entry.get("template"), str):
            return str(entry["template"])
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by the names that templates use; a token may be a string or an object around it."""
    tokens = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[name] = content
    return tokens
