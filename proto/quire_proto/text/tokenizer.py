"""One model's text side: its tokenizer and chat template, loaded from a Hugging Face folder. Does no I/O afterwards."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from tokenizers import Encoding, Tokenizer, decoders

from quire_proto.errors import TokenizerLoadError, invalid
from quire_proto.sampling import MAX_BAD_WORDS
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.detokenizer import REPLACEMENT, Decode, OutputTextStream, StopMatcher
from quire_proto.text.reasoning import THINK_BEGIN, THINK_END, opens_reasoning
from quire_proto.text.special_tokens import SpecialTokenEscaper
from quire_proto.text.tool_formats import TOOL_MARKERS, ToolFormat

# The bytes that single tokens write. Text comes from the detokeniser.
#
# A token may hold a part of a character, which has no text, but always the same bytes.


_CACHED = 1 << 16
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Called with a token id, gives the token's bytes, or None for an id that the tokenizer does not have.

    The bytes of a text's tokens together are the text in UTF-8. A special token's are its name's. ``decode`` is the
    tokenizer's, special tokens included, and ``written`` gives a token as its vocabulary has it.
    """

    def __init__(self, decode: Decode, written: Callable[[int], str | None], vocab_size: int) -> None:
        self._decode = decode
        self._written = written
        self._before = _letter(decode, written, vocab_size)
        self._find = lru_cache(_CACHED)(self._look_up)

    def __call__(self, token_id: int) -> bytes | None:
        """The bytes of one token."""
        return self._find(token_id)

    def _look_up(self, token_id: int) -> bytes | None:
        written = self._written(token_id)
        if written is None:
            return None
        text = self._text(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        return _bytes_written(written) or text.encode()

    def _text(self, token_id: int) -> str:
        """The token's text after a letter: at a text's beginning, decoders of the sentencepiece kind drop a space."""
        before = "" if self._before is None else self._decode([self._before])
        together = self._decode([token_id] if self._before is None else [self._before, token_id])
        return together[len(before) :] if together.startswith(before) else self._decode([token_id])


def _letter(decode: Decode, written: Callable[[int], str | None], vocab_size: int) -> int | None:
    """A token that is one letter of ASCII, and not as a byte: bytes that follow each other are decoded together."""
    for token_id in range(vocab_size):
        name = written(token_id) or ""
        if len(name) == 1 and name.isascii() and name.isalpha() and decode([token_id]) == name:
            return token_id
    return None


def _bytes_written(written: str) -> bytes | None:
    """The bytes of a token that is no whole text: one of the 256 that sentencepiece falls back to, or what byte-level
    vocabularies write with a letter for each byte; None for anything else.
    """
    byte = _FALLBACK.fullmatch(written)
    if byte is not None:
        return bytes.fromhex(byte[1])
    if all(letter in _BYTES for letter in written):
        return bytes(_BYTES[letter] for letter in written)
    return None


def _alphabet() -> dict[str, int]:
    """The letter of each byte in byte-level vocabularies, as GPT-2 introduced them: printable bytes are themselves, and
    the others, in order, the characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _alphabet()


# Whether two programs have the same model: a digest of what its tokenizer calls its tokens, and one of the sizes that
# its ``config.json`` tells.


DIGEST_BYTES = 16
_MOST_CONFIG_BYTES = 1 << 20
_SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
"""What tells models of one family apart. Whatever libraries add when they write the file again, or operators change for
one engine (its precision, quantization, length), is left out.
"""


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


def folder_vocabulary_digest(folder: Path) -> bytes:
    """The digest of a model folder's ``tokenizer.json``; empty where there is none that can be read."""
    try:
        return vocabulary_digest(Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8")))
    except Exception:  # noqa: BLE001 - what tokenizers raises
        return b""


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's ``config.json``; empty where there is none that can be read."""
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(_MOST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def folder_config_digest(folder: Path) -> bytes:
    """``DIGEST_BYTES`` of BLAKE2b over the architecture and the sizes in a model folder's ``config.json``; empty where
    it does not tell the size of the vocabulary and of the hidden states.
    """
    config = read_config(folder)
    if not (type(config.get("vocab_size")) is int and type(config.get("hidden_size")) is int):
        return b""
    told = json.dumps([config.get(name) for name in _SIZES], separators=(",", ":"))
    return blake2b(told.encode(), digest_size=DIGEST_BYTES).digest()


_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_CHARACTERS_A_TOKEN = 8  # more than common text has
_TOKENS_OF_A_CUT = 512  # what may become of one long token that is cut in two
_LAST_TOKENS = 32  # of a prompt: enough to see what it ends with
_REMEMBERED = 65_536  # tokens

Conversation = Sequence[Mapping[str, Any]]


class ModelTokenizer:
    """Text to tokens and back for one model. ``template`` is None for a model without a chat template. ``token_bytes``
    tells what a single token writes. Special tokens in the texts of a conversation are text, unless they are allowed
    there. Raises ``TokenizerLoadError``.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, allow_special_tokens_in_content: bool = False
    ) -> None:
        tokenizer.no_truncation()  # a file may carry the settings of a training run
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        # Both are asked for with every token of every output.
        self._decode_alone = lru_cache(_REMEMBERED)(self._decode_one)
        self._alone = lru_cache(_REMEMBERED)(self._text_alone)
        has_contents = template is not None and not allow_special_tokens_in_content
        self._special_tokens = SpecialTokenEscaper(tokenizer) if has_contents else None
        self._special = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._marks = {mark: added[mark] for mark in _marks_of(template) if mark in added}
        hidden = self._special - frozenset(self._marks.values())
        self._visible = self._visible_beside(self._special)
        self._visible_with_marks = self._visible_beside(hidden)
        self._known = self._visible_beside(frozenset())
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.token_bytes = TokenBytes(self._decode, tokenizer.id_to_token, self.vocab_size)

    @classmethod
    def load(cls, folder: Path, *, allow_special_tokens_in_content: bool = False) -> Self:
        """Reads ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``; the last two may be
        missing. Raises ``TokenizerLoadError``.
        """
        config = _read_config(folder / "tokenizer_config.json")
        return cls(
            _read_tokenizer(folder / "tokenizer.json"),
            _read_template(folder, config),
            allow_special_tokens_in_content=allow_special_tokens_in_content,
        )

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """The tokens of ``text`` with those that the tokenizer adds by itself, such as a beginning of sequence. Raises
        ``QuireError`` INVALID where there are many more than ``limit``; a few more are left to the caller.
        """
        self._refuse_far_too_long(self._tokenizer, text, limit)
        return _encoding(self._tokenizer, text, special=True).ids

    def encode_plain(self, text: str, limit: int | None = None) -> list[int]:
        """The tokens of ``text`` alone, as it may stand somewhere in a longer one: nothing is added by itself. Raises
        as ``encode`` does.
        """
        self._refuse_far_too_long(self._tokenizer, text, limit)
        return _encoding(self._tokenizer, text).ids

    def encode_text(self, text: str, limit: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
        """As ``encode`` or, without ``add_special_tokens``, as ``encode_plain``."""
        return self.encode(text, limit) if add_special_tokens else self.encode_plain(text, limit)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones and all."""
        return self._decode(token_ids)

    def name_of(self, token_id: int) -> str:
        """What the tokenizer calls a token; empty for one that it does not have."""
        return self._tokenizer.id_to_token(token_id) or ""

    @cached_property
    def vocabulary_digest(self) -> bytes:
        """See ``vocabulary_digest``. Looks through the whole vocabulary the first time."""
        return vocabulary_digest(self._tokenizer)

    @property
    def template_variables(self) -> frozenset[str]:
        """What the chat template asks for by name."""
        return frozenset() if self._template is None else self._template.variables

    @property
    def renders_slowly(self) -> bool:
        """Whether the chat template takes long even for short conversations."""
        return self._template is not None and self._template.is_slow

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model calls tools; None where its chat template says nothing that is known here."""
        return None if self._template is None else self._template.tool_format

    @property
    def has_reasoning(self) -> bool:
        """Whether the model thinks between marks before it answers."""
        return self._template is not None and self._template.has_reasoning

    @property
    def marker_tokens(self) -> frozenset[str]:
        """Those marks of calls and thoughts that are tokens of their own."""
        return frozenset(self._marks)

    def starts_in_reasoning(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside of the model's thoughts."""
        return self.has_reasoning and opens_reasoning(self._decode(list(prompt_token_ids[-_LAST_TOKENS:])))

    def render_chat_text(
        self,
        messages: Conversation,
        tools: Conversation = (),
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] = {},
    ) -> str:
        """The text that asks the model to answer a conversation, as ``ChatTemplate.render``. To encode it gives other
        tokens than ``encode_chat`` where the messages hold special tokens. Raises ``QuireError`` INVALID when the model
        has no template, and when it refuses the messages.
        """
        if self._template is None:
            raise invalid("messages", "This model has no chat template; use the completions API.")
        return self._template.render(messages, tools, add_generation_prompt=add_generation_prompt, options=options)

    def encode_chat(
        self,
        messages: Conversation,
        limit: int | None = None,
        *,
        tools: Conversation = (),
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] = {},
    ) -> list[int]:
        """The prompt of a conversation in tokens. The template writes special tokens; what the messages hold of them is
        text (see ``SpecialTokenEscaper``). Raises as ``render_chat_text`` and ``encode`` do."""
        mark, special = "", self._special_tokens
        if special is not None:
            messages, tools, mark = special.marked(messages, tools)
        prompt = self.render_chat_text(messages, tools, add_generation_prompt=add_generation_prompt, options=options)
        if special is None or not mark:
            return self.encode_plain(prompt, limit)
        prompt, names = special.named(prompt, mark)
        self._refuse_far_too_long(special.tokenizer, prompt, limit)
        return special.ids(_encoding(special.tokenizer, prompt).ids, names)

    def new_output_stream(
        self,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str],
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        keep_markers: bool = False,
    ) -> OutputTextStream:
        """The text of one output that continues ``prompt_token_ids`` and ends with the first of ``stop``, which is
        part of the text only with ``include_stop``. Special tokens have no text unless ``skip_special_tokens`` is off;
        with ``keep_markers`` those have that mark calls and thoughts.
        """
        visible = self._visible_with_marks if keep_markers else self._visible
        if not skip_special_tokens:
            visible = self._known
        matcher = StopMatcher(stop, include=include_stop) if stop else None
        return OutputTextStream(self._decode, self._alone, visible, prompt_token_ids, matcher)

    def _refuse_far_too_long(self, tokenizer: Tokenizer, text: str, limit: int | None) -> None:
        """Counts a long text's tokens part by part, and stops when there are too many: tokens cost a hundred bytes and
        a microsecond each, also those of a text that can never fit. A cut makes more of them, hence the margins.
        """
        size = len(text) if limit is None else limit * _CHARACTERS_A_TOKEN
        if limit is None or len(text) <= size:
            return
        tokens, most = 0, limit + limit // 4
        for start in range(0, len(text), size):
            tokens += len(_encoding(tokenizer, text[start : start + size]))
            most += _TOKENS_OF_A_CUT
            if tokens > most:
                raise invalid("prompt", f"The prompt has more than {limit} tokens, which is this model's limit.")

    def _decode(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self._decode_alone(token_ids[0])
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _decode_one(self, token_id: int) -> str:
        return self._tokenizer.decode((token_id,), skip_special_tokens=False)

    def _text_alone(self, token_id: int) -> str | None:
        """See ``detokenizer.Alone``. Byte-level decoders join the tokens' bytes: where these are whole characters, so
        is their text. Others may look at what is beside a token, such as the beginning.
        """
        text = self._decode_alone(token_id) if isinstance(self._tokenizer.decoder, decoders.ByteLevel) else REPLACEMENT
        return None if REPLACEMENT in text else text

    def _visible_beside(self, hidden: frozenset[int]) -> Callable[[int], bool]:
        """Whether a token has text where ``hidden`` ones have none."""
        return lru_cache(_REMEMBERED)(partial(self._is_visible, hidden))

    def _is_visible(self, hidden: frozenset[int], token_id: int) -> bool:
        """Not what the tokenizer does not have either: models may name more."""
        return token_id not in hidden and self._tokenizer.id_to_token(token_id) is not None


def _encoding(tokenizer: Tokenizer, text: str, *, special: bool = False) -> Encoding:
    """As ``Tokenizer.encode`` would, except that this lets go of the interpreter's lock meanwhile: that one keeps it,
    so that even on a thread a long text holds up every stream of the process. There are no offsets.
    """
    try:
        return tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
    except TypeError:  # a lone surrogate; JSON can hold one where it stands inside of other JSON
        raise invalid("prompt", "The text holds half of a surrogate pair, which is no character.") from None


def _marks_of(template: ChatTemplate | None) -> Iterator[str]:
    if template is not None and template.tool_format is not None:
        yield from TOOL_MARKERS[template.tool_format]
    if template is not None and template.has_reasoning:
        yield from (THINK_BEGIN, THINK_END)


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokenizerLoadError(f"{path}: the tokenizer cannot be read: {error.strerror}.") from error
    except Exception as error:  # what tokenizers raises
        raise TokenizerLoadError(f"{path}: this is not a tokenizer: {error}.") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerLoadError(f"{path}: this is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise TokenizerLoadError(f"{path}: an object was expected.")
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
        raise TokenizerLoadError(f"{path}: the file cannot be read as text: {error}.") from error


def _template_in_config(value: object, origin: Path) -> str | None:
    """A string, or a list of named templates of which ``default`` is for conversations."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        return _default_template(value)
    raise TokenizerLoadError(f"{origin}: chat_template must be a string or a list.")


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


# Words that an output may not have, as the tokens that write them.


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
