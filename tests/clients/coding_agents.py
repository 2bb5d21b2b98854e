"""Coding agents at the command line, each in a home of its own, and a recorder of what they send and get."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import urlsplit

from tests.clients.suite import CLIENTS, CODING_AGENTS, DEMO, MODEL, TIMEOUT

LENGTH = 12
"""Tokens of each answer: the demo model goes on talking, and an answer that a limit cuts is an error to some agents."""
EOS = json.loads((DEMO / "generation_config.json").read_text())["eos_token_id"]
BRIEF = {"min_tokens": LENGTH, "logit_bias": {str(EOS): 100}}


@dataclass
class Exchange:
    """A request and what came of it."""

    request: dict[str, Any]
    status: int = 0
    events: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether its stream came to its end: that of a chat, of a message of Anthropic's API, or of a response."""
        last = self.events[-1]
        return last in ("[DONE]", '{"type":"message_stop"}') or json.loads(last).get("type") == "response.completed"

    @property
    def text(self) -> str:
        """The answer, with one space between its words."""
        chunks = [json.loads(event) for event in self.events if event != "[DONE]"]
        pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ())]
        deltas = [chunk["delta"] for chunk in chunks if "delta" in chunk]
        pieces += [delta if isinstance(delta, str) else delta.get("text") or "" for delta in deltas]
        return " ".join("".join(pieces).split())


@contextmanager
def recorder(url: str) -> Iterator[tuple[str, list[Exchange]]]:
    """A way to the router at ``url``, and what passed it in streams, each of which gets a brief answer."""
    exchanges: list[Exchange] = []
    handler = type("Handler", (_Recorder,), {"target": urlsplit(url).netloc, "exchanges": exchanges})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, name="recorder")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", exchanges
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Recorder(BaseHTTPRequestHandler):
    target: ClassVar[str]
    exchanges: ClassVar[list[Exchange]]

    def do_GET(self) -> None:
        self._forward(None)

    def do_HEAD(self) -> None:
        self._forward(None)

    def do_POST(self) -> None:
        self._forward(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _forward(self, request: dict[str, Any] | None) -> None:
        exchange = Exchange(dict(request or {}))
        if request is not None:
            self.exchanges.append(exchange)
            request.pop("max_completion_tokens", None)
            limit = "max_output_tokens" if self.path.endswith("/responses") else "max_tokens"
            request |= BRIEF | {limit: 4 * LENGTH}
        left_out = ("host", "content-length", "accept-encoding", "connection")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        connection = HTTPConnection(self.target)
        connection.request(self.command, self.path, json.dumps(request) if request else None, headers)
        answer = connection.getresponse()
        exchange.status = answer.status
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
        self.send_header("Connection", "close")
        self.end_headers()
        for line in answer:
            self.wfile.write(line)
            self.wfile.flush()
            if line.startswith(b"data: "):
                exchange.events.append(line[6:].decode().strip())
        connection.close()

    def log_message(self, *arguments: object) -> None:
        pass


@dataclass(frozen=True)
class Agent:
    """Its program, the words that give it a question, and what writes its settings for a URL into a home."""

    program: str
    words: tuple[str, ...]
    settle: Callable[["Agent", Path, str], None]
    has_tools: bool = True

    def ask(self, question: str, home: Path, url: str) -> str:
        """What it prints, with one space between its words."""
        self.settle(self, home, url)
        return " ".join(self.run(home, *self.words, question).split())

    def run(self, home: Path, *words: str) -> str:
        """Runs it in an empty folder, with no settings of the user's own and nobody to report to."""
        silent = {"CONTINUE_TELEMETRY_ENABLED": "0", "OPENCODE_DISABLE_MODELS_FETCH": "1", "DO_NOT_TRACK": "1"}
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "OPENAI_API_KEY": "none", **silent}
        work, command = home / "work", [str(CODING_AGENTS / self.program), *words]
        work.mkdir(exist_ok=True)
        done = subprocess.run(
            command,
            cwd=work,
            env=environment,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def _write(path: Path, settings: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings))


def _opencode(_: Agent, home: Path, url: str) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Quire",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 65536, "output": 64}}},
    }
    named = dict.fromkeys(("model", "small_model"), f"quire/{MODEL}")
    own = {"autoupdate": False, "share": "disabled", "provider": {"quire": provider}, **named}
    _write(home / ".config" / "opencode" / "opencode.json", own)


def _qwen_code(_: Agent, home: Path, url: str) -> None:
    model = {"name": MODEL, "generationConfig": {"samplingParams": {"max_tokens": 64}}}
    login = {"selectedType": "openai", "baseUrl": f"{url}/v1", "apiKey": "none"}
    _write(
        home / ".qwen" / "settings.json",
        {
            "security": {"auth": login},
            "model": model,
            "memory": {"enableManagedAutoMemory": False},
            "privacy": {"usageStatisticsEnabled": False},
        },
    )


def _continue(_: Agent, home: Path, url: str) -> None:
    model = {"name": MODEL, "provider": "openai", "model": MODEL, "apiBase": f"{url}/v1", "apiKey": "none"}
    _write(
        home / "config.yaml",
        {"name": "quire", "version": "1.0.0", "schema": "v1", "models": [{**model, "roles": ["chat"]}]},
    )


def _cline(agent: Agent, home: Path, url: str) -> None:
    agent.run(home, "auth", "openai-compatible", "--apikey", "none", "--modelid", MODEL, "--baseurl", f"{url}/v1")


def _aider(_: Agent, home: Path, url: str) -> None:
    alone = {"git": False, "yes-always": True, "check-update": False, "analytics-disable": True, "pretty": False}
    _write(home / ".aider.conf.yml", {"model": f"openai/{MODEL}", "openai-api-base": f"{url}/v1", **alone})


def _claude_code(_: Agent, home: Path, url: str) -> None:
    models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), MODEL)
    alone = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    context = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536"}
    access = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none"}
    _write(home / ".claude" / "settings.json", {"env": {**access, **models, **context, **alone}})


def _codex(_: Agent, home: Path, url: str) -> None:
    """It offers its own web search, which would run at the server, and is left out there."""
    provider = {"name": "Quire", "base_url": f"{url}/v1", "wire_api": "responses", "env_key": "OPENAI_API_KEY"}
    own = {"model": MODEL, "model_provider": "quire", "check_for_update_on_startup": False}
    lines = [*_toml(own), "[analytics]", "enabled = false", "[model_providers.quire]", *_toml(provider)]
    path = home / ".codex" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))


def _toml(fields: dict[str, object]) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in fields.items()]


OPENCODE = Agent("opencode", ("run",), _opencode)
QWEN_CODE = Agent("qwen", ("--exclude-tools", "agent", "skill", "todo_write", "-p"), _qwen_code)
"""Without its three longest tools and its memory, which asks a second time: with them a question has 51,000 tokens."""
CONTINUE = Agent("cn", ("--config", "../config.yaml", "-p"), _continue)
CLINE = Agent("cline", ("--retries", "1", "--auto-approve", "false"), _cline)
CLAUDE_CODE = Agent("claude", ("--tools", "Bash,Edit,Read", "-p"), _claude_code)
"""With few of its tools: a prompt with all of them has 43,000 tokens of the demo model."""
CODEX = Agent("codex", ("exec", "--skip-git-repo-check"), _codex)
AIDER = Agent(str(CLIENTS / "aider" / "bin" / "aider"), ("--no-show-model-warnings", "--message"), _aider, False)
