"""Values as JSON and back, by the types of dataclass fields. A new field needs no converter, and nothing is pickled."""

from collections import Counter, abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Convert = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Codec:
    """``encode`` turns values of one type into JSON types, and ``decode`` turns those back."""

    encode: Convert
    decode: Convert


SAME = Codec(_same, _same)
_BYTES = Codec(lambda value: value.decode("latin-1"), lambda text: text.encode("latin-1"))
_ATOMS = (int, float, str, bool, NoneType)


class Codecs:
    """The codecs of types, each made when it is first asked for.

    A dataclass is encoded as the list of its fields, and one of several dataclasses as its name before that list.
    ``special`` has the codecs of types that are not data. ``callback`` makes the codec of a callable from the codecs of
    its arguments.
    """

    def __init__(self, special: Mapping[Any, Codec], callback: Callable[[Sequence[Codec]], Codec]) -> None:
        self._known = {**special}
        self._callback = callback

    def of(self, hint: Any) -> Codec:
        """Returns the codec of a type. Raises ``TypeError`` if its values cannot be sent."""
        if hint not in self._known:
            self._known[hint] = self._make(hint)
        return self._known[hint]

    def _make(self, hint: Any) -> Codec:
        origin, arguments = get_origin(hint), get_args(hint)
        if hint in _ATOMS or origin is Literal:
            return SAME
        if origin in (Union, UnionType):
            return self._of_union([each for each in arguments if each is not NoneType])
        if origin is not None:
            return self._of_generic(origin, arguments)
        if hint is bytes:
            return _BYTES
        if isinstance(hint, type) and issubclass(hint, Enum):
            return Codec(attrgetter("value"), hint)
        return self._of_dataclass(hint)

    def _of_generic(self, origin: Any, arguments: Sequence[Any]) -> Codec:
        if origin is abc.Callable:
            return self._callback([self.of(each) for each in arguments[0]])
        if origin in (dict, Counter):
            return self._of_mapping(origin, arguments)
        if origin is tuple and arguments[-1] is not ...:
            return _of_tuple([self.of(each) for each in arguments])
        if origin in (list, tuple, abc.Sequence):
            return _of_sequence(list if origin is list else tuple, self.of(arguments[0]))
        raise TypeError(f"{origin} is not data")

    def _of_union(self, members: Sequence[Any]) -> Codec:
        """Returns the codec of values of one of several types, or None."""
        codecs = [self.of(each) for each in members]
        if all(each is SAME for each in codecs):
            return SAME
        if len(members) == 1:
            return _of_optional(codecs[0])
        by_name = {each.__name__: codec for each, codec in zip(members, codecs, strict=True)}
        assert all(map(is_dataclass, members)), "other types cannot be told apart"

        def encode(value: Any) -> list[Any]:
            name = type(value).__name__
            return [name, by_name[name].encode(value)]

        return _of_optional(Codec(encode, lambda plain: by_name[plain[0]].decode(plain[1])))

    def _of_mapping(self, kind: type, arguments: Sequence[Any]) -> Codec:
        """Returns the codec of a mapping, as pairs: a key need not be a text. A counter counts in integers."""
        pair = _of_tuple([self.of(arguments[0]), self.of(arguments[1] if kind is dict else int)])
        return Codec(
            lambda value: [pair.encode(each) for each in value.items()],
            lambda plain: kind(dict(map(pair.decode, plain))),
        )

    def _of_dataclass(self, kind: Any) -> Codec:
        if not is_dataclass(kind):
            raise TypeError(f"{kind} is not data")
        make: Callable[..., Any] = kind  # type: ignore[assignment]  # a class
        hints = get_type_hints(kind)
        names = [each.name for each in fields(kind)]
        codecs = [self.of(hints[name]) for name in names]
        # Most fields are JSON types, and most others are None or empty: a step has thousands of them.
        encoded = [(place, each.encode) for place, each in enumerate(codecs) if each.encode is not _same]
        decoded = [(place, each.decode) for place, each in enumerate(codecs) if each.decode is not _same]
        read = _reader_of(names)

        def encode(value: Any) -> list[Any]:
            plain = read(value)
            for place, convert in encoded:
                plain[place] = convert(plain[place])
            return plain

        def decode(plain: list[Any]) -> Any:
            for place, convert in decoded:
                plain[place] = convert(plain[place])
            return make(*plain)

        return Codec(encode, decode)


def _reader_of(names: Sequence[str]) -> Callable[[Any], list[Any]]:
    """Returns a function that lists the values of the attributes ``names`` of an object."""
    if len(names) < 2:  # ``attrgetter`` returns a tuple only for several names
        return lambda value: [getattr(value, name) for name in names]
    read = attrgetter(*names)
    return lambda value: list(read(value))


def _of_optional(codec: Codec) -> Codec:
    encode, decode = codec.encode, codec.decode
    return Codec(
        lambda value: None if value is None else encode(value),
        lambda plain: None if plain is None else decode(plain),
    )


def _of_tuple(codecs: Sequence[Codec]) -> Codec:
    if all(each is SAME for each in codecs):
        return Codec(_same, tuple)
    encoders, decoders = [each.encode for each in codecs], [each.decode for each in codecs]
    return Codec(
        lambda value: [encode(each) for encode, each in zip(encoders, value, strict=True)],
        lambda plain: tuple([decode(each) for decode, each in zip(decoders, plain, strict=True)]),
    )


def _of_sequence(kind: type, codec: Codec) -> Codec:
    if kind is list and codec is SAME:
        return SAME
    encode, decode = codec.encode, codec.decode
    return Codec(
        list if encode is _same else lambda value: [encode(each) for each in value],
        kind if decode is _same else lambda plain: kind([decode(each) for each in plain]),
    )
