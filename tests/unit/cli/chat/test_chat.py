"""``quire chat`` and ``quire complete`` print an answer once, whatever happens to its connections."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_cli.chat.api_client import ApiClient, ApiError
from quire_cli.machine.running import registered
from quire_proto.terminal import BOLD, CYAN, DIM, PLAIN

from tests.support.ports import free_port
from tests.support.processes import eventually
from tests.support.running_servers import a_server
from tests.support.terminals import in_terminal, plain, terminal

WORDS = ["Once", " upon", " a", " time", ",", " there", " was", " a", " fox", "."]


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Server:
    """Answers chats and completions with ``words``, in events with ids, and cuts each connection after as many events
    as ``cuts`` says, one number for each connection, until none is left.
    """

    port: int
    cuts: list[int] = field(default_factory=list)
    models: tuple[str, ...] = ("demo",)
    adapters: Mapping[str, str] = field(default_factory=dict)  # and the model of each
    ids: bool = True
    error: dict[str, Any] | None = None  # sent in the place of a cut
    forgets: bool = False
    refuses: bool = False  # every completion
    hangs: bool = False  # after the first event
    comment: str = ""  # before the first event of each connection
    words: Sequence[str] = tuple(WORDS)
    asked: list[Asked] = field(default_factory=list)
    closed: Event = field(default_factory=Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def of(self, path: str) -> list[Asked]:
        return [asked for asked in self.asked if path in asked.path]


class Handler(BaseHTTPRequestHandler):
    script: Server

    def do_GET(self) -> None:
        self.note({})
        if self.path == "/v1/fleet/events":
            self.whole(404, {"error": {"message": "There is nothing here."}})
        elif self.path == "/v1/models":
            adapters = [{"id": name, "parent": parent} for name, parent in self.script.adapters.items()]
            self.whole(200, {"data": [{"id": name, "parent": None} for name in self.script.models] + adapters})
        elif self.script.forgets:
            self.whole(404, {"error": {"message": "There is no such request."}})
        else:
            self.events(int(self.headers["Last-Event-ID"]) + 1)

    def do_POST(self) -> None:
        self.note(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))
        if self.path.endswith("/cancel"):
            self.whole(200, {})
        elif self.script.refuses:
            self.whole(400, {"error": {"message": "Too many tokens."}})
        else:
            self.events(0)

    def note(self, body: dict[str, Any]) -> None:
        self.script.asked.append(Asked(self.command, self.path, dict(self.headers.items()), body))

    def whole(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def events(self, first: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if self.script.comment:
            self.wfile.write(f": {self.script.comment}\n".encode())
        left = self.script.cuts.pop(0) if self.script.cuts else len(self.script.words) + 1
        for position, word in list(enumerate(self.script.words))[first:]:
            if left == 0:
                return self.cut()
            left -= 1
            choice = {"index": 0, "text": word, "delta": {"content": word}}
            self.event({"id": "cmpl-7", "choices": [choice]}, f"id: {position}\n" if self.script.ids else "")
            if self.script.hangs:
                self.script.closed.wait(60)
                return
        if left == 0:
            return self.cut()
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, content: object, event_id: str = "") -> None:
        self.wfile.write(f"{event_id}data: {json.dumps(content)}\n\n: waiting\n".encode())

    def cut(self) -> None:
        if self.script.error:
            self.event({"error": self.script.error})

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(**behaviour: Any) -> Iterator[Server]:
    server = Server(**{"port": free_port(), **behaviour})
    with ThreadingHTTPServer(("127.0.0.1", server.port), type("Scripted", (Handler,), {"script": server})) as listening:
        thread = Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.closed.set()
            listening.shutdown()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_cli.chat.api_client.PAUSE", 0.0)


def text_of(client: ApiClient) -> str:
    chunks = client.stream("/completions", {"model": "demo", "prompt": "x"})
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@given(cuts=st.lists(st.integers(0, len(WORDS)), max_size=5), resumable_error=st.booleans())
def test_wherever_connections_are_cut_every_token_comes_once(cuts: list[int], resumable_error: bool) -> None:
    error = {"message": "This router is shutting down.", "resumable": True} if resumable_error else None
    with serving(cuts=list(cuts), error=error) as server:
        assert text_of(ApiClient(server.url)) == "".join(WORDS)
        keys = {asked.headers["Idempotency-Key"] for asked in server.of("/completions")}
        assert len(keys) == 1, "the request is the same one until its first event"
        assert not server.of("/cancel")


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ({"cuts": [3], "ids": False}, "the connection was cut, and this server cannot continue an answer"),
        ({"cuts": [3], "forgets": True}, "the server has forgotten the request since"),
        ({"cuts": [3], "error": {"message": "Out of tokens.", "resumable": False}}, "Out of tokens."),
    ],
)
def test_an_answer_that_cannot_go_on_ends_with_a_sentence(behaviour: dict[str, Any], told: str) -> None:
    with serving(**behaviour) as server, pytest.raises(ApiError, match=told):
        text_of(ApiClient(server.url))


def test_a_stream_that_stays_cut_ends() -> None:
    with serving(cuts=[2] + [0] * 100_000) as server, pytest.raises(ApiError, match="ended early"):
        text_of(ApiClient(server.url, patience=0.2))


def test_a_comment_on_a_lost_engine_is_a_note_and_others_are_not() -> None:
    notes: list[str] = []
    with serving(cuts=[3], comment="engine h:1 lost (closed), continued on h:2 after 0.3 s\x1b[2J") as server:
        chunks = ApiClient(server.url).stream("/completions", {"prompt": "x"}, on_note=notes.append)
        assert len([*chunks]) == len(WORDS)
    assert notes == ["engine h:1 lost (closed), continued on h:2 after 0.3 s\\x1b[2J"] * 2, "one on each connection"


def test_who_stops_reading_cancels() -> None:
    with serving() as server:
        chunks = ApiClient(server.url).stream("/completions", {"prompt": "x"})
        next(chunks)
        chunks.close()
        assert [asked.path for asked in server.of("/cancel")] == ["/v1/requests/cmpl-7/cancel"]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_end_with_the_version(suffix: str) -> None:
    with serving() as server:
        assert ApiClient(server.url + suffix).models() == ["demo"]


# The commands


def command(server: Server, *arguments: str) -> list[str]:
    name, *others = arguments
    return [sys.executable, "-m", "quire_cli.main", name, "--url", server.url, *others]


def run(server: Server, *arguments: str, piped: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(server, *arguments), input=piped, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_message_is_answered_by_the_only_model() -> None:
    with serving(cuts=[4]) as server:
        done = run(
            server, "chat", "Tell me", "a story", "--temperature", "0", "--api-key", "secret", piped="about foxes"
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "".join(WORDS) + "\n", "")
        [asked] = server.of("/chat/completions")
        assert asked.headers["Authorization"] == "Bearer secret"
        assert asked.body == {
            "model": "demo",
            "temperature": 0.0,
            "messages": [{"role": "user", "content": "Tell me a story\n\nabout foxes"}],
            "stream": True,
        }


def test_an_adapter_is_no_other_model() -> None:
    with serving(adapters={"polite": "demo"}) as server:
        assert run(server, "complete", "It was so:").returncode == 0
        assert server.of("/completions")[0].body["model"] == "demo"


def test_a_text_is_printed_with_its_continuation() -> None:
    with serving() as server:
        assert run(server, "complete", "It was so:").stdout == f"It was so:{''.join(WORDS)}\n"
        assert server.of("/completions")[0].body["prompt"] == "It was so:"


@pytest.mark.parametrize(
    ("behaviour", "arguments", "status", "told"),
    [
        ({"models": ("a", "b")}, ("chat", "x"), 1, "serves a, b: choose with --model."),
        ({"models": ()}, ("chat", "x"), 1, "serves no model: choose with --model."),
        ({}, ("complete",), 2, "error: PROMPT is needed"),
        ({"refuses": True}, ("complete", "It was so:"), 1, "error: Too many tokens."),
        ({}, ("chat", "--tempratur", "1"), 2, "unknown option --tempratur (did you mean --temperature?)"),
        ({}, ("chat", "x", "--url", f"http://127.0.0.1:{free_port()}"), 1, "quire serve MODEL starts one."),
        ({}, ("chat", "x", "--port", "8001"), 2, "unknown option --port\ntip: use --url"),
        ({}, ("chat", "x", "--url", "ftp://a"), 1, "'ftp://a' is not the URL of a server"),
        ({}, ("chat", "x", "--url", "http://a:99999"), 1, "'http://a:99999' is not the URL of a server"),
        ({}, ("chat", "x", "--url", "http://[::1"), 1, "'http://[::1' is not the URL of a server"),
        ({}, ("chat", "x", "--url", "http://a/b c"), 1, "'http://a/b c' is not the URL of a server"),
        ({}, ("chat", "x", "--api-key", "a\nb"), 1, "the API key has characters that no HTTP header can have"),
        ({}, ("chat", "x", "--api-key", "ключ"), 1, "the API key has characters that no HTTP header can have"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    behaviour: dict[str, Any], arguments: tuple[str, ...], status: int, told: str
) -> None:
    with serving(**behaviour) as server:
        done = run(server, *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert told in done.stderr
    assert [line.partition(": ")[0] for line in done.stderr.splitlines()] in (["error"], ["error", "tip"])


def test_a_server_of_another_protocol_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        thread = Thread(target=answer)
        thread.start()
        with pytest.raises(ApiError, match=r"does not speak HTTP/1, .*: --url names the port of the REST API"):
            ApiClient(f"http://127.0.0.1:{listener.getsockname()[1]}").models()
        thread.join()


class Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("asked", [("chat", "x"), ("complete", "x"), ("bench", "serve", "--num-prompts", "1")])
def test_a_strangers_page_is_not_shown(asked: tuple[str, ...]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", free_port()), Stranger) as listening:
        Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        url = f"http://127.0.0.1:{listening.server_port}"
        command = [sys.executable, "-m", "quire_cli.main", *asked, "--url", url]
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60, check=False)
        listening.shutdown()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {url} is not an OpenAI-compatible server (it answers HTTP 404 without an error object): check --url.\n"
    )


def test_without_a_url_the_server_that_runs_here_answers() -> None:
    with serving() as server, registered(a_server(server.url)):
        command = [sys.executable, "-m", "quire_cli.main", "complete", "It was so:"]
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (f"It was so:{''.join(WORDS)}\n", "")


def test_ctrl_c_cancels_the_request() -> None:
    with serving(hangs=True) as server:
        asking = subprocess.Popen(command(server, "chat", "x"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert asking.stdout is not None
        assert asking.stdout.read(4) == b"Once"
        # A signal between Python's last look for one and the system call that waits for data is seen when data come.
        eventually(lambda: psutil.Process(asking.pid).status() == psutil.STATUS_SLEEPING)
        sleep(0.2)
        asking.send_signal(signal.SIGINT)
        assert asking.wait(30) == 130
        assert server.of("/cancel")


MARKDOWN = (
    "# He",
    "ad\n\nThis is **bo",
    "ld** and `co",
    "de`:\n- item\n```py",
    "thon\nx = 1  # one\n",
    "```\nThe end**",
)


def test_in_a_terminal_markdown_is_shown_in_colors_and_nothing_is_lost() -> None:
    with serving(words=MARKDOWN) as server:
        shown = in_terminal(command(server, "chat", "hello"), environment={"NO_COLOR": ""})
    for part in (f"{CYAN}Head{PLAIN}", f"{BOLD}bold{PLAIN}", "• item", f"{DIM}```python{PLAIN}"):
        assert part in shown
    assert re.search(r"x = \x1b\[\d+m1\x1b", shown)
    assert plain(shown).startswith("Head\n\nThis is bold and code:\n• item\n```python\nx = 1  # one\n```\nThe end**\n")


@pytest.mark.parametrize(("arguments", "variables"), [(["--raw"], {}), ([], {"NO_COLOR": "1"}), ([], {"TERM": "dumb"})])
def test_who_wants_no_colors_gets_markdown_as_it_is(arguments: list[str], variables: dict[str, str]) -> None:
    with serving(words=MARKDOWN) as server:
        shown = in_terminal(command(server, "chat", *arguments, "hello"), environment={"NO_COLOR": "", **variables})
    assert plain(shown).startswith("".join(MARKDOWN) + "\n")
    if variables:
        assert "\x1b[1" not in shown


def test_elsewhere_than_in_a_terminal_markdown_stays_as_it_is() -> None:
    with serving(words=MARKDOWN) as server:
        assert run(server, "chat", "hello").stdout == "".join(MARKDOWN) + "\n"


def test_the_model_sees_the_conversation_until_another_one_begins() -> None:
    with serving() as server, conversation(command(server, "chat", "--system", "Be brief.")) as (type_in, shown):
        answer = "".join(WORDS)
        lines = ("first", "second", "/help", "/modle", "/clear", " /etc is a folder", "/etc/hosts", "/system Be kind.")
        for number, line in enumerate([*lines, '"""one', 'two"""'], 1):
            type_in(f"{line}\n")
            eventually(lambda number=number: len(re.findall("> |… ", shown())) > number)
        type_in("\x04")
        assert [
            [message["content"] for message in asked.body["messages"]] for asked in server.of("/chat/completions")
        ] == [
            ["Be brief.", "first"],
            ["Be brief.", "first", answer, "second"],
            ["Be brief.", "/etc is a folder"],
            ["Be brief.", "/etc is a folder", answer, "/etc/hosts"],
            ["Be kind.", "one\ntwo"],
        ]
        assert "/bye            end" in shown()
        assert "unknown command /modle (did you mean /model?)" in shown()


def test_a_conversation_continues_with_another_model_and_is_saved(tmp_path: Path) -> None:
    file = tmp_path / "saved.json"
    asking = ("chat", "--model", "a")
    with serving(models=("a", "b")) as server, conversation(command(server, *asking)) as (type_in, shown):
        for number, line in enumerate(("/model", "/model b", "hello", f"/save {file}", f"/save {file}"), 1):
            type_in(f"{line}\n")
            eventually(lambda number=number: shown().count("> ") > number)
        type_in("\x04")
        assert re.search(r"^\* a\s+  b\s", shown(), re.MULTILINE)
        assert server.of("/chat/completions")[0].body["model"] == "b"
        assert "saved.json cannot be written: File exists" in shown()
    saved = json.loads(file.read_text())
    assert (saved["model"], [message["content"] for message in saved["messages"]]) == ("b", ["hello", "".join(WORDS)])
    assert file.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_at_the_prompt_clears_the_line_and_says_how_to_leave() -> None:
    with serving() as server, conversation(command(server, "chat")) as (type_in, shown):
        type_in("half a sentence\x03")
        eventually(lambda: shown().count("/bye or Ctrl-D ends") == 2)
        type_in("whole\n")
        eventually(lambda: server.of("/chat/completions"))
        type_in("/bye\n")
        assert server.of("/chat/completions")[0].body["messages"][-1]["content"] == "whole"


def test_ctrl_c_ends_an_answer_and_not_the_conversation() -> None:
    with serving(hangs=True) as server, conversation(command(server, "chat")) as (type_in, shown):
        type_in("first\n")
        eventually(lambda: "Once" in shown())
        sleep(0.2)
        type_in("\x03")
        eventually(lambda: server.of("/cancel"))
        server.hangs = False
        type_in("second\n")
        eventually(lambda: "fox." in shown())
        type_in("/bye\n")
        assert [message["content"] for message in server.of("/chat/completions")[1].body["messages"]] == ["second"]


def test_lines_are_remembered_for_the_next_conversation_and_private(state_folder: Path) -> None:
    with serving() as server:
        with conversation(command(server, "chat")) as (type_in, shown):
            type_in("a secret\n")
            eventually(lambda: "fox." in shown())
            type_in("/bye\n")
        file = state_folder / "quire/chat_history"
        assert file.stat().st_mode & 0o777 == 0o600
        with conversation(command(server, "chat")) as (type_in, shown):
            type_in("\x1b[A\x1b[A\n")
            eventually(lambda: "fox." in shown())
            type_in("/bye\n")
        assert server.of("/chat/completions")[1].body["messages"][-1]["content"] == "a secret"


def test_a_server_that_is_starting_is_waited_for() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with registered(a_server(url)):
        asking = subprocess.Popen(
            [sys.executable, "-m", "quire_cli.main", "complete", "It was so:"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        eventually(lambda: psutil.Process(asking.pid).status() == psutil.STATUS_SLEEPING)
        with serving(port=int(url.rpartition(":")[2])):
            assert asking.communicate(timeout=60)[0] == f"It was so:{''.join(WORDS)}\n"


@pytest.mark.parametrize("word", ["/exit", "/bye"])
def test_a_conversation_ends_by_a_word(word: str) -> None:
    with serving() as server, conversation(command(server, "chat")) as (type_in, _):
        type_in(f"{word}\n")
    assert not server.of("/chat")


@contextmanager
def conversation(arguments: list[str]) -> Iterator[tuple[Callable[[str], None], Callable[[], str]]]:
    """Runs a command in a terminal; it has to end by itself, with 0."""
    with terminal(arguments, prompt="> ") as running:
        yield running.type_in, lambda: running.shown
        assert running.end() == 0
