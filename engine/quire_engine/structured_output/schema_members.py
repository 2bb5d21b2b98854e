"""The names of properties: which schemas hold for them, and which names are possible."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_engine.structured_output.expressions import Expression, all_texts, matches, samples

MAX_NAMES = 2000  # the most names allowed by a pattern that are listed
_COMMON_NAMES = ("", "a", "1", "_x", "Zq-7", "é", "name of none", "\n")


@dataclass(frozen=True, slots=True)
class Members:
    """The constraints of one schema on the properties of an object."""

    properties: Mapping[str, Any]
    patterns: Mapping[str, tuple[Expression, Any]]
    others: Any

    def schemas_of(self, name: str) -> list[Any]:
        """Returns the schemas that the value of the property ``name`` must satisfy."""
        named = [self.properties[name]] if name in self.properties else []
        matching = [value for expression, value in self.patterns.values() if matches(expression, name)]
        return [*named, *matching] or [self.others]

    def schemas_by(self, patterns: Sequence[str]) -> list[Any]:
        """Returns the same for a name that is not listed and matches only these patterns."""
        return [self.patterns[text][1] for text in patterns if text in self.patterns] or [self.others]


@dataclass(frozen=True, slots=True)
class Names:
    """The constraint of ``propertyNames``: a name is one of ``listed``, or else matches all ``expressions``."""

    listed: tuple[str, ...] | None = None
    expressions: tuple[Expression, ...] = ()

    def accepts(self, name: str) -> bool:
        """Whether a name satisfies the constraint."""
        if self.listed is not None:
            return name in self.listed
        return all(matches(each, name) for each in self.expressions)


def subsets(items: Sequence[str]) -> Iterator[list[str]]:
    """Yields all subsets of the items."""
    for bits in range(1 << len(items)):
        yield [item for place, item in enumerate(items) if bits >> place & 1]


def has_name(within: Sequence[Expression], without: Sequence[Expression], names: list[str]) -> bool:
    """Whether a name is known that matches ``within``, does not match ``without``, and is not in ``names``."""
    if len(within) == 1 and not without:
        texts = all_texts(within[0], MAX_NAMES)
        return texts is None or not set(texts) <= set(names)
    known = [text for each in within for text in samples(each)] or [*_COMMON_NAMES]
    return any(
        text not in names
        and all(matches(each, text) for each in within)
        and not any(matches(each, text) for each in without)
        for text in known
    )
