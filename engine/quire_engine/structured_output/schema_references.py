"""Where references within a schema lead, and where its parts stand."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

_DATA = frozenset(["const", "enum", "default", "examples"])
"""Keywords whose values are data, which no reference leads into by a name."""

_ANNOTATIONS = frozenset(["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"])


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
        while isinstance(schema, Mapping) and "$ref" in schema and not schema.keys() - _ANNOTATIONS - {"$ref"}:
            target = self.resolve(schema)
            if target is None:
                break
            schema = target
        return schema


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
