"""Fourteen conversations of the kinds that clients send, rendered by the templates here and by transformers.

``python -m tests.support.conversations ARCHIVE...`` renders every template in published packages with both, and writes
the digests to ``tests/unit/proto/published_templates.json``. No text of a template is kept.
"""

import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path, PurePosixPath
from unittest.mock import patch

from quire_proto.errors import QuireError
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.conversation import read_conversation
from transformers.utils.chat_template_utils import render_jinja_template

FIXTURE = Path(__file__).parents[1] / "unit" / "proto" / "published_templates.json"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_FOLDERS = {"trl/chat_templates": "Apache-2.0", "models/templates": "MIT"}
"""Folders of templates in the packages, with the licence of each package."""


def _call(number: int, **arguments: object) -> dict:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _result(number: int, content: str) -> dict:
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": "get_weather", "content": content}


def _said(content: object, **more: object) -> dict:
    return {"role": "assistant", "content": content, **more}


_USER, _AND = {"role": "user", "content": "How is the weather in Rome?"}, {"role": "user", "content": "And now?"}
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}, "required": ["city"]}
_TOOL = {"name": "get_weather", "description": "Tells the weather.", "parameters": _SCHEMA}
_TOOLS = [{"type": "function", "function": _TOOL}]
_ROME = _call(1, city="Rome")
_PARTS = [{"type": "text", "text": "How is the weather "}, {"type": "text", "text": "in Rome?"}]
CONVERSATIONS: dict[str, dict] = {
    "simple": {"messages": [_USER]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, _USER]},
    "turns": {"messages": [_USER, _said("It is sunny."), _AND]},
    "tools": {"messages": [_USER], "tools": _TOOLS},
    "call and result": {"messages": [_USER, _said(None, tool_calls=[_ROME]), _result(1, "sunny")], "tools": _TOOLS},
    "call with text": {
        "messages": [_USER, _said("I look it up.", tool_calls=[_ROME]), _result(1, "sunny"), _said("Sunny."), _AND],
        "tools": _TOOLS,
    },
    "parallel calls": {
        "messages": [
            _USER,
            _said("", tool_calls=[_ROME, _call(2, city="Oslo", days=3)]),
            _result(1, "sunny"),
            _result(2, "cold"),
        ],
        "tools": _TOOLS,
    },
    "reasoning": {"messages": [_USER, _said("Sunny.", reasoning_content="It is July."), _AND]},
    "reasoning and call": {
        "messages": [
            _USER,
            _said("", reasoning_content="I have a tool.", tool_calls=[_ROME]),
            _result(1, "sunny"),
        ],
        "tools": _TOOLS,
    },
    "empty texts": {"messages": [{"role": "user", "content": ""}, _said(""), _AND]},
    "unicode": {"messages": [{"role": "user", "content": "天気は？ 😀 é\u200d<b>&amp;'\"\\n"}]},
    "parts": {"messages": [{"role": "user", "content": _PARTS}]},
    "without thinking": {"messages": [_USER], "options": {"enable_thinking": False}},
    "no generation prompt": {"messages": [_USER, _said("It is sunny.")], "add_generation_prompt": False},
}


class _Noon(datetime):
    """A clock that stands: some templates write the date."""

    @classmethod
    def now(cls, tz: object = None) -> datetime:
        return datetime(2026, 1, 2, 12)


@contextmanager
def standing_clock() -> Iterator[None]:
    """Lets templates read one date, here and in transformers."""
    here, there = "quire_proto.text.chat_template.datetime", "transformers.utils.chat_template_utils.datetime"
    with patch(here, _Noon), patch(there, _Noon):
        yield


def rendered_here(template: ChatTemplate, conversation: Mapping) -> str | None:
    """What a template here makes of a conversation; None if it is refused."""
    fields = {"add_generation_prompt": conversation.get("add_generation_prompt", True)}
    fields["options"] = conversation.get("options", {})
    try:
        return template.render(read_conversation(conversation["messages"])[0], conversation.get("tools", ()), **fields)
    except QuireError:
        return None


def rendered_there(source: str, conversation: Mapping) -> str | None:
    """What transformers makes of it; None if the template refuses it."""
    ask = conversation.get("add_generation_prompt", True)
    variables = {**TOKENS, **conversation.get("options", {})}
    try:
        (text,), _ = render_jinja_template(
            [conversation["messages"]], conversation.get("tools"), None, source, add_generation_prompt=ask, **variables
        )
    except Exception:  # noqa: BLE001 - a template may raise anything
        return None
    return text


