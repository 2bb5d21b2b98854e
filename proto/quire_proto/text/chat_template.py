"""A model's chat template: messages in, prompt text out; and the special tokens in conversations: those of the template
are control tokens, those in messages and tools are text.

Templates come from model folders only. They are programs, so they run in a sandbox (``quire_proto.text.sandbox``), with
the helpers that Hugging Face templates expect.

A tokenizer cannot distinguish the template's special tokens from others in the rendered prompt. So before rendering, a
mark, a character that no text contains, is inserted into every special token in the messages; special tokens in the
rendered prompt are then the template's. They are replaced by random aliases, which a second tokenizer has in their
place. It shares the first one's model, encodes special tokens as text, and splits the prompt at the aliases as the
first one does at special tokens: everything else has the same tokens.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from secrets import token_hex
from time import thread_time
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace
from tokenizers import AddedToken, Tokenizer

from quire_proto.errors import QuireError, TokenizerLoadError, invalid
from quire_proto.text.message_form import MessageForm, find_form, shown_fields
from quire_proto.text.reasoning import THINK, ReasoningFormat, detect_reasoning
from quire_proto.text.response_template import described_format, described_marks, described_reasoning
from quire_proto.text.sandbox import Sandbox, SandboxLimitError, bounded, checked, compared, size_of
from quire_proto.text.tool_formats import ToolFormat, detect_tool_format

_RENDER_ERRORS = (
    TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError, MemoryError,
)  # fmt: skip

# Limits of one rendering, of processor time and of characters: far more than published templates need.
_SECONDS, _SECONDS_PER_MESSAGE, _SECONDS_PER_CHARACTER = 0.5, 0.002, 1e-6
_SLOW = 0.02  # seconds; a longer rendering of a short conversation delays other streams
_CHARACTERS, _TIMES = 2**20, 16
_MAX_SOURCE = 2**18  # characters of a template, ten times what published ones have: each takes time to compile
_DATE_CHARACTERS = 128
_MAX_SIZE = 2**26  # characters at which counting a conversation's size stops


class ChatTemplate:
    """A compiled template with the special tokens that it may name (``bos_token`` and so on).

    ``variables`` are the names of the variables that it uses. ``tool_format`` is the format of its tool calls, None if
    it has no tools or an unknown format; what the template leaves open, the tokenizer's ``added_tokens`` and its
    ``response_template`` may say. ``reasoning`` is how its model marks what it reasons before it answers, None if it
    does not, and ``is_slow`` says that even short conversations took long.

    Which form of messages the template takes is tried when it is made (``quire_proto.text.message_form``).

    Raises ``TokenizerLoadError`` when ``source`` is not a template; ``origin`` names the file in that message.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str,
        added_tokens: Iterable[str] = (),
        response_template: Any = None,
    ) -> None:
        if len(source) > _MAX_SOURCE:
            most = f"{len(source)} characters, more than the {_MAX_SOURCE} that are read"
            raise TokenizerLoadError(f"{origin}: the chat template has {most}: use a shorter one.")
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(environment.counted(source))
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except (TemplateSyntaxError, RecursionError) as error:
            raise TokenizerLoadError(f"{origin}: the chat template is not valid: {str(error).rstrip('.')}.") from error
        self.is_slow = False
        self._hidden: dict[tuple[str, frozenset[str]], frozenset[str]] = {}
        self._form = MessageForm()
        with suppress(QuireError):
            self.render([{"role": "user", "content": "Hello"}])
        self._form, written = find_form(source, lambda form: partial(self._render, form))
        self.reasoning = detect_reasoning(source, written) or described_reasoning(response_template)
        self.tool_format: ToolFormat | None = None
        if "tools" in self.variables:
            more = "\n".join([written, described_marks(response_template), *added_tokens])
            self.tool_format = detect_tool_format(source, written) or detect_tool_format(source, more)
            self.tool_format = self.tool_format or described_format(response_template)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] = {},
    ) -> str:
        """The prompt that asks the assistant to answer ``messages``, for which it may use ``tools``, in the shape of
        the OpenAI API with arguments as objects. ``options`` are further variables, also in place of special tokens.
        Raises ``QuireError`` INVALID with the template's own words where it refuses them, and where it takes too much
        time or memory for them.
        """
        return self._render(self._form, messages, tools, add_generation_prompt=add_generation_prompt, options=options)

    def hidden(self, role: str, fields: frozenset[str]) -> frozenset[str]:
        """Returns those ``fields`` of a message of this role, which has just them, that the template never shows. What
        it refuses it does not hide.
        """
        key = role, fields
        if key not in self._hidden:
            shown = shown_fields(self.render, role, fields) if fields else None
            self._hidden[key] = frozenset() if shown is None else fields - shown
        return self._hidden[key]

    def _render(
        self,
        form: MessageForm,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] = {},
    ) -> str:
        start = thread_time()
        size, number = size_of(tools, _MAX_SIZE) + sum(map(_size, messages)), len(messages) + len(tools)
        seconds = _SECONDS + _SECONDS_PER_MESSAGE * number + _SECONDS_PER_CHARACTER * size
        try:
            with bounded(seconds, _CHARACTERS + _TIMES * size):
                variables = {"documents": None, **self._special_tokens, **options}
                variables["messages"] = [form.adapted(message) for message in messages]
                variables["tools"] = [dict(tool) for tool in tools] or None
                return self._template.render(variables | {"add_generation_prompt": add_generation_prompt})
        except SandboxLimitError as error:
            raise invalid("messages", "The model's chat template takes too much time or memory.") from error
        except _RefusalError as refusal:
            raise invalid("messages", f"The model's chat template refuses these messages: {refusal}") from refusal
        except _RENDER_ERRORS as error:
            raise _unrenderable() from error
        finally:
            expected = _SLOW + _SECONDS_PER_MESSAGE * number + _SECONDS_PER_CHARACTER * size
            self.is_slow = self.is_slow or thread_time() - start > expected


