"""Which functions of ours a stretch of a program calls, by file, in order of first call; and tables of them."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
Trace = dict[str, list[str]]
"""Functions by file, such as ``{"requests/runner.py": ["RequestRunner.run"]}``: paths as in ``traced_calls``."""


@contextmanager
def traced_calls(*packages: str) -> Iterator[Trace]:
    """Fills the trace that it yields with the calls of this thread until the block ends. ``packages`` are folders of
    the repository, such as ``router/quire_router``; a file's path begins with the package's name. What a generator or
    a coroutine resumes is a call; bodies of modules and of classes, comprehensions, lambdas and code that is made at
    run time (``__init__`` of dataclasses) are not.
    """
    trace: Trace = {}
    folders = {f"{ROOT / package}/": f"{Path(package).name}/" for package in packages}
    names: dict[object, tuple[str, str] | None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in names:
            names[code] = _name(code.co_filename, code.co_qualname, folders)
            if (name := names[code]) is not None and name[1] not in trace.setdefault(name[0], []):
                trace[name[0]].append(name[1])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield trace
    finally:
        sys.setprofile(before)


def common(traces: Sequence[Trace]) -> Trace:
    """What every trace has, in the order of the first: without what runs now and then beside what was traced."""
    first, *others = traces
    kept = {
        file: [name for name in names if all(name in other.get(file, ()) for other in others)]
        for file, names in first.items()
    }
    return {file: names for file, names in kept.items() if names}


def table(trace: Trace) -> str:
    """The trace as rows of a Markdown table: file, functions."""
    rows = [f"| `{file}` | {', '.join(f'`{name}`' for name in names)} |" for file, names in trace.items()]
    return "\n".join(["| File | Functions, roughly in call order |", "|---|---|", *rows])


def table_in(page: Path, heading: str) -> dict[str, set[str]]:
    """Returns the functions of each file in the first table under a heading. Raises ``ValueError`` if there is none."""
    lines = page.read_text(encoding="utf-8").splitlines()
    section = lines[lines.index(heading) + 1 :]
    rows: list[str] = []
    for line in section:
        if line.startswith("|"):
            rows.append(line)
        elif rows or line.startswith("#"):
            break
    if not rows:
        raise ValueError(f"there is no table under {heading!r} in {page}")
    cells = (row.strip("| ").replace("`", "").split(" | ") for row in rows[2:])
    return {file: set(functions.split(", ")) for file, functions in cells}


def _name(path: str, qualified: str, folders: dict[str, str]) -> tuple[str, str] | None:
    if qualified.endswith(">"):
        return None
    for folder, name in folders.items():
        if path.startswith(folder):
            return name + path.removeprefix(folder), qualified.split(".<locals>.", maxsplit=1)[0]
    return None
