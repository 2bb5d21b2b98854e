"""One model's tokenizer and chat template, loaded from a Hugging Face folder. No I/O after loading.

``ModelTokenizer`` encodes text and conversations, and decodes. ``TokenBytes`` has the bytes of single tokens, and
``encode_bad_words`` returns the tokens of words that an output may not contain.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Self

from tokenizers import Encoding, Tokenizer, decoders

from quire_proto.context_length import INPUT, MESSAGES, PROMPT, far_too_long
from quire_proto.errors import QuireError, invalid
from quire_proto.sampling import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS
from quire_proto.text.chat_template import ChatTemplate, SpecialTokenEscaper
from quire_proto.text.detokenizer import REPLACEMENT, Decode, OutputTextStream, StopMatcher
from quire_proto.text.harmony import MARKS
from quire_proto.text.model_folder import vocabulary_digest
from quire_proto.text.pooled_prompt import (
    MAX_TRUNCATED,
    SENTENCE_CONFIG,
    PooledPrompt,
    SentencePrompts,
    Texts,
    encode_pooled,
    parts_of,
)
from quire_proto.text.reasoning import ReasoningFormat
from quire_proto.text.template_trial import template_findings
from quire_proto.text.tokenizer_files import DEFAULT, TOOL_USE, TokenizerFiles, read_object
from quire_proto.text.tool_formats import ToolFormat

log = logging.getLogger(__name__)

_CHARS_PER_TOKEN = 8  # more than common text has
_TOKENS_PER_CUT = 512  # tokens that a cut through one long token may add
_LAST_TOKENS = 32  # of a prompt: enough to contain its last marker
_CACHED_TOKENS = 1 << 16  # entries of each cache
Conversation = Sequence[Mapping[str, Any]]


class ModelTokenizer:
    """Text to tokens and back for one model. ``template`` is None for a model without a chat template, and
    ``tool_template`` is the one for conversations with tools, if it is another. ``token_bytes`` gives the bytes of a
    single token. Special tokens in the messages of a conversation are encoded as text, unless
    ``allow_special_tokens_in_content``. Raises ``TokenizerLoadError`` if they cannot be distinguished from text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        tool_template: ChatTemplate | None = None,
        *,
        allow_special_tokens_in_content: bool = False,
    ) -> None:
        tokenizer.no_truncation()  # a file may contain the settings of a training run
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template, self._tool_template = template, tool_template or template
        self._templates = [each for each in dict.fromkeys((template, self._tool_template)) if each is not None]
        # Both are called for every token of every output.
        self._decode_cached = lru_cache(_CACHED_TOKENS)(self._decode_one)
        self._standalone = lru_cache(_CACHED_TOKENS)(self._standalone_text)
        self._special_tokens: SpecialTokenEscaper | None = None
        if self._templates and not allow_special_tokens_in_content:
            self._special_tokens = SpecialTokenEscaper(tokenizer, self.reasoning)
        self.prompts = SentencePrompts()
        self._special = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        texts = [*_marked_texts(self.tool_format, self.reasoning)]
        self._markers = {
            token: token_id
            for token, token_id in added.items()
            if token.strip() and len(token) > 1 and any(token in text for text in texts)
        }
        hidden = self._special - frozenset(self._markers.values())
        self._visible = self._visibility(self._special)
        self._visible_with_markers = self._visibility(hidden)
        self._known = self._visibility(frozenset())
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.token_bytes = TokenBytes(self._decode, tokenizer.id_to_token, self.vocab_size)

    @classmethod
    def load(cls, folder: Path, *, allow_special_tokens_in_content: bool = False) -> Self:
        """Reads a folder in Hugging Face's layout, and logs what its chat templates cannot render. Raises
        ``TokenizerLoadError``.
        """
        files = TokenizerFiles.read(folder)
        added = [token.content for token in files.tokenizer.get_added_tokens_decoder().values()]
        default, tool_use = (
            None
            if (source := files.templates.get(name)) is None
            else ChatTemplate(source.text, files.special_tokens, str(source.origin), added, files.response_template)
            for name in (DEFAULT, TOOL_USE)
        )
        loaded = cls(
            files.tokenizer, default, tool_use, allow_special_tokens_in_content=allow_special_tokens_in_content
        )
        if found := "; ".join(template_findings(default, tool_use or default)):
            log.warning("%s: %s", folder, found)
        loaded.prompts = SentencePrompts.read(folder / SENTENCE_CONFIG, read_object(folder / SENTENCE_CONFIG))
        return loaded

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """The tokens of ``text`` with those that the tokenizer adds, such as a beginning of sequence. Raises
        ``QuireError`` INVALID if there are many more than ``limit``; the caller checks the exact limit.
        """
        self._check_length(self._tokenizer, text, limit)
        return _encoding(self._tokenizer, text, special=True).ids

    def encode_plain(self, text: str, limit: int | None = None) -> list[int]:
        """The tokens of ``text`` alone, as a part of a longer text: the tokenizer adds none. Raises as
        ``encode`` does.
        """
        return self._encode_part(text, limit, PROMPT)

    def _encode_part(self, text: str, limit: int | None, what: str) -> list[int]:
        self._check_length(self._tokenizer, text, limit, what)
        return _encoding(self._tokenizer, text).ids

    def encode_text(self, text: str, limit: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
        """``encode``, or ``encode_plain`` without ``add_special_tokens``."""
        return self.encode(text, limit) if add_special_tokens else self.encode_plain(text, limit)

    def encode_pooled(
        self,
        texts: Sequence[Texts],
        limit: int,
        *,
        truncate: int | None = None,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[PooledPrompt]:
        """The prompts of texts, or of pairs of texts, that are pooled; see the function ``encode_pooled``. Raises as
        ``encode`` does, with the number of the text.
        """
        most = limit if truncate is None else MAX_TRUNCATED * limit  # one that is cut may be long, but not endless
        for part, number in parts_of(texts).items():
            try:
                self._check_length(self._tokenizer, part, most, INPUT)
            except QuireError as error:
                raise error.about(f"prompt[{number}]") from None
        return encode_pooled(
            self._tokenizer, texts, truncate, add_special_tokens=add_special_tokens, max_tokens=max_tokens
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._decode(token_ids)

    def name_of(self, token_id: int) -> str:
        """A token as the vocabulary has it; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    @cached_property
    def vocabulary_digest(self) -> bytes:
        """The function ``vocabulary_digest`` of this tokenizer. The first call reads the whole vocabulary."""
        return vocabulary_digest(self._tokenizer)

    def template_variables(self, *, with_tools: bool) -> frozenset[str]:
        """The names of the variables that the chat template uses, of conversations with or without tools."""
        template = self._tool_template if with_tools else self._template
        return frozenset() if template is None else template.variables

    def hidden(self, role: str, fields: frozenset[str], *, with_tools: bool) -> frozenset[str]:
        """Returns the fields of messages that the chat template does not show; see ``ChatTemplate.hidden``."""
        template = self._tool_template if with_tools else self._template
        return frozenset() if template is None else template.hidden(role, fields)

    @property
    def renders_slowly(self) -> bool:
        """Whether the chat template takes long even for short conversations; see ``ChatTemplate``."""
        return any(template.is_slow for template in self._templates)

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format of the model's tool calls; None if its chat template has no known one."""
        both = (self._tool_template, self._template)
        return next((template.tool_format for template in both if template and template.tool_format), None)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """How the model marks what it reasons before it answers; None if it does not reason."""
        return next((template.reasoning for template in self._templates if template.reasoning), None)

    @property
    def marker_tokens(self) -> Mapping[str, int]:
        """Those markers of tool calls and reasoning that are single tokens, and their ids."""
        return self._markers

    def starts_in_reasoning(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether a prompt ends in open reasoning."""
        return self.reasoning is not None and self.reasoning.is_opened(self._end_of(prompt_token_ids))

    def reasons_after(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether the model may reason after a prompt: it does not after reasoning that is over."""
        return self.reasoning is not None and not self.reasoning.is_closed(self._end_of(prompt_token_ids))

    def _end_of(self, prompt_token_ids: Sequence[int]) -> str:
        return self._decode(list(prompt_token_ids[-_LAST_TOKENS:]))

    def render_chat_text(
        self,
        messages: Conversation,
        tools: Conversation = (),
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] = {},
    ) -> str:
        """The prompt of a conversation as text, as ``ChatTemplate.render``. If messages contain special tokens,
        encoding it gives other tokens than ``encode_chat``. Raises ``QuireError`` INVALID when the model has no
        template, and when the template refuses the messages.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            without = " for conversations without tools" if self._tool_template else ""
            raise invalid("messages", f"This model has no chat template{without}; use the completions API.")
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt, options=options)

    def encode_chat(
        self,
        messages: Conversation,
        limit: int | None = None,
        *,
        tools: Conversation = (),
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] = {},
        earlier: Sequence[int] = (),
    ) -> list[int]:
        """The prompt of a conversation in tokens. Special tokens are those that the template writes; in messages they
        are text (see ``SpecialTokenEscaper``). Raises as ``render_chat_text`` and ``encode`` do.

        ``earlier`` are the tokens that the conversation had before, a prompt and its answer. Those that the prompt's
        text begins with are kept, and the rest is encoded. The tokenizer may choose other tokens for a text than the
        model wrote, and a prefix cache has the model's.
        """
        mark, special = "", self._special_tokens
        if special is not None:
            messages, tools, mark = special.marked(messages, tools)
        prompt = self.render_chat_text(messages, tools, add_generation_prompt=add_generation_prompt, options=options)
        if special is None or not (mark or earlier):
            return self._continue(earlier, prompt, None, partial(self._encode_part, limit=limit, what=MESSAGES))

        def encode(text: str) -> list[int]:
            self._check_length(special.tokenizer, text, limit, MESSAGES)
            return special.ids(_encoding(special.tokenizer, text).ids, special.count(text))

        return self._continue(earlier, special.named(prompt, mark), special, encode)

    def _continue(
        self,
        earlier: Sequence[int],
        text: str,
        special: SpecialTokenEscaper | None,
        encode: Callable[[str], list[int]],
    ) -> list[int]:
        """The tokens of a prompt's ``text``, in which special tokens have the aliases of ``special``, and which begins
        with as many of the ``earlier`` tokens as have its text. What follows is given to ``encode``.
        """
        kept, end = self._kept(earlier, text, special) if earlier else (0, 0)
        rest = encode(text[end:])
        # Some decoders write no space before a first token, so encoders write one too many there.
        before, behind = list(earlier[max(0, kept - _LAST_TOKENS) : kept]), rest[:_LAST_TOKENS]
        if kept and self._decode(before + behind) != self._decode(before) + self._decode(behind):
            return encode(text)
        return [*earlier[:kept], *rest]

    def _kept(self, earlier: Sequence[int], text: str, special: SpecialTokenEscaper | None) -> tuple[int, int]:
        """How many of the ``earlier`` tokens a text begins with, up to a whole character, and how many characters it
        has of them. An alias in the text is the special token alone, whatever the text of others is.
        """
        aliases: Mapping[int, str] = {} if special is None else special.aliases
        output = self.new_output_stream((), (), skip_special_tokens=False)
        kept = end = read = 0
        next_alias = len(text) if special is None else special.find_alias(text, 0)
        for number, token_id in enumerate(earlier, 1):
            alias = aliases.get(token_id)
            piece = output.push_token(token_id) if alias is None else output.finish()
            if read + len(piece) > next_alias or not text.startswith(piece, read):
                break
            read += len(piece)
            if alias is not None and special is not None:
                if not text.startswith(alias, read):
                    break
                read += len(alias)
                next_alias = special.find_alias(text, read)
                prompt = earlier[max(0, number - _LAST_TOKENS) : number]
                output = self.new_output_stream(prompt, (), skip_special_tokens=False)
            if output.is_whole:
                kept, end = number, read
        return kept, end

    def new_output_stream(
        self,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str],
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        keep_markers: bool = False,
        min_tokens: int = 0,
    ) -> OutputTextStream:
        """A stream for the text of one output that continues ``prompt_token_ids`` and ends with the first of ``stop``
        that is completed after ``min_tokens``, and is part of the text only with ``include_stop``. Special tokens have
        no text if ``skip_special_tokens``, except, with ``keep_markers``, the markers of tool calls and reasoning.
        """
        visible = self._visible_with_markers if keep_markers else self._visible
        if not skip_special_tokens:
            visible = self._known
        matcher = StopMatcher(stop, include=include_stop) if stop else None
        return OutputTextStream(
            self._decode, self._standalone, visible, prompt_token_ids, matcher, min_tokens=min_tokens
        )

    def _check_length(self, tokenizer: Tokenizer, text: str, limit: int | None, what: str = PROMPT) -> None:
        """Counts a long text's tokens part by part, and stops when there are too many: each token costs a hundred bytes
        and a microsecond, also in a text that can never fit. Cuts add tokens, hence the margins.
        """
        size = len(text) if limit is None else limit * _CHARS_PER_TOKEN
        if limit is None or len(text) <= size:
            return
        tokens, added, most = 0, 0, limit + limit // 4
        for start in range(0, len(text), size):
            tokens += len(_encoding(tokenizer, text[start : start + size]))
            added += _TOKENS_PER_CUT
            if tokens > most + added:
                raise far_too_long(limit, tokens - added, what)

    def _decode(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self._decode_cached(token_ids[0])
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _decode_one(self, token_id: int) -> str:
        return self._tokenizer.decode((token_id,), skip_special_tokens=False)

    def _standalone_text(self, token_id: int) -> str | None:
        """See ``detokenizer.StandaloneText``. Byte-level decoders join the tokens' bytes: if those of one token are
        whole characters, so is its text. Other decoders may depend on a token's neighbours, or on being the first.
        """
        text = self._decode_cached(token_id) if isinstance(self._tokenizer.decoder, decoders.ByteLevel) else REPLACEMENT
        return None if REPLACEMENT in text else text

    def _visibility(self, hidden: frozenset[int]) -> Callable[[int], bool]:
        """A cached predicate: whether a token has text if those in ``hidden`` have none."""
        return lru_cache(_CACHED_TOKENS)(partial(self._is_visible, hidden))

    def _is_visible(self, hidden: frozenset[int], token_id: int) -> bool:
        """False also for ids that the tokenizer does not have: a model's vocabulary may be larger."""
        return token_id not in hidden and self._tokenizer.id_to_token(token_id) is not None


def _encoding(tokenizer: Tokenizer, text: str, *, special: bool = False) -> Encoding:
    """``Tokenizer.encode`` without offsets, but releasing the GIL: ``encode`` keeps it, so that even on another thread
    a long text would block every stream of the process.
    """
    try:
        return tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
    except TypeError:  # a lone surrogate, which JSON inside of JSON can contain
        raise invalid("prompt", "The text holds half of a surrogate pair, which is not a character.") from None


def _marked_texts(tool_format: ToolFormat | None, reasoning: ReasoningFormat | None) -> Iterator[str]:
    """What a model writes around calls and reasoning."""
    if tool_format is not None:
        yield from tool_format.texts
    if reasoning is not None:
        yield from MARKS if reasoning.is_harmony else (reasoning.begin, reasoning.end)


_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of single tokens. Called with a token id; returns None for an id that the tokenizer does not have.

    A token may be a part of a character: that has no text, but always the same bytes. The bytes of a text's tokens
    together are the text in UTF-8; a special token's are its name's. ``decode`` is the tokenizer's, special tokens
    included, and ``written`` gives a token as the vocabulary has it.
    """

    def __init__(self, decode: Decode, written: Callable[[int], str | None], vocab_size: int) -> None:
        self._decode = decode
        self._written = written
        self._letter = _find_letter(decode, written, vocab_size)
        self._find = lru_cache(_CACHED_TOKENS)(self._look_up)

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
        """The token's text after a letter: decoders of the sentencepiece kind drop a space at the beginning of
        a text.
        """
        before = "" if self._letter is None else self._decode([self._letter])
        together = self._decode([token_id] if self._letter is None else [self._letter, token_id])
        return together[len(before) :] if together.startswith(before) else self._decode([token_id])


def _find_letter(decode: Decode, written: Callable[[int], str | None], vocab_size: int) -> int | None:
    """A token that is one ASCII letter and not a byte token, as consecutive byte tokens are decoded together."""
    for token_id in range(vocab_size):
        name = written(token_id) or ""
        if len(name) == 1 and name.isascii() and name.isalpha() and decode([token_id]) == name:
            return token_id
    return None


def _bytes_written(written: str) -> bytes | None:
    """The bytes of a token that is a part of a character: one of sentencepiece's 256 byte tokens ``<0x..>``, or a token
    of a byte-level vocabulary, which has one letter for each byte. Returns None for anything else.
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
MAX_WORDS = MAX_BAD_WORDS // 2  # each has two forms
TokenIds = tuple[int, ...]


def encode_bad_words(words: Sequence[str], tokenizer: ModelTokenizer) -> tuple[TokenIds, ...]:
    """``SamplingParams.bad_words`` that ban each of ``words`` as the tokenizer encodes it, both at the beginning of a
    text and after a space, in order. Raises ``QuireError`` INVALID.

    A word can still be written with other tokens than those that the tokenizer chooses for it.
    """
    if len(words) > MAX_WORDS:
        raise invalid("bad_words", f"bad_words holds {len(words)} texts but at most {MAX_WORDS} are allowed.")
    banned: list[TokenIds] = []
    for form in _forms(words, tokenizer):
        # A form that ends with a banned one cannot be completed anyway.
        if not any(form[-len(end) :] == end for end in banned):
            banned.append(form)
    return tuple(banned)


def _forms(words: Sequence[str], tokenizer: ModelTokenizer) -> Iterator[TokenIds]:
    for word in words:
        bare = word.lstrip(" ")
        if not 1 <= len(bare) <= MAX_BAD_WORD_CHARACTERS:
            raise invalid("bad_words", f"Each of bad_words must have 1 to {MAX_BAD_WORD_CHARACTERS} characters.")
        for form in (bare, f" {bare}"):
            yield tuple(tokenizer.encode_plain(form))
