"""Where references within a schema lead, where its parts stand, and a part written as a schema of its own."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

_DATA = frozenset(["const", "enum", "default", "examples"])
"""Keywords whose values are data, which no reference leads into by a name."""

_SCHEMAS_BY_NAME = frozenset(["properties", "patternProperties", "dependentSchemas", "$defs", "definitions"])
"""Keywords whose values have names of the client's as keys."""

_MAX_REFERENCES = 32  # that lead from one to the next

ANNOTATIONS = frozenset(["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"])
_NAMING = frozenset(["$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$comment", "$defs", "definitions"])
_BESIDE_REFERENCES = ANNOTATIONS | _NAMING | {"$ref", "strict"}


class References:
    """Finds the schemas that references name: by a path, an anchor, or the ``$id`` of a schema within the same text."""

    def __init__(self, root: Any) -> None:
        self.schemas: list[Any] = []
        self._bases: dict[int, str] = {}
        self._resources: dict[str, Any] = {"": root}
        self._is_old = isinstance(root, Mapping) and "draft-04" in str(root.get("$schema"))
        self._add(root, "")

    def _add(self, value: Any, base: str) -> None:
        stack = [(value, base)]
        while stack:
            value, base = stack.pop()
            if isinstance(value, list):
                stack += [(each, base) for each in value]
            if not isinstance(value, Mapping):
                continue
            name = value.get("id" if self._is_old else "$id")
            if isinstance(name, str) and name and not name.startswith("#"):
                base = urldefrag(urljoin(base, name)).url
                self._resources.setdefault(base, value)
            for anchor in (value.get("$anchor"), value.get("$dynamicAnchor"), str(name or "").partition("#")[2]):
                if isinstance(anchor, str) and anchor:
                    self._resources.setdefault(f"{base}#{anchor}", value)
            self._bases[id(value)] = base
            self.schemas.append(value)
            stack += [(each, base) for key, each in value.items() if key not in _DATA]

    def resolve(self, schema: Mapping[str, Any]) -> Any:
        """The schema that ``$ref`` of ``schema`` names; None if there is none."""
        base, reference = self._bases.get(id(schema), ""), schema["$ref"]
        if not isinstance(reference, str):
            return None
        target = urljoin(base, reference) if base else reference
        resource, fragment = urldefrag(target)
        if fragment and not fragment.startswith("/"):
            return self._resources.get(f"{resource}#{unquote(fragment)}")
        value = self._resources.get(resource)
        for part in unquote(fragment).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list):
                value = value[int(key)] if key.isdecimal() and int(key) < len(value) else None
            else:
                value = value.get(key) if isinstance(value, Mapping) else None
        return value if isinstance(value, Mapping | bool) else None

    def target(self, schema: Any) -> Any:
        """What a schema that is nothing but references leads to; another schema as it is."""
        for _ in range(_MAX_REFERENCES):
            is_reference = isinstance(schema, Mapping) and "$ref" in schema and not schema.keys() - _BESIDE_REFERENCES
            target = self.resolve(schema) if is_reference else None
            if target is None:
                break
            schema = target
        return schema

    def standalone(self, schema: Any) -> Any:
        """``schema``, a part of the text, as a schema of its own: what it refers to is under ``$defs``, by the
        references as they were written. One that leads nowhere stays. Raises ``RecursionError`` for what is nested too
        deeply.
        """
        copy = _Copy(self)
        written = copy.of(schema)
        # The list grows while what is referred to is copied.
        definitions = {key: copy.of(copy.targets[key]) for key in copy.keys}
        return {**written, "$defs": definitions} if definitions else written


class _Copy:
    """Copies schemas, with references to ``$defs``. ``targets`` is what was referred to, by its key there, and ``keys``
    are these in their order.
    """

    def __init__(self, references: References) -> None:
        self._references = references
        self.targets: dict[str, Any] = {}
        self.keys: list[str] = []

    def of(self, value: Any, *, by_name: bool = False) -> Any:
        """A copy of a schema, or of schemas ``by_name``."""
        if isinstance(value, list):
            return [self.of(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        if by_name:
            return {name: self.of(each) for name, each in value.items()}
        copied = {
            key: each if key in _DATA else self.of(each, by_name=key in _SCHEMAS_BY_NAME)
            for key, each in value.items()
            if key not in _NAMING
        }
        target = self._references.resolve(value) if "$ref" in value else None
        if target is not None:
            copied["$ref"] = "#/$defs/" + quote(self._key(value["$ref"], target).replace("~", "~0").replace("/", "~1"))
        return copied

    def _key(self, reference: str, target: Any) -> str:
        key = reference
        while self.targets.setdefault(key, target) is not target:  # one text, and another base
            key += "'"
        if len(self.targets) > len(self.keys):
            self.keys.append(key)
        return key


def places(schema: Any, path: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The place of each object within ``schema``."""
    stack = [(schema, path)]
    while stack:
        value, path = stack.pop()
        if isinstance(value, Mapping):
            yield id(value), path
            stack += [(each, (*path, str(key))) for key, each in value.items()]
        elif isinstance(value, list):
            stack += [(each, (*path, str(place))) for place, each in enumerate(value)]
