"""Where chat templates run: Jinja's immutable sandbox, with bounds on the time and on the memory of one rendering.

A template is a program of the model's author. Jinja keeps it away from Python, but lets it loop for ever and make texts
of any size. Here every turn of a loop, call of a macro, method or filter, and every sum or product looks at the clock
of the thread, and whatever makes a text longer is asked before how long that will be.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import chain, islice
from time import thread_time
from types import BuiltinMethodType
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_INTEGER_BITS = 2**14
MAX_ARGUMENT = 10_000  # of numbers that are widths, counts and the like
_WITHOUT = ("lipsum", "urlize", "xmlattr", "wordwrap", "pprint", "random")  # for web pages, and costly
_TAKES_ANY_NUMBER = frozenset({"default", "d", "int", "float", "round", "string", "tojson"})
_WRITES_ITS_VALUE = frozenset({"string", "tojson", "e", "escape", "forceescape", "title", "capitalize", "safe"})
Counted = TypeVar("Counted", nodes.For, nodes.Macro, nodes.CallBlock)
_CHECKS = 16  # to look at the clock once, which costs more than most of what is checked
_NUMBER = re.compile(r"\d+")


class ExcessError(SecurityError):
    """A template takes more than one rendering may."""


class _Budget:
    """What one rendering may still use: ``seconds`` of the thread's processor time, and texts and lists of up to
    ``size`` characters or entries.
    """

    __slots__ = ("_checks", "_end", "size")

    def __init__(self, seconds: float, size: int) -> None:
        self._end = thread_time() + seconds
        self._checks = 0
        self.size = size

    def check(self) -> None:
        self._checks += 1
        if not self._checks % _CHECKS and thread_time() > self._end:
            raise ExcessError("the template takes too long")

    def afford(self, size: int) -> None:
        if size > self.size:
            raise ExcessError("the template makes a text or list that is too large")


_BUDGET: ContextVar[_Budget | None] = ContextVar("budget", default=None)
_LOADING = (1.0, 2**16)  # seconds and characters, while Jinja computes what is constant in a template


@contextmanager
def bounded(seconds: float, size: int) -> Iterator[None]:
    """Templates that are rendered inside may take so much processor time, and make texts of so many characters."""
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
            if isinstance(each, str):
                size += 2 + len(each)
            elif isinstance(each, (int, float)):
                size += 2 + _bits(each) // 3
            elif each is not None:
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

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings, finalize=checked)
        for name in _WITHOUT:
            self.filters.pop(name, None)
            self.globals.pop(name, None)
        self.concat = _joined  # type: ignore[method-assign]

    def bound_filters(self) -> None:
        """To be called when all filters are there."""
        self.filters.update({name: _bounded_filter(name, each) for name, each in self.filters.items()})
        self.filters[_CONCAT] = _joined_values

    def counted(self, source: str) -> nodes.Template:
        """A template's source, such that it looks at the clock in each turn of a loop and in each call of a macro."""
        tree = _Counted().visit(self.parse(source))
        assert isinstance(tree, nodes.Template)
        tree.set_environment(self)
        return tree

    @property
    def tick(self) -> None:
        """A turn of a loop. An attribute, since compiled templates come by these without a call through the sandbox.
        Raises ``ExcessError``.
        """
        _budget().check()

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Raises ``ExcessError`` for a result that is too large."""
        budget = _budget()
        budget.check()
        _BINOPS[operator](left, right, budget)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Raises ``ExcessError`` for a method whose result is too large."""
        budget = _budget()
        budget.check()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox has its own ``str.format``
        if isinstance(method, BuiltinMethodType) and isinstance(method.__self__, (str, bytes, int, float)):
            args = tuple(_listed(arg, budget) for arg in args)
            _check_numbers(args, kwargs)
            budget.afford(_size_of_method(method.__name__, method.__self__, args, kwargs, budget))
        return super().call(__context, __obj, *args, **kwargs)


class _Counted(NodeTransformer):
    """Puts ``Sandbox.tick`` at the beginning of what can be run again and again, and has ``~`` ask before it joins."""

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

    def _counting(self, node: Counted) -> Counted:
        self.generic_visit(node)
        tick = nodes.EnvironmentAttribute("tick", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node


_CONCAT = "concatenated"


def _budget() -> _Budget:
    return _BUDGET.get() or _Budget(*_LOADING)


def _joined(parts: Iterable[str]) -> str:
    """The text of an output, a macro or a block."""
    budget, whole, size = _budget(), list[str](), 0
    for part in parts:
        size += len(part)
        budget.afford(size)
        whole.append(part)
    return "".join(whole)


def _joined_values(values: Sequence[Any]) -> str:
    return _joined(str(checked(value)) for value in values)


def checked(value: Any) -> Any:
    """A value that is about to become text. Raises ``ExcessError`` where that would be too large."""
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
        if name in ("join", "list", "sum"):
            value = _listed(value, budget)
        if name not in _TAKES_ANY_NUMBER:
            _check_numbers(rest, kwargs)
        budget.afford(_size_of_filter(name, value, rest, kwargs, budget))
        return function(*args[:first], value, *rest, **kwargs)

    return bounded_filter


def _size_of_filter(name: str, value: Any, rest: Sequence[Any], kwargs: Mapping[str, Any], budget: _Budget) -> int:
    """At least the characters that a filter's result has, where it has more than it was given."""
    if name in _WRITES_ITS_VALUE or (name in ("join", "format", "replace") and not isinstance(value, str)):
        size = size_of(value, budget.size)
    else:
        size = len(value) if isinstance(value, str) else 0
    if name == "tojson":
        return size * (1 + max((_width(each) for each in (*rest, *kwargs.values())), default=0))
    if name == "sum" and not isinstance(_argument(rest, kwargs, 1, "start", 0), (int, float)):
        raise ExcessError("only numbers can be summed up")
    if name == "round":
        return max((abs(each) for each in (*rest, *kwargs.values()) if isinstance(each, int)), default=0)
    if name == "indent":
        width = _width(_argument(rest, kwargs, 0, "width", 4))
        return size + width * (1 + (value.count("\n") if isinstance(value, str) else size))
    if name == "join":
        return size + len(value) * _width(_argument(rest, kwargs, 0, "d", ""))
    if name in ("format", "replace"):
        return _size_of_method(name, str(value), (*rest,), kwargs, budget)
    return size


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
        raise ExcessError("the template makes a number that is too large")


def _check_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if any(isinstance(each, int) and abs(each) > MAX_ARGUMENT for each in (*args, *kwargs.values())):
        raise ExcessError("the template names too large a number")


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
