"""The comments of the chart's values become a table and descriptions; a value without one is refused."""

from typing import Any

import pytest

from scripts import chart_values as script

TEXT = """\
# What the file is about.

# How it is called.
name: ""
# All about the door.
door:
  # Its width.
  width: 3
  # Who may pass,
  # and who not.
  people:
    - anna
    - "bob"
  lock:
    # A key | a code.
    kind: key
"""


def test_a_comment_belongs_to_the_value_below_it() -> None:
    found = {value.name: (value.default, value.comment) for value in script.read_values(TEXT)}
    assert found == {
        "name": ('""', "How it is called."),
        "door": ('width: 3 people: - anna - "bob" lock: kind: key', "All about the door."),
        "door.width": ("3", "Its width."),
        "door.people": ('- anna - "bob"', "Who may pass, and who not."),
        "door.lock.kind": ("key", "A key | a code."),
    }


@pytest.mark.parametrize(
    ("comment", "name"),
    [
        ("# How it is called.", "line 3: name"),
        ("  # Its width.", "line 7: door.width"),
        ("    # A key | a code.", "door.lock"),
    ],
)
def test_a_value_without_a_comment_is_refused(comment: str, name: str) -> None:
    with pytest.raises(script.CommentError, match=f"{name} has no comment"):
        script.read_values(TEXT.replace(f"{comment}\n", ""))


def test_parts_of_a_value_need_no_comment() -> None:
    (value,) = script.read_values("# What it may take.\nlimits:\n  memory: 4Gi\n  cpu: 1\n")
    assert (value.name, value.default) == ("limits", "memory: 4Gi cpu: 1")


def test_the_table_has_every_value_once_and_no_section() -> None:
    rows = [line for line in script.table(script.read_values(TEXT)).splitlines() if line.startswith("| `")]
    assert rows == [
        '| `name` | `""` | How it is called. |',
        "| `door.width` | `3` | Its width. |",
        '| `door.people` | `- anna - "bob"` | Who may pass, and who not. |',
        "| `door.lock.kind` | `key` | A key \\| a code. |",
    ]


def test_only_what_is_between_the_marks_changes() -> None:
    values = script.read_values(TEXT)
    readme = f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n"
    once = script.with_table(readme, values)
    assert once.startswith(f"before\n{script.BEGIN}\n")
    assert once.endswith(f"\n{script.END}\nafter\n")
    assert "old" not in once
    assert script.with_table(once, values) == once


def test_descriptions_reach_what_the_schema_refers_to() -> None:
    schema: dict[str, Any] = {
        "properties": {"a": {"$ref": "#/definitions/part"}},
        "definitions": {"part": {"properties": {"b": {"type": "string"}}}},
    }
    values = script.read_values("# A part.\na:\n  # Its b.\n  b: x\n")
    script.with_descriptions(schema, values)
    assert schema["properties"]["a"]["description"] == "A part."
    assert schema["definitions"]["part"]["properties"]["b"] == {"type": "string", "description": "Its b."}


def test_a_value_that_the_schema_lacks_is_refused() -> None:
    with pytest.raises(script.CommentError, match=r"has no a\.c"):
        script.with_descriptions(
            {"properties": {"a": {"properties": {}}}}, script.read_values("a:\n  # Its c.\n  c: 1\n")
        )
