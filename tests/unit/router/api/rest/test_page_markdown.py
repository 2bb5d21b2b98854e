"""Markdown in the page, run by Node on a document that only keeps what is appended."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import quire_router.page

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
MODULES = Path(quire_router.page.__file__).parent
LENGTH = 60_000
HOSTILE = {
    "spaces in a heading": "# a{ }x",
    "spaces in an item": "-{ }x\r",
    "a line break of another kind in an item": "- {a}\u2028",
    "spaces in a rule": "- - -{ }x",
    "spaces in a table": "| a |\n{ }x",
    "cells in a table": "| a |\n{-|}x",
    "backticks": "{`}x",
    "runs of backticks": "{`a``b```c}",
    "strong": "{**a }",
    "strong within strong": "{**a__b}",
    "emphasis": "{*a _b }",
    "deleted": "{~~a ~}",
    "labels": "{[}](https://a.b/",
    "addresses": "{[}](" + "a" * 1500,
    "links": "{[a](b }",
    "escapes": "{\\\\*}",
    "quotes": "{> }",
    "quotes of many lines": "{>>>>>>>>>\n}",
    "items in items": "{  - \n}",
    "fences": "{`}\n{~~~\n}",
    "strings in code": "~~~py\n{'a \"}",
    "comments in code": "~~~c\n{/*}",
    "numbers in code": "~~~js\n{1}x",
    "words in code": "~~~rust\n{a}",
}
DOCUMENT = """
const tags = [];
class Node {
  constructor(name) { this.nodeName = name.toUpperCase(); this.childNodes = []; }
  append(...nodes) { this.childNodes.push(...nodes); }
  set textContent(text) { this.childNodes = [text]; }
  get lastChild() { return { remove: () => this.childNodes.pop() }; }
  setAttribute() {}
  addEventListener() {}
}
const create = (name) => new Node(name);
const createNS = (_, name) => create(name);
globalThis.document = { createElement: create, createElementNS: createNS, createTextNode: (text) => text };
const shown = (node) => typeof node === "string" ? node : [node.nodeName, ...node.childNodes.map(shown)];
const { render } = await import(process.argv[2]);
const texts = JSON.parse(await new Response(process.stdin).text());
for (const [name, text] of Object.entries(texts)) {
  const [parent, begun] = [new Node("div"), process.cpuUsage()];
  render(parent, text);
  const seconds = process.cpuUsage(begun).user / 1e6;
  console.log(JSON.stringify([name, seconds, text.length < 1000 ? shown(parent).slice(1) : null]));
}
"""


def rendered(texts: dict[str, str], tmp_path: Path) -> dict[str, tuple[float, object]]:
    """The processor seconds of each text, and what it became."""
    for module in MODULES.glob("*.js"):
        shutil.copy(module, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "render.js").write_text(DOCUMENT)
    command = ["node", str(tmp_path / "render.js"), str(tmp_path / "markdown.js")]
    found = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True, timeout=60)
    return {name: (seconds, nodes) for name, seconds, nodes in map(json.loads, found.stdout.splitlines())}


def long(pattern: str) -> str:
    """A text of about ``LENGTH`` characters: what stands in braces is repeated."""
    parts = pattern.replace("}", "{").split("{")
    return "".join(part * (LENGTH // len(part)) if number % 2 else part for number, part in enumerate(parts))


def test_a_text_takes_time_in_proportion_to_its_length(tmp_path: Path) -> None:
    found = rendered({name: long(pattern) for name, pattern in HOSTILE.items()}, tmp_path)
    assert found.keys() == HOSTILE.keys()
    assert {name: seconds for name, (seconds, _) in found.items() if seconds > 3} == {}


def test_what_people_write_looks_as_they_mean_it(tmp_path: Path) -> None:
    texts = {
        "### A *title* ##": [["H5", "A ", ["EM", "title"]]],
        "**b** and __c__, *d*, ~~e~~, \\*f*": [
            ["P", ["STRONG", "b"], " and ", ["STRONG", "c"], ", ", ["EM", "d"], ", ", ["DEL", "e"], ", ", "*", "f*"]
        ],
        "``a ` b`` `c`": [["P", ["CODE", "a ` b"], " ", ["CODE", "c"]]],
        "snake_case_name and _____": [["P", "snake_case_name and _____"]],
        "[a [b](https://c.d/e) ![f](http://g)": [["P", ["A", "a [b"], " ", ["A", "image: f"]]],
        "[a](javascript:x)": [["P", "a (javascript:x)"]],
        "1. a\r\n2. b": [["OL", ["LI", "a\r"], ["LI", "b"]]],
        "- - -": [["HR"]],
        "a | b\n:-- | ---\nc | d": [
            ["DIV", ["TABLE", ["THEAD", ["TR", ["TH", "a"], ["TH", "b"]]], ["TBODY", ["TR", ["TD", "c"], ["TD", "d"]]]]]
        ],
        "> a\n> - b": [["BLOCKQUOTE", "a", ["UL", ["LI", "b"]]]],
        "~~~py\nx\n~~~~\ny": [
            ["DIV", ["DIV", ["SPAN", "py"], ["BUTTON", ["SVG", ["PATH"]]]], ["PRE", ["CODE", "x"]]],
            ["P", "y"],
        ],
    }
    assert {text: nodes for text, (_, nodes) in rendered({text: text for text in texts}, tmp_path).items()} == texts
