"""The sandbox of chat templates: Jinja's immutable sandbox, with limits on the time and the memory of one rendering.

A template is a program of the model's author. Jinja keeps it away from Python, but lets it loop for ever and create
texts of any size. Here every iteration of a loop, call of a macro, method or filter, and every sum or product checks
the clock of the thread, and the size of a text is checked before it is created. Values are measured before they are
compared, sorted or looked up, since Python compares and hashes without any check, and all texts and lists that are
alive at once have a common limit.
"""

import re
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import chain, islice, pairwise
from sys import getrefcount, getsizeof
from time import thread_time
from types import BuiltinMethodType, MethodType
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter, make_multi_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_INTEGER_BITS = 2**14
MAX_ARGUMENT = 10_000  # of numbers that are widths, counts and the like
_WITHOUT = ("lipsum", "urlize", "xmlattr", "wordwrap", "pprint", "random")  # for web pages, and costly
_TAKES_ANY_NUMBER = frozenset({"default", "d", "int", "float", "string", "tojson"})
_WRITES_ITS_VALUE = frozenset({"string", "tojson", "e", "escape", "forceescape", "title", "capitalize", "safe"})
_WRITES_ITS_VALUE |= {"upper", "lower", "trim", "striptags", "center", "wordcount", "urlencode"}
_ASKS_FOR_THE_KIND = {
    "defined",
    "undefined",
    "none",
    "boolean",
    "true",
    "false",
    "integer",
    "float",
    "number",
    "string",
}
_ASKS_FOR_THE_KIND |= {"mapping", "sequence", "iterable", "callable", "sameas", "escaped"}  # tests that take no time
_METHODS = frozenset({
    "bit_length", "capitalize", "casefold", "center", "count", "decode", "encode", "endswith", "expandtabs", "find",
    "format", "format_map", "hex", "index", "is_integer", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
    "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower",
    "lstrip", "maketrans", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust",
    "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "translate",
    "upper", "zfill",
})  # fmt: skip
"""Of texts, bytes and numbers: those whose time is bounded by the size of what they are given, or checked below."""
_COMPARES_ALL = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
"""Methods that may compare every character of the text with every character of an argument."""
_COMPARISONS = 16  # of them that take as long as making one character
_CODECS = frozenset({"utf-8", "utf8", "ascii", "latin-1"})  # others take quadratic time, as punycode
_CODEC_ERRORS = frozenset({"strict", "ignore", "replace"})
_BASIC = (str, bytes, int, float)
Counted = TypeVar("Counted", nodes.For, nodes.Macro, nodes.CallBlock)
_PLACE_OF_ATTRIBUTE = {"groupby": 0, "unique": 1, "min": 1, "max": 1, "sort": 2}
_COMPARING_FILTERS = frozenset({*_PLACE_OF_ATTRIBUTE, "dictsort"})
_CHECKS = 16  # checks for one reading of the clock, which costs more than most of what is checked
_COMPARED_PER_CHECK = 2**12  # characters or entries
_SMALL = 128  # bytes of a value that is not worth counting: processor time bounds how many there can be
_BYTES, _BYTES_A_CHARACTER = 2**24, 8  # of all values alive at once, and how many more for each character of ``size``
_NUMBER = re.compile(r"\d+")


class SandboxLimitError(SecurityError):
    """A template exceeds the limits of one rendering."""


