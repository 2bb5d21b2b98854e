"""The structs that Python passes to the compiled kernels are those of their sources, field by field."""

import ctypes
import inspect
import re
from pathlib import Path

import pytest
from quire_engine.kernels import bindings
from quire_engine.worker import cpu_graph

SOURCES = Path(bindings.__file__).parent
STRUCTS = [value for _, value in inspect.getmembers(bindings, inspect.isclass) if issubclass(value, ctypes.Structure)]
NUMBERS = {"int64_t": ctypes.c_int64, "double": ctypes.c_double, "float": ctypes.c_float}
_COMMENT = re.compile(r"//.*")
_MEMBER = re.compile(r"(?:const )?(?P<type>\w+)(?P<rest>[^;()]*)$")
_NAME = re.compile(r"(?P<stars>(?:\s|\*|const\b)*)(?P<name>\w+)$")


def fields_of(name: str) -> list[tuple[str, type]]:
    """The members of a struct, as ctypes has them. Whatever a pointer leads to, it is one."""
    found = [
        match[1]
        for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])
        for match in re.finditer(rf"^struct {name} {{(.*?)^}};", source.read_text(), re.DOTALL | re.MULTILINE)
    ]
    assert len(found) == 1, f"{name} is defined {len(found)} times"
    fields: list[tuple[str, type]] = []
    for member in _COMMENT.sub("", found[0]).split(";"):
        if not member.strip():
            continue
        parts = _MEMBER.match(" ".join(member.split()))
        assert parts is not None, member
        for declared in parts["rest"].split(","):
            named = _NAME.match(declared.strip())
            assert named is not None, member
            fields.append((named["name"], ctypes.c_void_p if "*" in named["stars"] else NUMBERS[parts["type"]]))
    return fields


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_a_struct_has_the_members_of_its_source(struct: type[ctypes.Structure]) -> None:
    assert [(name, kind) for name, kind, *_ in struct._fields_] == fields_of(struct.__name__)


def test_a_captured_call_has_as_many_slots_as_it_is_replayed_with() -> None:
    (slots,) = re.findall(r"constexpr \w+ kSlots = (\d+);", (SOURCES / "cpu_graph.cpp").read_text())
    assert int(slots) == cpu_graph._SLOTS
    assert [name for name, *_ in cpu_graph._Call._fields_] == ["play", "slots", "rows", "per_token"]