def _joined(message: Mapping) -> dict:
    content = message.get("content")
    return {**message, "content": "".join(part["text"] for part in content) if isinstance(content, list) else content}


def _empty(message: Mapping) -> dict:
    return {**message, "content": message["content"] or ""}


def _in_parts(message: Mapping) -> dict:
    content = _joined(message)["content"] or ""
    return {**message, "content": [{"type": "text", "text": content}]}


def _as_text(message: Mapping) -> dict:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _none_beside_calls(message: Mapping) -> dict:
    return {**message, "content": None} if message.get("tool_calls") and not message["content"] else dict(message)


SPELLINGS = {
    "as it is": dict,
    "parts joined, empty for null": lambda message: _empty(_joined(message)),
    "arguments as text": lambda message: _as_text(_empty(_joined(message))),
    "null beside calls, arguments as text": lambda message: _as_text(_none_beside_calls(_joined(message))),
    "in parts": _in_parts,
    "reasoning under each name": lambda message: {
        **_empty(_joined(message)),
        **({"reasoning": message["reasoning_content"]} if "reasoning_content" in message else {}),
    },
}
"""Plainer ways to write the same message."""
AS_IT_IS, REFUSED, SERVED = "as it is", "refused by both", "served here"


def spelled(conversation: Mapping, spelling: str) -> dict:
    """The conversation in another spelling."""
    return {**conversation, "messages": [SPELLINGS[spelling](message) for message in conversation["messages"]]}


def digest(text: str | None) -> str | None:
    """A short digest of a rendering."""
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]


def compared(source: str) -> dict[str, tuple[str, str | None]]:
    """How each conversation is rendered here: which spelling of it transformers renders to the same text, and the
    digest of that. Raises ``AssertionError`` where there is none.
    """
    template, found = ChatTemplate(source, TOKENS, "the test"), {}
    with standing_clock():
        for name, conversation in CONVERSATIONS.items():
            here = rendered_here(template, conversation)
            there = {each: rendered_there(source, spelled(conversation, each)) for each in SPELLINGS}
            same = next((each for each, text in there.items() if text == here), None)
            if here is None:
                same = REFUSED if there[AS_IT_IS] is None else None
            elif not any(there.values()):
                same = SERVED
            assert same is not None, (name, here, there["as it is"])
            found[name] = (same, None if same in (REFUSED, SERVED) else digest(here))
    return found


def fetched(packages: Mapping[str, str], folder: Path) -> list[Path]:
    """The archives of the packages, as pip downloads them. Raises ``AssertionError`` for one that has changed."""
    for name in packages:
        distribution, version = name.removesuffix(".tar.gz").split("-")[:2]
        form = "--only-binary" if name.endswith(".whl") else "--no-binary"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, form, distribution]
        subprocess.run([*pip, f"{distribution}=={version}"], check=True)
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == packages[name], name
    return [folder / name for name in packages]


def templates_in(archive: Path) -> Iterator[tuple[str, str, str]]:
    """Yields the path in a package of each template that serves a model, its text, and the package's licence."""
    for name, data in _files_in(archive):
        path = PurePosixPath(name)
        licence = next((each for folder, each in _FOLDERS.items() if str(path.parent).endswith(folder)), None)
        if licence and path.suffix == ".jinja" and not path.stem.endswith("_training"):
            yield name, data.decode(), licence


def _files_in(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in sorted(wheel.namelist()) if name.endswith(".jinja"))
        return
    with tarfile.open(archive) as sources:
        members = sorted((each for each in sources if each.name.endswith(".jinja")), key=lambda each: each.name)
        yield from ((each.name, sources.extractfile(each).read()) for each in members)


def main(archives: list[Path]) -> None:
    """Writes the fixture."""
    rows = []
    for archive in archives:
        for name, source, licence in templates_in(archive):
            try:
                found = compared(source)
            except AssertionError as difference:
                print(archive.name, name, str(difference)[:1500], file=sys.stderr)
                continue
            sha256 = hashlib.sha256(source.encode()).hexdigest()
            row = {"package": archive.name, "file": name, "licence": licence, "sha256": sha256}
            row["digests"] = [rendering for _, rendering in found.values()]
            row["spellings"] = {each: how for each, (how, _) in found.items() if how != AS_IT_IS}
            rows.append(row)
    packages = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in archives}
    lines = ",\n".join(map(json.dumps, rows))
    FIXTURE.write_text(f'{{"packages": {json.dumps(packages)},\n"templates": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]])