class _Budget:
    """The budget of one rendering: ``seconds`` of the thread's processor time, and texts and lists of up to ``size``
    characters or entries each.
    """

    __slots__ = ("_bytes", "_checks", "_end", "_made", "_most_bytes", "size")

    def __init__(self, seconds: float, size: int) -> None:
        self._end = thread_time() + seconds
        self._checks = 0
        self.size = size
        self._made = list[tuple[Any, int]]()
        self._bytes, self._most_bytes = 0, _BYTES + _BYTES_A_CHARACTER * size

    def check(self, checks: int = 1) -> None:
        self._checks += checks
        if self._checks >= _CHECKS:
            self._checks = 0
            if thread_time() > self._end:
                raise SandboxLimitError("the template takes too long")

    def afford(self, size: int) -> None:
        if size > self.size:
            raise SandboxLimitError("the template makes a text or list that is too large")

    def compare(self, value: Any) -> None:
        """Charges for comparing or hashing ``value``, which takes no longer than iterating over it."""
        size = size_of(value, self.size)
        self.check(1 + size // _COMPARED_PER_CHECK)
        self.afford(size)

    def keep(self, value: Any) -> Any:
        """Counts a new value for as long as the template refers to it. Many templates extend a text message by message,
        so values that they have released do not count. Raises ``SandboxLimitError``, also for a number with which
        calculating would take long.
        """
        if isinstance(value, int):
            _check_bits(value.bit_length())
        size = getsizeof(value)
        if isinstance(value, (list, tuple)):
            size += sum(map(getsizeof, value))
        if size > _SMALL:
            self._made.append((value, size))
            self._bytes += size
            if self._bytes > self._most_bytes:
                self._drop_released()
        return value

    def _drop_released(self) -> None:
        """Drops released values. Raises unless half of the limit is free, so that the amortised cost is small."""
        self._made = [(value, size) for value, size in self._made if getrefcount(value) > _REFERENCES_HERE]
        self._bytes = sum(size for _, size in self._made)
        if self._bytes > self._most_bytes // 2:
            raise SandboxLimitError("the template holds too many texts and lists")


_REFERENCES_HERE = 3  # to a value in ``_drop_released``: of the pair, of the variable, and of the call
_BUDGET: ContextVar[_Budget | None] = ContextVar("budget", default=None)
_LOADING = (1.0, 2**16)  # seconds and characters, while Jinja computes what is constant in a template


@contextmanager
def bounded(seconds: float, size: int) -> Iterator[None]:
    """Limits templates that are rendered in this context to ``seconds`` of processor time and texts of ``size``
    characters.
    """
    token = _BUDGET.set(_Budget(seconds, size))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def size_of(value: Any, most: int) -> int:
    """About how many characters a value of JSON has as text; a little above ``most`` for anything longer. Lists that
    are entries of each other again and again have as many as they would have when written.
    """
    size, rest = 0, [iter((value,))]
    while rest:
        for each in rest[-1]:
            if isinstance(each, (str, bytes)):
                size += 2 + len(each)
            elif isinstance(each, (int, float)):
                size += 2 + _bits(each) // 3
            elif each is None:
                size += 4
            else:
                size += 2
                rest.append(_entries(each))
                break
            if size > most:
                return size
        else:
            rest.pop()
        if size > most:
            return size
    return size


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates, and runs them within what ``bounded`` allows."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings, finalize=_text)
        for name in _WITHOUT:
            self.filters.pop(name, None)
            self.globals.pop(name, None)
        self.concat = _joined  # type: ignore[method-assign]

    def limit_filters(self) -> None:
        """To be called when all filters are there."""
        self.filters.update({name: _bounded_filter(name, each) for name, each in self.filters.items()})
        self.filters |= {_CONCAT: _joined_values, _COMPARED: compared, _SEARCHED: _searched, _SLICED: _made}
        for name in self.tests.keys() - _ASKS_FOR_THE_KIND:
            self.tests[name] = _bounded_test(self.tests[name])

    def counted(self, source: str) -> nodes.Template:
        """Parses a template, and makes it check the clock in each turn of a loop and in each call of a macro."""
        tree = _Counted().visit(self.parse(source))
        assert isinstance(tree, nodes.Template)
        tree.set_environment(self)
        return tree

    @property
    def tick(self) -> None:
        """Checks the clock, once a turn of a loop. An attribute, as compiled templates read attributes without a call
        through the sandbox. Raises ``SandboxLimitError``.
        """
        _budget().check()

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Raises ``SandboxLimitError`` for a key that is too large to hash."""
        return super().getitem(obj, argument if isinstance(argument, (str, int)) else compared(argument))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Raises ``SandboxLimitError`` for a result that is too large."""
        budget = _budget()
        budget.check()
        if operator == "-":  # views of dictionaries are sets, and hash their entries
            left, right = compared(left), compared(right)
        else:
            _BINOPS[operator](left, right, budget)
        return budget.keep(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Raises ``SandboxLimitError`` for a method that could take too long, or whose result is too large."""
        budget = _budget()
        budget.check()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox has its own ``str.format``
        if _is_basic(method):
            args = tuple(_listed(arg, budget) for arg in args)
            _check_numbers(args, kwargs)
            _check_time(method.__name__, method.__self__, args, kwargs, budget)
            budget.afford(_size_of_method(method.__name__, method.__self__, args, kwargs, budget))
        elif isinstance(method, (BuiltinMethodType, MethodType)):
            args = tuple(map(compared, args))
            kwargs = {name: compared(each) for name, each in kwargs.items()}
            if args and isinstance(method.__self__, (list, tuple, ItemsView, ValuesView)):
                budget.compare(method.__self__)
        return budget.keep(super().call(__context, __obj, *args, **kwargs))


class _Counted(NodeTransformer):
    """Puts ``Sandbox.tick`` at the beginning of loops, macros and call blocks, and checks the operands of ``~``,
    comparisons, slices and keys of dictionaries before they are used.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        return self._counting(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        return self._counting(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:  # noqa: N802
        return self._counting(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        values = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(values, _CONCAT, [], [], None, None, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        """Checks only operands that could be large: most comparisons of templates are with a constant."""
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        checks = {
            at: _SEARCHED if at == len(node.ops) and node.ops[-1].op in ("in", "notin") else _COMPARED
            for earlier, (left, right) in enumerate(pairwise(sides))
            if not (_is_plain(left) or _is_plain(right))
            for at in (earlier, earlier + 1)
        }
        for at, name in checks.items():
            if at:
                node.ops[at - 1].expr = _filtered(sides[at], name)
            else:
                node.expr = _filtered(sides[at], name)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filtered(node.key, _COMPARED)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _SLICED) if isinstance(node.arg, nodes.Slice) else node

    def _counting(self, node: Counted) -> Counted:
        self.generic_visit(node)
        tick = nodes.EnvironmentAttribute("tick", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node


_CONCAT, _COMPARED, _SEARCHED, _SLICED = "concatenated", "compared", "searched", "sliced"


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _is_plain(node: nodes.Expr) -> bool:
    """Whether comparing with it takes next to no time, whatever the other operand is."""
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(isinstance(each, nodes.Const) for each in node.items)
    return isinstance(node, nodes.Const)


def compared(value: Any) -> Any:
    """Returns a value that is about to be compared or hashed. Raises ``SandboxLimitError`` where that would take too
    long.
    """
    if isinstance(value, (str, int, float)):
        return value
    budget = _budget()
    value = _listed(value, budget)
    budget.compare(value)
    return value


def _searched(value: Any) -> Any:
    """Returns the container that ``in`` is about to search. Raises as ``compared``."""
    return value if isinstance(value, Mapping) else compared(value)


def _made(value: Any) -> Any:
    """A value that is new. Raises ``SandboxLimitError`` where the template holds too many."""
    budget = _budget()
    budget.check()
    return budget.keep(value)


def _text(value: Any) -> Any:
    """What ``{{ }}`` writes for a value."""
    return value if isinstance(value, (str, int, float)) else _made(str(checked(value)))


def _budget() -> _Budget:
    return _BUDGET.get() or _Budget(*_LOADING)


def _joined(parts: Iterable[str]) -> str:
    """The text of an output, a macro or a block."""
    budget, whole, size = _budget(), list[str](), 0
    for part in parts:
        size += len(part)
        budget.afford(size)
        whole.append(part)
    text = "".join(whole)
    budget.keep(text)
    return text


def _joined_values(values: Sequence[Any]) -> str:
    return _joined(str(checked(value)) for value in values)


def checked(value: Any) -> Any:
    """A value that is about to become text. Raises ``SandboxLimitError`` where that would be too large."""
    if not isinstance(value, (str, int, float)):
        budget = _budget()
        budget.check()
        budget.afford(size_of(value, budget.size))
    return value


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded_filter(*args: Any, **kwargs: Any) -> Any:
        budget = _budget()
        budget.check()
        value, *rest = args[first:]
        if name in ("join", "list", "sum") or name in _COMPARING_FILTERS:
            value = _listed(value, budget)
        if name in _COMPARING_FILTERS:
            budget.compare(value)
            budget.compare(_keys(name, args[0], value, rest, kwargs) if name in _PLACE_OF_ATTRIBUTE else ())
        if name not in _TAKES_ANY_NUMBER:
            _check_numbers(rest, kwargs)
            for each in (*rest, *kwargs.values()):
                checked(each)  # many filters write what they are given
        budget.afford(_size_of_filter(name, value, rest, kwargs, budget))
        result = budget.keep(function(*args[:first], value, *rest, **kwargs))
        return iter([*result]) if name == "unique" else result  # at once: later its entries could hold more

    return bounded_filter


def _keys(name: str, environment: Any, value: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """What a filter compares instead of the entries. Larger where these are namespaces."""
    attribute = _argument(rest, kwargs, _PLACE_OF_ATTRIBUTE[name], "attribute", None)
    if attribute is None:
        return ()
    if name == "sort":
        key: Callable[[Any], Any] = make_multi_attrgetter(environment, attribute)
    else:
        default = _argument(rest, kwargs, 1, "default", None) if name == "groupby" else None
        key = make_attrgetter(environment, attribute, default=default)
    return [key(each) for each in value]


def _bounded_test(function: Any) -> Callable[..., Any]:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded_test(*args: Any) -> Any:
        budget = _budget()
        budget.check()
        value, *rest = args[first:]
        _check_format(value, rest[0] if rest else 0, budget)  # ``is odd`` formats a text, as ``%`` does
        return function(*args[:first], compared(value), *map(_searched, rest))

    return bounded_test


def _size_of_filter(name: str, value: Any, rest: Sequence[Any], kwargs: Mapping[str, Any], budget: _Budget) -> int:
    """At least the characters that a filter's result has, where it has more than it was given."""
    if name in _WRITES_ITS_VALUE or (name in ("join", "format", "replace") and not isinstance(value, str)):
        size = size_of(value, budget.size)
    else:
        size = len(value) if isinstance(value, str) else 0
    if name == "tojson":
        return size * (1 + max((_width(each) for each in (*rest, *kwargs.values())), default=0))
    if name == "sum" and not isinstance(_argument(rest, kwargs, 1, "start", 0), (int, float)):
        raise SandboxLimitError("only numbers can be summed up")
    if name == "trim":
        _check_time("strip", value, rest, kwargs, budget)
    if name == "indent":
        width = _width(_argument(rest, kwargs, 0, "width", 4))
        return size + width * (1 + (value.count("\n") if isinstance(value, str) else size))
    if name == "join":
        return size + len(value) * _width(_argument(rest, kwargs, 0, "d", ""))
    if name in ("format", "replace"):
        return _size_of_method(name, str(value), (*rest,), kwargs, budget)
    return size


def _is_basic(method: Any) -> bool:
    """Whether it is a method of a text, bytes or a number, or of their types, such as ``int.from_bytes``."""
    if not isinstance(method, (BuiltinMethodType, MethodType)):
        return False
    owner = method.__self__
    return issubclass(owner, _BASIC) if isinstance(owner, type) else isinstance(owner, _BASIC)


def _check_time(name: str, text: Any, args: Sequence[Any], kwargs: Mapping[str, Any], budget: _Budget) -> None:
    """Raises ``SandboxLimitError`` for a method that could take too long: nothing checks the clock within it."""
    if name not in _METHODS:
        raise SandboxLimitError(f"the method {name} is not for templates")
    if name in ("encode", "decode"):
        codec, errors = (_argument(args, kwargs, *each) for each in _CODEC_ARGUMENTS)
        if codec not in _CODECS or errors not in _CODEC_ERRORS:
            raise SandboxLimitError(f"the codec {codec!s:.32} is not for templates")
    if name in ("startswith", "endswith"):
        budget.compare(args)
    elif name in _COMPARES_ALL:
        size = size_of(text, budget.size)
        compared_with = max((min(size, size_of(each, size)) for each in (*args, *kwargs.values())), default=0)
        budget.afford(size * compared_with // _COMPARISONS)


_CODEC_ARGUMENTS = ((0, "encoding", "utf-8"), (1, "errors", "strict"))


def _size_of_method(name: str, text: Any, args: Sequence[Any], kwargs: Mapping[str, Any], budget: _Budget) -> int:
    """At least the characters that a method's result has, where it has more than its text."""
    size = len(text) if isinstance(text, (str, bytes)) else 0
    given = [*args, *kwargs.values()]
    if name == "replace" and len(args) >= 2:
        times = 1 + size // max(1, len(args[0]))
        return size + times * len(args[1])
    if name == "expandtabs":
        return size + size * max((_width(each) for each in given), default=8)
    if name == "join":
        return size * len(args[0]) + size_of(args[0], budget.size)
    if name == "translate":
        return size * (1 + size_of(given, budget.size))
    if name in ("format", "format_map"):
        return _size_of_format(text, given, budget)
    return size


def _size_of_format(text: str, given: Sequence[Any], budget: _Budget) -> int:
    """Every place of the format could be as wide as the largest number in it or beside it, or hold all values."""
    numbers = [int(digits[:12]) for digits in _NUMBER.findall(text)]
    numbers += [abs(each) for each in given if isinstance(each, int)]
    widest = max(numbers, default=0) if any(mark in text for mark in "*:.%{") else 0
    places = text.count("{") + text.count("%")
    return len(text) + places * (widest + size_of(given, budget.size))


def _check_sum(left: Any, right: Any, budget: _Budget) -> None:
    if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        budget.afford(len(left) + len(right))


def _check_product(left: Any, right: Any, budget: _Budget) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(times, int):
            budget.afford(len(value) * max(0, times))
            return
    _check_bits(_bits(left) + _bits(right))


def _check_power(left: Any, right: Any, _: _Budget) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(_bits(left) * abs(right))


def _check_format(left: Any, right: Any, budget: _Budget) -> None:
    if isinstance(left, str):
        values = [*right.values()] if isinstance(right, Mapping) else [*right] if isinstance(right, tuple) else [right]
        budget.afford(_size_of_format(left, values, budget))


_BINOPS = {"+": _check_sum, "*": _check_product, "**": _check_power, "%": _check_format}


def _check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise SandboxLimitError("the template makes a number that is too large")


def _check_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if any(isinstance(each, int) and abs(each) > MAX_ARGUMENT for each in (*args, *kwargs.values())):
        raise SandboxLimitError("the template names too large a number")


def _argument(rest: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return rest[place] if len(rest) > place else kwargs.get(name, default)


def _width(value: Any) -> int:
    """How many characters a width or a separator adds."""
    if isinstance(value, (list, tuple)):
        return sum(map(_width, value))
    return len(value) if isinstance(value, str) else abs(value) if isinstance(value, int) else 0


def _listed(value: Any, budget: _Budget) -> Any:
    """What can be gone through only once, as a list."""
    if isinstance(value, Iterator):
        value = list(islice(value, budget.size + 1))
        budget.afford(len(value))
    return value


def _entries(value: Any) -> Iterator[Any]:
    """What a value holds that would be written with it."""
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    return iter(value) if isinstance(value, Collection) else iter(())


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0
