"""The snippets of docs/recipes.md run as they stand: each calls its tool and prints the answer that follows."""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from quire_router.core.generation import Delta, GenerationRequest

from tests.clients.suite import CLIENTS, MODEL, TIMEOUT, VERCEL, Server, needs
from tests.clients.table import PAGE
from tests.support.scripted_api import Limits, ScriptedRunner, open_stage, script_of
from tests.support.tool_models import HERMES_TEMPLATE

STATED_URL, STATED_MODEL = "http://127.0.0.1:8000", "qwen3"
CALL = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': {'city': 'Rome'}})}\n</tool_call>"
TEXT = "Take a hat."
LANGCHAIN, LLAMAINDEX = (CLIENTS / name / "bin" / "python" for name in ("langchain", "llamaindex"))


class CallsOnce(ScriptedRunner):
    """A model that writes ``first`` in its first answer, by default a call of the tool, and ``then`` in every other."""

    def __init__(self, first: str = CALL, then: str = TEXT) -> None:
        super().__init__()
        self.first = first
        self.then = then

    async def _play(self, generation: GenerationRequest) -> AsyncIterator[Delta]:
        self.script = script_of(self.first if len(self.generations) == 1 else self.then)
        async for delta in super()._play(generation):
            yield delta


def snippet(heading: str, language: str, number: int = 0) -> str:
    """One of the blocks of code under a heading of the page."""
    _, _, section = PAGE.read_text().partition(f"\n## {heading}\n")
    found = re.findall(rf"^```{language}\n(.*?)^```$", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    return str(found[number])


def run(program: str, command: Sequence[object], file: Path) -> subprocess.CompletedProcess[str]:
    """Writes the program into the file, and runs it by the command."""
    file.write_text(program)
    words = [str(word) for word in (*command, file)]
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=TIMEOUT)


async def check(program: str, command: Sequence[object], file: Path) -> None:
    """The program calls the tool, gives its result back, and prints what the model then says."""
    runner = CallsOnce()
    assert await printed_by(program, command, file, runner) == TEXT
    assert len(runner.generations) == 2


async def printed_by(program: str, command: Sequence[object], file: Path, runner: CallsOnce) -> str:
    """What the program prints, which has to end well."""
    async with open_stage(template=HERMES_TEMPLATE, runner=runner, models=(STATED_MODEL,)) as stage:
        stage.fleet.model_limits = Limits(32_768)
        assert STATED_URL in program
        done = await asyncio.to_thread(run, program.replace(STATED_URL, stage.url), command, file)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


TOGETHER, AGENT, MESSAGES, STRUCTURED, BIND_TOOLS, STRICT = range(6)
"""The blocks under LangChain."""


@pytest.mark.parametrize(
    ("heading", "number", "python"),
    [
        pytest.param("LangChain", AGENT, LANGCHAIN, marks=needs(LANGCHAIN)),
        pytest.param("LlamaIndex", 0, LLAMAINDEX, marks=needs(LLAMAINDEX)),
    ],
)
async def test_the_snippets_in_python_call_their_tool(heading: str, number: int, python: Path, tmp_path: Path) -> None:
    await check(snippet(heading, "python", number), [python], tmp_path / "snippet.py")


EVENTS = """run = agent.stream_events({"messages": [{"role": "user", "content": "Rome?"}]}, version="v3")
"""
REPORT = {"city": "Rome", "degrees": 21}
ONE_CALL = 'model_kwargs={"parallel_tool_calls": False}'


