"""The parsers of tool calls: split a model's output into content and calls while it streams.

``ToolParser`` reads the formats of ``tool_formats``: content up to the mark of a call, then calls in the notation of
the format, and what stands between them. ``new_tool_parser`` makes the parser of a format.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping

from quire_proto.text.call_reader import (
    MAX_CALL_CHARS,
    MAX_HEADER_CHARS,
    WORD,
    CallReader,
    NotACallError,
    UndecidedError,
    begins,
)
from quire_proto.text.harmony import HarmonyParser
from quire_proto.text.stream_scanner import (
    MAX_MARKER_SPACE,
    PYTHON_STRUCTURE,
    SPACE,
    BracketScanner,
    Content,
    MarkerSearch,
    Steps,
    StreamParser,
    TextBuffer,
    ToolCallArguments,
    ToolCallStart,
    TrailingSpace,
)
from quire_proto.text.tool_arguments import (
    ARGUMENTS_KEYS,
    NAME_KEYS,
    OTHERS,
    QUOTED,
    STRING,
    ParameterTypes,
    gemma_arguments,
    parse_call,
    python_arguments,
    to_json,
)
from quire_proto.text.tool_formats import (
    HARMONY,
    PLACES,
    GemmaCall,
    JsonCall,
    NamedCall,
    PythonCall,
    TaggedCall,
    ToolFormat,
)

_OTHER_KEYS = ("type", "id", "tool_call_id")  # with a text, or a number, as their value
_KEYS = (*NAME_KEYS, *ARGUMENTS_KEYS, *_OTHER_KEYS, "function")
_NAME = re.compile(r"[\w.-]*")
_PREFIX, _COUNT = "functions.", ":{number}"  # around a tool's name; a prefix may be missing, or the count
_KEY = re.compile(r'[^<>"\n]*')
_TEXT = (STRING,)
_TEXT_TYPES = frozenset({STRING, QUOTED})
_KINDS = {"true": _TEXT, "false": ("array", "boolean", "integer", "null", "number", "object")}


class ToolParser(CallReader):
    """Splits one output into content and calls of the tools in ``names``, the parameters of which have these
    ``types``. ``guided``: a grammar writes the calls.

    A call is emitted when its arguments begin, and these as they arrive: JSON as the model wrote it, and what is
    between tags as JSON by the types in the tool's schema. Calls in the notations of Python and Gemma, and those in
    JSON that have their arguments before their name, are emitted when they are complete; the latter with ``guided``
    never. Text that turns out to be no call, or a call of another tool, is content, marks included. Space between
    content and a call belongs to neither; more than ``MAX_MARKER_SPACE`` characters of it are content.

    At most one gap and ``MAX_CALL_CHARS`` characters are held back. Text is read once, and once more if it was no call.
    Inside of a body that was read as a whole and rejected, only calls that can be emitted while they stream are looked
    for, so that nested beginnings do not make it quadratic.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        types: Mapping[str, ParameterTypes] = {},
        *,
        guided: bool = False,
    ) -> None:
        super().__init__()
        self._format = tool_format
        self._names = frozenset(names)
        self._types = types
        self._guided = guided
        self._marks = tool_format.begin.split()
        self._begins = (*self._marks[:1], *([] if guided else _marks_of_heads(tool_format)))
        self._read_of_head = ""  # the mark of a call that was read in place of that of a section
        self._has_content = False
        self._last_is_call = False  # the last emitted part belongs to a call
        self._gap = TrailingSpace()
        self._opening = ""  # the space and the mark before the possible call

    def _parse(self) -> Steps[None]:
        if self._format.preface and not (yield from self._accept(self._format.preface)) and self._is_cut_here:
            self._source.take_rest()
        if self._format.bare:
            yield from self._read_bare()
        search = MarkerSearch(*self._begins) if self._begins else None
        while (yield from self._more()):
            if search is None:
                self._emit_content(self._gap.push(self._source.take(len(self._source.text))))
                continue
            content, found = search.read(self._source)
            self._emit_content(self._gap.push(content))
            if found:
                of_head = "" if search.found == self._marks[0] else search.found
                yield from self._read_section(self._gap.take() + search.found, of_head)
        gap, begun = self._gap.take(), "" if search is None else search.take()
        content = "" if self._is_cut and self._is_mark(gap, begun) else gap + begun
        if not self._last_is_call or content.strip(SPACE):  # else it is the space after the last call
            self._emit_content(content)

    def _is_mark(self, gap: str, begun: str) -> bool:
        """Whether ``begun``, with which the output was cut off, is the beginning of a mark, and not of a word."""
        return bool(begun) and (not begun.isalnum() or "\n" in gap or not self._has_content)

    def _emit_content(self, text: str) -> None:
        if text:
            self._has_content = True
            self._parts.append(Content(text))
            self._last_is_call = False

    # What calls are written in

    def _read_bare(self) -> Steps[None]:
        """Reads calls at the beginning of the output, where their mark may be missing."""
        log = self._begin(MAX_MARKER_SPACE)
        begins = False
        try:
            yield from self._skip_space()
            if self._marks and (yield from self._accept(self._marks[0])):
                begins = True
            elif (yield from self._more()):
                begins = self._begins_bare(self._source.text[self._source.at])
        except NotACallError:
            pass
        opening, self._source.log = log.take(), None
        if begins:
            yield from self._read_section(opening)
        else:
            self._source.put_back(opening)

    def _begins_bare(self, character: str) -> bool:
        if isinstance(self._format.call, NamedCall):
            return not character.isspace()
        return character == ("[" if self._format.listed else "{")

    def _read_section(self, opening: str, of_head: str = "") -> Steps[None]:
        """Reads the calls after ``opening``, which is content if there is none. ``of_head`` was read of the first call:
        the mark of the section is missing.
        """
        self._opening, self._read_of_head = opening, of_head
        self._begin(MAX_HEADER_CHARS)
        try:
            for mark in () if of_head else self._marks[1:]:
                yield from self._expect(mark)
            if self._format.listed:
                yield from self._skip_space()
                yield from self._accept("[")
            yield from self._read_call()
            while (yield from self._read_separator()):
                yield from self._read_call()
        except NotACallError:
            is_dropped = self._is_cut_here and (not self._opening or bool(self._opening.strip(SPACE)))
            if not is_dropped:
                self._emit_content(self._opening)
            if is_dropped:
                self._source.take_rest()
            elif self._source.log is not None:
                self._source.put_back(self._source.log.take())
        self._source.log = None

    def _read_separator(self) -> Steps[bool]:
        """Reads what stands after a call. Returns whether another call of the section may be next, false at the end of
        the section. Raises ``NotACallError`` if it is neither.
        """
        self._begin(MAX_MARKER_SPACE)
        yield from self._skip_space()
        if self._format.listed and (yield from self._accept("]")):
            self._begin(MAX_MARKER_SPACE)
            if self._format.end:
                yield from self._read_marks(self._format.end)
            return False
        if self._format.end and (yield from self._accept(self._format.end.split()[0])):
            return False
        for separator in ",;":
            if (yield from self._accept(separator)):
                yield from self._skip_space()
        if self._format.bare and self._marks and (yield from self._accept(self._marks[0])):
            yield from self._skip_space()
        if self._format.between is None:
            raise NotACallError
        return (yield from self._more())

    # Calls

    def _read_call(self) -> Steps[None]:
        """Reads one call. Raises ``NotACallError``, if it has not been emitted, or if what follows is no part of it."""
        self._start = self._source.position
        self._limit = self._start + MAX_HEADER_CHARS
        call = self._format.call
        if isinstance(call, JsonCall):
            yield from self._read_json_call()
        elif isinstance(call, NamedCall):
            yield from self._read_named_call(call)
        elif isinstance(call, TaggedCall):
            yield from self._read_tagged_call(call)
        elif isinstance(call, PythonCall):
            yield from self._read_python_call()
        else:
            yield from self._read_gemma_call(call)

    def _read_head(self, head: str, skipped: str = "") -> Steps[str]:
        """Reads the name of a tool, and the marks around it."""
        before, after = head.split("{name}")
        yield from self._read_marks(before.removesuffix(_PREFIX).removeprefix(self._read_of_head))
        self._read_of_head = ""
        yield from self._skip_space()
        word = yield from self._read_word(_NAME)
        name = word.removeprefix(_PREFIX)
        if name not in self._names:
            known = [*self._names, *(_PREFIX + each for each in self._names)]
            self._met_end = self._met_end and begins(word, known, ended=False)
            raise NotACallError
        if after.startswith(_COUNT):
            after = after.removeprefix(_COUNT)
            if (yield from self._accept(_COUNT[0])):
                yield from self._read_word(WORD)
        if not skipped:
            yield from self._read_marks(after)
        else:
            if (yield from self._accept(skipped)):
                yield from self._read_word(WORD)
            yield from self._accept(after)
        return name

    def _commit(self, name: str) -> None:
        """Emits the beginning of a call: what was read up to here is no content."""
        self._parts.append(ToolCallStart(name))
        self._last_is_call, self._opening, self._source.log = True, "", None

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ToolCallArguments(text))

    def _emit_whole(self, name: str, read: Callable[[], str]) -> None:
        """Emits a call with the arguments that ``read`` returns. Raises ``NotACallError`` if it raises ``ValueError``,
        or returns nothing.
        """
        try:
            arguments = read()
        except ValueError:
            arguments = ""
        if not arguments:
            self._rejected_until = self._source.position
            raise NotACallError
        self._commit(name)
        self._emit_arguments(arguments)

    def _read_named_call(self, call: NamedCall) -> Steps[None]:
        name = yield from self._read_head(call.head, call.skipped)
        yield from self._skip_space()
        if not (yield from self._peek("{")):
            raise NotACallError
        self._commit(name)
        yield from self._stream_object()
        if call.tail:
            self._begin(MAX_MARKER_SPACE)
            yield from self._read_marks(call.tail)

    def _read_python_call(self) -> Steps[None]:
        name = yield from self._read_head("{name}(")
        body = yield from self._read_whole(BracketScanner(PYTHON_STRUCTURE, depth=1))
        self._emit_whole(name, lambda: python_arguments(body.removesuffix(")")) if body.endswith(")") else "")

    def _read_gemma_call(self, call: GemmaCall) -> Steps[None]:
        name = yield from self._read_head("call:{name}")
        body, found = yield from self._read_until(call.tail)
        while found and body.count(call.quote) % 2:  # the mark is in a string
            more, found = yield from self._read_until(call.tail)
            body += call.tail + more
        self._emit_whole(name, lambda: gemma_arguments(body.strip(), call.quote))

    # JSON

    def _read_json_call(self) -> Steps[None]:
        try:
            name, depth = yield from self._read_json_header()
        except UndecidedError:
            yield from self._read_whole_json()
            return
        self._commit(name)
        yield from self._stream_object()
        self._begin(MAX_MARKER_SPACE)
        yield from self._close_objects(depth)

    def _read_json_header(self) -> Steps[tuple[str, int]]:
        """Reads ``{"name": "get", "arguments": ``, possibly with other keys before them, or inside of an object
        ``function``. Returns the name and the number of objects around the arguments, whose bracket is next. Raises
        ``UndecidedError`` where only the whole object decides, and otherwise ``NotACallError`` as soon as it is none.
        """
        depth, name, missing = 1, "", NotACallError
        yield from self._expect("{")
        while True:
            key = yield from self._read_string(_KEYS, missing)
            missing = UndecidedError
            yield from self._expect(":", missing)
            if key in NAME_KEYS:
                name = yield from self._read_string(self._names, NotACallError)
            elif key == "function":
                yield from self._expect("{", missing)
                depth += 1
                continue
            elif key in _OTHER_KEYS:
                yield from self._skip_value()
            else:
                break
            yield from self._expect(",", missing)
        yield from self._skip_space()
        if not name or not (yield from self._peek("{")):
            raise UndecidedError
        return name, depth

    def _stream_object(self) -> Steps[None]:
        """Emits an object as it arrives."""
        source, scanner = self._source, BracketScanner()
        while (yield from self._more()):
            end = scanner.find(source.text, source.at, len(source.text))
            self._emit_arguments(source.take(len(source.text) if end is None else end))
            if end is not None:
                return

    def _close_objects(self, depth: int) -> Steps[None]:
        """Reads the rest of the objects around the arguments. Raises ``NotACallError`` if it is too long."""
        for _ in range(depth):
            yield from self._skip_space()
            if (yield from self._peek(",")):
                yield from self._skip_to(BracketScanner(depth=1), self._start + MAX_HEADER_CHARS)
            elif not (yield from self._accept("}")):
                return

    def _read_whole_json(self) -> Steps[None]:
        """Reads a call whose keys are in an order that only the whole object makes sense of."""
        log, length = self._source.log, self._source.position - self._start
        if self._guided or log is None:
            raise NotACallError
        self._source.put_back(log.last(length))
        body = yield from self._read_whole(BracketScanner())
        call = parse_call(body, self._names)
        self._emit_whole("" if call is None else call[0], lambda: "" if call is None else call[1])

    # Tags

    def _read_tagged_call(self, call: TaggedCall) -> Steps[None]:
        """Reads a call whose arguments are between tags. It is one as soon as the first of them begins, or where it
        ends without any.
        """
        name = yield from self._read_head(call.head)
        types, before = self._types.get(name, {}), "{"
        others = types.get(OTHERS, _TEXT)
        try:
            while (found := (yield from self._read_key(call))) is not None:
                key, kind = found
                if before == "{":
                    self._commit(name)
                self._emit_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
                if not (yield from self._read_value(call, _KINDS.get(kind) or types.get(key, others))):
                    return  # the output ended
                before = ", "
                self._begin(MAX_HEADER_CHARS)
            yield from self._read_marks(call.tail)
        except NotACallError:
            if before == "{":
                raise
            if self._is_cut_off(call):
                return
            self._emit_arguments("}")
            raise
        if before == "{":
            self._commit(name)
        self._emit_arguments("{}" if before == "{" else "}")

    def _read_key(self, call: TaggedCall) -> Steps[tuple[str, str] | None]:
        """Reads the tag of an argument. Returns the argument's name, and the word that says whether it is a string;
        None if no argument is next.
        """
        first, *others = PLACES.split(call.key)[0].split()
        between, _, after = call.key.partition("{key}")[2].partition("{kind}")
        yield from self._skip_space()
        if not (yield from self._accept(first)):
            return None
        for mark in others:
            yield from self._expect(mark)
        key = yield from self._read_word(_KEY)
        yield from self._read_marks(between)
        kind = (yield from self._read_word(WORD)) if after else ""
        yield from self._read_marks(after)
        return key, kind

    def _is_cut_off(self, call: TaggedCall) -> bool:
        """Whether the output ended inside of a tag, which is dropped."""
        rest = self._source.take_rest()
        ended = self._ended and any(tag.startswith(rest.strip(SPACE)) for tag in (call.tail, call.key))
        self._source.put_back("" if ended or self._is_cut_here else rest)
        return ended or self._is_cut_here

    def _read_value(self, call: TaggedCall, types: Collection[str]) -> Steps[bool]:
        """Emits the value of an argument. Returns whether it ended before the output."""
        trim = call.key.endswith("\n")
        if STRING in types and not (set(types) - _TEXT_TYPES or (self._guided and QUOTED in types)):
            return (yield from self._stream_text(call, "", trim=trim))
        source, search, body = self._source, MarkerSearch(call.value_marks[0]), TextBuffer()
        begin = source.position
        while (yield from self._more()):
            stop = min(len(source.text), source.at + begin + MAX_CALL_CHARS - source.position)
            text, found = search.read(source, stop)
            body.push(text)
            if found and (inside := (yield from self._not_the_end(call))):
                body.push(inside)
            elif found:
                value = body.take()
                value = value.removeprefix("\n").removesuffix("\n") if trim else value
                self._emit_arguments(to_json(value, types, guided=self._guided))
                return True
            if source.position - begin >= MAX_CALL_CHARS:  # too long to be held back: a text
                source.put_back(search.take())
                return (yield from self._stream_text(call, body.take(), trim=trim))
        return False

    def _not_the_end(self, call: TaggedCall) -> Steps[str]:
        """Returns the mark that was read as the end of a value, and the space behind it, if they are a part of the
        value: neither another argument nor the end of the call follows. Returns nothing, and reads nothing, if they do.
        """
        source, log = self._source, TextBuffer()
        following = [PLACES.split(call.key)[0].split()[0], *call.tail.split()[:1], *self._format.end.split()[:1]]
        limit, is_end = source.position + MAX_MARKER_SPACE, False
        while (yield from self._more()) and source.position < limit:
            log.push(source.take(source.space_end(min(len(source.text), source.at + limit - source.position))))
            if source.at < len(source.text):
                break
        else:
            is_end = source.position < limit  # of the output
        for mark in following:
            is_end = is_end or (yield from self._peek_mark(mark))
        if not is_end:
            return call.value_marks[0] + log.take()
        source.put_back(log.take())
        return ""

    def _stream_text(self, call: TaggedCall, begun: str, *, trim: bool) -> Steps[bool]:
        """Emits a text up to the end of a value as a string of JSON while it arrives, without the line breaks at its
        ends if it is to ``trim``. Returns whether the end was found.
        """
        search, is_first, held = MarkerSearch(call.value_marks[0]), trim, ""
        self._emit_arguments('"')
        while (yield from self._more()):
            text, found = search.read(self._source)
            text, begun = begun + text, ""
            if is_first and text:
                text, is_first = text.removeprefix("\n"), False
            text, held = held + text, ""
            if trim and text.endswith("\n"):
                text, held = text[:-1], "\n"
            self._emit_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            if found and (begun := (yield from self._not_the_end(call))):
                begun = held + begun
                held = ""
            elif found:
                self._emit_arguments('"')
                return True
        return False


def _marks_of_heads(tool_format: ToolFormat) -> list[str]:
    """The mark that calls of a format begin with, where it is none of a section: models leave out the latter."""
    before = getattr(tool_format.call, "head", "").partition("{name}")[0].removesuffix(_PREFIX)
    return [mark for mark in before.split()[:1] if mark.startswith("<") and tool_format.begin.strip()]


def new_tool_parser(
    tool_format: ToolFormat, names: Collection[str], types: Mapping[str, ParameterTypes] = {}, *, guided: bool = False
) -> StreamParser:
    """A parser for one output in this format. The arguments are those of ``ToolParser``."""
    if tool_format is HARMONY:
        return HarmonyParser(names)
    return ToolParser(tool_format, names, types, guided=guided)