def _size(message: Mapping[str, Any]) -> int:
    """The approximate number of characters of a message."""
    return sum(len(each) if isinstance(each, str) else size_of(each, _MAX_SIZE) for each in message.values())


def _unrenderable() -> QuireError:
    return invalid("messages", "The model's chat template cannot render these messages.")


class _RefusalError(TemplateError):
    """Raised by a template through ``raise_exception``."""


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; when serving it is only its contents."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """``namespace()`` without underscore names, which are a way out of sandboxes."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        given = dict(*rest, **kwargs)
        for name in given:
            _refuse_private(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # its contents could be deeply nested


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError("a namespace takes no names that begin with an underscore")


def _plain_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*(each if isinstance(each, Mapping) else compared(each) for each in args), **kwargs)


def _from_keys(keys: Iterable[Any], value: object = None) -> dict[Any, Any]:
    return dict.fromkeys(compared(keys), value)


_plain_dict.fromkeys = _from_keys  # type: ignore[attr-defined]  # as templates write it


def _raise_exception(message: object) -> NoReturn:
    raise _RefusalError(str(checked(message)))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _DATE_CHARACTERS:  # it asks the C library for ever more memory, and holds the interpreter
        raise SandboxLimitError("the pattern of a date is too long")
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_GLOBALS: dict[str, Callable[..., Any]] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
    "namespace": _PlainNamespace,
    "dict": _plain_dict,
}


def _environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(_GLOBALS)
    environment.limit_filters()
    return environment


Conversation = Sequence[Mapping[str, Any]]

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode reserves them for internal use
_RARE = "\U0010fffe\ue000"  # encoded as the unknown token by tokenizers without byte fallback
_WORDS = frozenset({"role", "type"})
_SHORT = 32  # texts of at most so many characters are cached: names of fields, roles and tools are frequent
_CACHED_TEXTS = 4096


