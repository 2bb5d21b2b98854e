"""Values cross to another process as JSON and come back as they were, by the types of their fields."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.core_client.codec import Codec, Codecs


class Color(Enum):
    RED = (1,)
    BLUE = (2,)


class Size(StrEnum):
    SMALL = "small"


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: float = 0.5


@dataclass(frozen=True, slots=True)
class Named:
    name: str


@dataclass(slots=True)
class Everything:
    size: Size
    flag: bool | Literal["never"]
    data: bytes
    points: list[Point]
    pair: tuple[int, Point | None]
    numbers: Sequence[int]
    nested: tuple[tuple[int, float], ...]
    either: Point | Named | None
    counts: Counter[tuple[Size, str]]
    by_number: dict[int, Point]
    maybe: Size | None = None
    more: list[str] = field(default_factory=list)


def no_callbacks(arguments: Sequence[Codec]) -> Codec:
    raise AssertionError("there is none")


def there_and_back(codec: Codec, value: Any) -> Any:
    return codec.decode(json.loads(json.dumps(codec.encode(value))))


@given(
    value=st.builds(
        Everything,
        numbers=st.lists(st.integers()).map(tuple),
        counts=st.dictionaries(st.tuples(st.just(Size.SMALL), st.text()), st.integers()).map(Counter),
        nested=st.lists(st.tuples(st.integers(), st.floats(allow_nan=False))).map(tuple),
        points=st.lists(st.builds(Point, y=st.floats(allow_nan=False))),
        pair=st.tuples(st.integers(), st.none() | st.builds(Point, y=st.just(-0.0))),
        either=st.none() | st.builds(Point, y=st.just(1.0)) | st.builds(Named),
        by_number=st.dictionaries(st.integers(), st.builds(Point, y=st.just(2.5))),
    )
)
def test_a_value_comes_back_as_it_was(value: Everything) -> None:
    assert there_and_back(Codecs({}, no_callbacks).of(Everything), value) == value


def test_bytes_may_be_any() -> None:
    assert there_and_back(Codecs({}, no_callbacks).of(bytes), bytes(range(256))) == bytes(range(256))


def test_a_type_of_several_dataclasses_keeps_its_kind() -> None:
    codec = Codecs({}, no_callbacks).of(list[Point | Named])
    assert there_and_back(codec, [Named("a"), Point(1), Named("b")]) == [Named("a"), Point(1), Named("b")]


@pytest.mark.parametrize("hint", [object, set[int], Any])
def test_a_type_that_is_no_data_is_refused(hint: object) -> None:
    with pytest.raises(TypeError, match="is not data"):
        Codecs({}, no_callbacks).of(hint)


def test_special_types_have_their_own_codecs_wherever_they_are() -> None:
    codecs = Codecs(
        {complex: Codec(lambda value: [value.real, value.imag], lambda plain: complex(*plain))}, no_callbacks
    )
    assert there_and_back(codecs.of(list[complex | None]), [1 + 2j, None]) == [1 + 2j, None]


def test_a_callable_gets_the_codecs_of_its_arguments() -> None:
    made: list[Sequence[Codec]] = []

    def make(arguments: Sequence[Codec]) -> Codec:
        made.append(arguments)
        return Codec(lambda _: 7, lambda number: number)

    codec = Codecs({}, make).of(Callable[[Point, bytes | None], None])
    assert codec.encode(print) == 7
    ((point, data),) = made
    assert there_and_back(point, Point(3)) == Point(3)
    assert there_and_back(data, b"\xff") == b"\xff"
