"""Says where the project's English is hard to read: ``python scripts/prose.py [PATH …] [--strings]``.

Reads Markdown outside of code and tables, and docstrings of Python files below the paths (README.md and docs by
default). With ``--strings`` it reads what users of Python programs see instead: errors, logs, help and what is printed.
Prints words, the lengths of sentences, and how often patterns occur that native speakers stumble over. ``--show N``
adds the N longest sentences, ``--hits`` every pattern with its place. It is a lens, not a limit.
"""

import argparse
import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

LONG = 35  # words of a sentence that should be two
PATTERNS = {
    "X is no Y": r"\b(?:is|are) no (?!longer|more|less|fewer|such|one\b)[a-z]+",
    "goes on": r"\b(?:goes?|went|going) on\b",
    "beside": r"\bbeside\b",
    "What is/was/came …": r"(?:^|[.;:] )What (?:is|was|are|were|comes?|came|has|had)\b",
    "whoever, whatever": r"\b(?:whoever|whatever|whichever|nobody|somebody)\b",
    "told, said": r"\b(?:is|are|was|were|being) (?:told|said)\b",
    "that of, those of": r"\b(?:that|those) of\b",
    "nor": r"\bnor\b",
    "as far as": r"\bas far as\b",
    "where that is": r"\bwhere (?:that|it|there) (?:is|are)\b",
    "shall": r"\bshall\b",
    "so many": r"\bso (?:many|long|much)\b",
    "a twentieth": r"\b(?:twentieth|tenths?|quarter of an?|half an?)\b",
    "link text of one word": r"\((?:what|rows|which|how|why)\)|\[(?:what|rows|which|how|why|these not)\]",
}
_LOGS = {"debug", "info", "warning", "error", "exception", "critical"}
_PRINTS = {"print", "say", "write", "_note", "SystemExit", "exit", "cleandoc"}
_HELP = {"help", "description", "epilog", "title"}
_TEXT_NAMES = re.compile(r"^_?[A-Z_]*(?:USAGE|HELP|DESCRIPTION|TEXT|CHAT|COMPLETE|MESSAGE|REASON)S?$")
_SHORT = 3  # words: what has fewer is no sentence


class Sentence(NamedTuple):
    """A sentence and the file it is in."""

    words: int
    text: str
    path: Path


def markdown(text: str) -> str:
    """Returns the prose of a page."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "!["))]
    text = "\n".join("\n" + line.lstrip("*- ") if re.match(r"\s*[*-] ", line) else line for line in lines)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]*`", "CODE", text)


def docstrings(text: str) -> str:
    """Returns the docstrings of a module, one paragraph each."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    parts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return re.sub(r"``[^`]*``", "CODE", "\n\n".join(parts))


def strings(text: str) -> str:
    """Returns what a module shows its users, one paragraph each: arguments of exceptions, of logs, of what prints, help
    texts and descriptions, with CODE in the place of values.
    """
    return "\n\n".join(re.sub(r"\s+", " ", each).strip() for each in _shown(ast.parse(text)))


def _shown(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _shown_by_call(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = any(isinstance(target, ast.Name) and _TEXT_NAMES.match(target.id) for target in targets)
            if named and node.value is not None:
                yield from _texts(node.value)


def _shown_by_call(call: ast.Call) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    shows = name in _LOGS | _PRINTS or name.endswith(("Error", "Exception", "error")) or name[:1].isupper()
    if shows or name in ("invalid", "refused", "unsupported", "unavailable"):
        for argument in call.args:
            yield from _texts(argument)
    for keyword in call.keywords:
        if keyword.arg in _HELP:
            yield from _texts(keyword.value)


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.sub(r"%[-0-9.]*[a-z]", "CODE", node.value)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "CODE" for part in node.values)
    elif isinstance(node, ast.BinOp):
        yield from _texts(node.left)
        yield from _texts(node.right)
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)


def sentences(text: str) -> list[str]:
    """Divides paragraphs into sentences."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        joined = " ".join(paragraph.split())
        found += [each for each in re.split(r"(?<=[.!?]) (?=[A-Z*\"(])", joined) if len(each.split()) >= _SHORT]
    return found


def files_below(paths: Sequence[Path], suffixes: Sequence[str]) -> Iterator[Path]:
    """Yields the files, and those below the folders."""
    for path in paths:
        if path.is_dir():
            yield from (each for each in sorted(path.rglob("*")) if each.suffix in suffixes)
        else:
            yield path


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("README.md"), Path("docs")])
    parser.add_argument("--strings", action="store_true", help="what users see of programs")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="the longest sentences")
    parser.add_argument("--hits", action="store_true", help="every pattern and its place")
    given = parser.parse_args()
    files = list(files_below(given.paths, [".py"] if given.strings else [".md", ".py"]))
    found: list[Sentence] = []
    hits: Counter[str] = Counter()
    for path in files:
        text = path.read_text()
        prose = markdown(text) if path.suffix == ".md" else strings(text) if given.strings else docstrings(text)
        for name, pattern in PATTERNS.items():
            for hit in re.finditer(pattern, prose, re.MULTILINE | (0 if name.startswith("What") else re.IGNORECASE)):
                hits[name] += 1
                if given.hits:
                    print(f"{path}: {name}: …{' '.join(prose[max(0, hit.start() - 50) : hit.end() + 40].split())}…")
        found += [Sentence(len(each.split()), each, path) for each in sentences(prose)]
    lengths = [each.words for each in found] or [0]
    words, long = sum(lengths), sum(each > LONG for each in lengths)
    print(
        f"{len(files)} files, {words} words, {len(lengths)} sentences, median {statistics.median(lengths):.0f} words, "
        f"longest {max(lengths)}, {long} ({100 * long / len(lengths):.1f} %) over {LONG} words"
    )
    per_thousand = 1000 * hits.total() / max(words, 1)
    print(f"{hits.total()} patterns ({per_thousand:.1f} per 1,000 words): ", end="")
    print(", ".join(f"{name} {count}" for name, count in hits.most_common()))
    for each in sorted(found, key=lambda each: -each.words)[: given.show]:
        print(f"{each.path}: {each.words} words: {each.text[:300]}")


if __name__ == "__main__":
    main()