def call_of(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def langchain(until: str, more: str = "") -> str:
    """What stands before ``until`` in LangChain's short agent, whose model may get ``more``."""
    begin, _, _ = snippet("LangChain", "python", AGENT).partition(until)
    return begin.replace('model="qwen3")', f'model="qwen3", {more})') if more else begin


@needs(LANGCHAIN)
@pytest.mark.parametrize(
    "stream",
    [
        snippet("LangChain", "python", MESSAGES),
        f"{EVENTS}for message in run.messages:\n    print(*message.text, sep='', end='')",
    ],
    ids=["stream", "stream_events"],
)
async def test_the_agent_of_langchain_is_streamed_in_the_two_ways_of_the_page(stream: str, tmp_path: Path) -> None:
    await check(langchain("answer = ") + stream, [LANGCHAIN], tmp_path / "snippet.py")


@needs(LANGCHAIN)
async def test_the_calls_of_bound_tools_are_printed_as_on_the_page(tmp_path: Path) -> None:
    program = langchain("agent = ") + snippet("LangChain", "python", BIND_TOOLS)
    printed = await printed_by(program, [LANGCHAIN], tmp_path / "snippet.py", CallsOnce())
    shown = re.sub(r"call_[0-9a-f]+", "call_…", printed)
    assert f"This prints `{shown}`." in PAGE.read_text()


@needs(LANGCHAIN)
@pytest.mark.parametrize("more", ["", ONE_CALL])
async def test_a_form_of_the_page_is_filled_and_one_call_at_a_time_does_not_hinder_it(
    more: str, tmp_path: Path
) -> None:
    runner = CallsOnce(json.dumps(REPORT))
    program = langchain("agent = ", more) + snippet("LangChain", "python", STRUCTURED)
    printed = await printed_by(program, [LANGCHAIN], tmp_path / "snippet.py", runner)
    assert f"This prints `{printed}`." in PAGE.read_text()
    assert "StructuredKind" in repr(runner.generations[0])


@needs(LANGCHAIN)
async def test_one_call_at_a_time_leaves_calls_without_tools_as_they_are(tmp_path: Path) -> None:
    runner = CallsOnce(TEXT)
    program = f"{langchain('agent = ', ONE_CALL)}print(model.invoke('Hello').text)"
    assert await printed_by(program, [LANGCHAIN], tmp_path / "snippet.py", runner) == TEXT
    assert "StructuredKind" not in repr(runner.generations[0])


ONE_ROUND = "middleware=[one_round], "


@needs(LANGCHAIN)
@pytest.mark.parametrize("as_a_tool", [False, True])
async def test_an_agent_streams_its_structured_answer_after_its_calls(as_a_tool: bool, tmp_path: Path) -> None:
    """Where the form is one more tool, the answer is a call: LangChain writes a line of its own and no JSON."""
    program, text = snippet("LangChain", "python", TOGETHER), json.dumps(REPORT)
    printed = "city='Rome' degrees=21"
    assert f"`{text}`, and then prints the object, `{printed}`." in PAGE.read_text()
    if as_a_tool:
        program = program.replace("ProviderStrategy(Report)", "Report").replace(ONE_ROUND, "")
    runner = CallsOnce(then=call_of(json.dumps({"name": "Report", "arguments": REPORT})) if as_a_tool else text)
    seen = await printed_by(program, [LANGCHAIN], tmp_path / "snippet.py", runner)
    first = f"Returning structured response: {printed}" if as_a_tool else text
    assert seen == f"{first}\n{printed}"
    last = "StructuredKind.GRAMMAR" if as_a_tool else "StructuredKind.JSON_SCHEMA"
    for generation, kind in zip(runner.generations, ("StructuredKind.GRAMMAR", last), strict=True):
        assert kind in repr(generation)


@needs(LANGCHAIN)
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_middleware_is_asynchronous_where_its_agent_is(asynchronous: bool, tmp_path: Path) -> None:
    begin, _, _ = snippet("LangChain", "python", TOGETHER).partition("for mode")
    if asynchronous:
        begin = begin.replace("def one_round", "async def one_round").replace("return handler", "return await handler")
    program = f"{begin}import asyncio\nprint(asyncio.run(agent.ainvoke(question))['structured_response'])\n"
    if not asynchronous:
        program = program.replace("print(", "try:\n    print(") + "except NotImplementedError:\n    print('sync')\n"
    runner = CallsOnce(then=json.dumps(REPORT))
    printed = await printed_by(program, [LANGCHAIN], tmp_path / "snippet.py", runner)
    assert printed == ("city='Rome' degrees=21" if asynchronous else "sync")


@needs(LANGCHAIN)
def test_the_demo_model_runs_the_whole_program_of_the_page(server: Server, tmp_path: Path) -> None:
    """Its greedy answer has the form; nonsense is in it, since the model was not trained on forms."""
    program = snippet("LangChain", "python", TOGETHER).replace(STATED_URL, server.url)
    program = program.replace(f'"{STATED_MODEL}"', f'"{MODEL}"').replace("max_tokens", "temperature=0, max_tokens")
    done = run(program, [LANGCHAIN], tmp_path / "snippet.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\ncity='.*' degrees=-?\d+\n$", done.stdout)


NO_JSON = call_of('{"name": "weather", "arguments": {"city": Rome}}')
MALFORMED = {
    "arguments that do not fit": (call_of('{"name": "weather", "arguments": {"town": "Rome"}}'), [TEXT, 0, ["error"]]),
    "arguments that are not JSON": (NO_JSON, ["", 1, []]),
    "no such tool": (other := call_of('{"name": "wether", "arguments": {"city": "Rome"}}'), [other, 0, []]),
    "no name": (nameless := call_of('{"arguments": {"city": "Rome"}}'), [nameless, 0, []]),
}
"""What a model writes in place of a call; the text at the end, how many calls it has, and what became of calls."""
SEEN = """
import json
found = answer["messages"]
states = [each.status for each in found if each.type == "tool"]
print(json.dumps([found[-1].text, len(found[-1].invalid_tool_calls), states]))
"""


@needs(LANGCHAIN)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", MALFORMED)
async def test_langchain_does_with_malformed_calls_what_the_page_says(
    case: str, streamed: bool, tmp_path: Path
) -> None:
    written, expected = MALFORMED[case]
    agent, assigned, asks = snippet("LangChain", "python", AGENT).partition("answer = ")
    whole = f"{assigned}{asks.splitlines()[0]}"
    stream = f"{EVENTS}{assigned}run.output"
    program = f"{agent}{stream if streamed else whole}\n{SEEN}"
    assert json.loads(await printed_by(program, [LANGCHAIN], tmp_path / "snippet.py", CallsOnce(written))) == expected


@needs(LANGCHAIN)
async def test_langchain_closes_missing_brackets_of_a_call_in_a_stream_of_tokens(tmp_path: Path) -> None:
    program = langchain("answer = ") + snippet("LangChain", "python", MESSAGES)
    cut = CallsOnce(call_of('{"name": "weather", "arguments": {"city": "Rome"'))
    assert await printed_by(program, [LANGCHAIN], tmp_path / "snippet.py", cut) == TEXT


@needs(LANGCHAIN)
@pytest.mark.parametrize("strict", [False, True])
async def test_langchain_asks_for_a_grammar_in_the_two_ways_of_the_page(strict: bool, tmp_path: Path) -> None:
    program = snippet("LangChain", "python", AGENT)
    assert f"ChatOpenAI(…, {ONE_CALL})" in PAGE.read_text()
    if strict:
        agent, assigned, asks = program.partition("answer = ")
        program = f"{agent}{snippet('LangChain', 'python', STRICT)}{assigned}{asks}"
    else:
        program = program.replace('model="qwen3")', f'model="qwen3", {ONE_CALL})')
    runner = CallsOnce()
    assert await printed_by(program, [LANGCHAIN], tmp_path / "snippet.py", runner) == TEXT
    assert "StructuredKind.GRAMMAR" in repr(runner.generations[0])


@needs(VERCEL)
async def test_the_snippet_of_the_ai_sdk_calls_its_tool(tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(VERCEL.parent)
    await check(snippet("AI SDK", "js"), ["node"], tmp_path / "snippet.mjs")