class SpecialTokenEscaper:
    """Escapes special tokens in the conversations of one tokenizer, but for the marks of reasoning in an assistant's
    messages, where templates look for them. Raises ``TokenizerLoadError`` if they cannot be distinguished from text.
    """

    def __init__(self, tokenizer: Tokenizer, reasoning: ReasoningFormat | None = None) -> None:
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        special = {token.content: token_id for token_id, token in added if token.special and len(token.content) > 1}
        marks = THINK if reasoning is None or reasoning.is_harmony else reasoning
        self._kept = frozenset(name for name in special if name in marks.begin or name in marks.end)
        self._by_length = sorted(special, key=len, reverse=True)
        self._longest = len(self._by_length[0]) if special else 0
        self._beginnings = {name[:end] for name in special for end in range(1, len(name))}
        self._ends = {name[begin:] for name in special for begin in range(1, len(name))}
        self._all = "\0".join(special)
        self._by_head: dict[str, list[str]] = defaultdict(list)
        for name in self._by_length:
            self._by_head[name[:2]].append(name)
        self._touches_short = lru_cache(_CACHED_TEXTS)(self._looks_touched)
        # Normalisation may turn other texts into these.
        self._always = any(token.normalized for _, token in added if token.special)
        self._words = {
            token.content: re.compile(rf"(?<!\w){re.escape(token.content)}(?!\w)")
            for _, token in added
            if token.single_word
        }
        self.tokenizer = _sharing_the_model(tokenizer)
        self._secret = token_hex(16)
        aliases = {name: f"<{self._secret}:{number}>" for number, name in enumerate(self._by_length)}
        self._ids = _add_tokens(self.tokenizer, dict(added), aliases)
        # A special token that the tokenizer finds only at the beginning of a text is text in a prompt.
        self._aliases = {name: alias for name, alias in aliases.items() if self._sees(alias)}
        self._aliases_by_id = {special[name]: alias for name, alias in self._aliases.items()}
        self._named = frozenset(_id_of(self.tokenizer, alias) for alias in self._aliases.values())
        known = {_id_of(self.tokenizer, name) for name in special}
        self._forbidden = frozenset(known).difference(self._encoded(_RARE))

    def marked(self, messages: Conversation, tools: Conversation) -> tuple[Conversation, Conversation, str]:
        """Messages and tools with a mark in every special token in their texts, and the mark; unchanged with an empty
        mark if there is none, so that the prompt can be encoded as it is. Raises ``QuireError`` INVALID.
        """
        try:
            texts = list(_texts((messages, tools)))
            contents = [text for message in messages for text in _contents(message)]
            if not self._always and not any(map(self._touches, texts)) and not any(map(self._is_inside, contents)):
                return messages, tools, ""
            mark = _unused(texts)
            marked = [self._marked_message(message, mark) for message in messages]
            return marked, self._marked(tools, mark), mark
        except RecursionError:
            raise invalid("messages", "The messages are nested too deeply.") from None

    @property
    def aliases(self) -> Mapping[int, str]:
        """The aliases of special tokens, by their ids."""
        return self._aliases_by_id

    def count(self, text: str) -> int:
        """The number of aliases in a text."""
        return text.count(self._secret)

    def find_alias(self, text: str, start: int) -> int:
        """Where the next alias in a text begins; its end if there is none."""
        found = text.find(f"<{self._secret}", start)
        return len(text) if found < 0 else found

    def named(self, prompt: str, mark: str) -> str:
        """A rendered prompt for ``tokenizer``: aliases instead of the template's special tokens, and no marks. An empty
        ``mark`` is none.
        """
        if mark:
            prompt = prompt.replace(_escaped(mark), mark)  # if the template wrote JSON in ASCII
        for name in sorted(self._present(prompt), key=len, reverse=True):
            if name in self._words:
                prompt = self._words[name].sub(self._aliases[name], prompt)
            elif name in self._aliases:
                prompt = prompt.replace(name, self._aliases[name])
        return prompt.replace(mark, "") if mark else prompt

    def ids(self, token_ids: Sequence[int], names: int) -> list[int]:
        """The ids of ``tokenizer`` for a prompt with ``names`` aliases, as the first tokenizer's ids. Raises
        ``QuireError`` INVALID if its model encoded text as a special token, or an alias as text.
        """
        known = self._ids
        as_text = not self._forbidden.isdisjoint(token_ids)
        if as_text or sum(token_id in self._named for token_id in token_ids) != names:
            raise invalid("messages", "The messages hold a special token of this model that cannot be encoded as text.")
        return [known.get(token_id, token_id) for token_id in token_ids]

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _sees(self, alias: str) -> bool:
        return _id_of(self.tokenizer, alias) in self._encoded(f"a {alias} a")

    def _marked_message(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        kept = self._kept if message.get("role") == "assistant" else frozenset[str]()
        marked: dict[str, Any] = self._marked(message, mark, kept)
        for key in ("content", "reasoning_content"):
            if isinstance(text := marked.get(key), str) and self._is_inside(text):
                core = text.rstrip()
                marked[key] = core + mark + text[len(core) :]
        return marked

    def _marked(self, value: Any, mark: str, kept: frozenset[str] = frozenset()) -> Any:
        if isinstance(value, str):
            return self._bounded(self._broken(value, mark, kept), mark)
        if isinstance(value, Mapping):
            return {self._broken(key, mark): self._field(key, each, mark, kept) for key, each in value.items()}
        return [self._marked(each, mark, kept) for each in value] if isinstance(value, (list, tuple)) else value

    def _field(self, name: str, value: Any, mark: str, kept: frozenset[str]) -> Any:
        """Roles and types are only escaped inside, as templates compare them."""
        is_word = name in _WORDS and isinstance(value, str)
        return self._broken(value, mark) if is_word else self._marked(value, mark, kept)

    def _broken(self, text: str, mark: str, kept: frozenset[str] = frozenset()) -> str:
        """The text with a mark in each special token that it contains."""
        for name in self._present(text):
            while name not in kept and name in text:  # again where two overlap
                text = text.replace(name, name[0] + mark + name[1:])
        return text

    def _bounded(self, text: str, mark: str) -> str:
        """The text with a mark at each end that could form a special token with adjacent text, inside of the white
        space around it, which templates trim.
        """
        core = text.strip()
        at = text.find(core)
        before = mark if self._continues(core) else ""
        after = mark if self._begins(core) else ""
        return text[:at] + before + core + after + text[at + len(core) :]

    def _touches(self, text: str) -> bool:
        """Whether a text contains a special token, begins with the end of one, or ends with the beginning of one."""
        if len(text) <= _SHORT:
            return self._touches_short(text)
        return self._looks_touched(text)

    def _looks_touched(self, text: str) -> bool:
        core = text.strip()
        return self._continues(core) or self._begins(core) or next(self._present(text), None) is not None

    def _continues(self, text: str) -> bool:
        return any(text[:end] in self._ends for end in range(1, min(self._longest, len(text) + 1)))

    def _begins(self, text: str) -> bool:
        return any(text[-end:] in self._beginnings for end in range(1, min(self._longest, len(text) + 1)))

    def _is_inside(self, text: str) -> bool:
        """Whether a template could make a special token of the text by writing something before and after it."""
        core = text.strip()
        return 0 < len(core) < self._longest and core in self._all

    def _present(self, text: str) -> Iterator[str]:
        """The special tokens in a text."""
        for head, names in self._by_head.items():
            if head in text:
                yield from (name for name in names if name in text)


def _sharing_the_model(tokenizer: Tokenizer) -> Tokenizer:
    """Another tokenizer that splits texts in the same way, but has no added tokens."""
    other = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        if getattr(tokenizer, part) is not None:
            setattr(other, part, getattr(tokenizer, part))
    other.encode_special_tokens = True
    return other


def _add_tokens(tokenizer: Tokenizer, added: Mapping[int, AddedToken], aliases: Mapping[str, str]) -> dict[int, int]:
    """Adds the tokens, and the aliases with the properties of their tokens. Returns the ids that differ from the
    original's.
    """
    ids: dict[int, int] = {}
    for token_id, token in added.items():
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        ids[_id_of(tokenizer, token.content)] = token_id
    for token_id, token in added.items():
        if token.content in aliases:
            alias = _like(token, aliases[token.content])
            tokenizer.add_tokens([alias])
            number = _id_of(tokenizer, alias.content)
            if tokenizer.model.id_to_token(number) is not None:
                raise TokenizerLoadError(
                    "The tokenizer's vocabulary has gaps where special tokens cannot be told from text."
                )
            ids[number] = token_id
    return {here: there for here, there in ids.items() if here != there}


def _id_of(tokenizer: Tokenizer, content: str) -> int:
    token_id = tokenizer.token_to_id(content)
    assert token_id is not None
    return token_id


def _like(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)


def _contents(message: Mapping[str, Any]) -> Iterator[str]:
    return (text for key in ("content", "reasoning_content") if isinstance(text := message.get(key), str))


def _unused(texts: Sequence[str]) -> str:
    """A character that no text contains, not even escaped as in JSON."""
    for mark in _NONCHARACTERS:
        if not any(mark in text or _escaped(mark) in text for text in texts):
            return mark
    raise invalid("messages", "The messages hold special tokens and every noncharacter from U+FDD0 to U+FDEF.")


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"
