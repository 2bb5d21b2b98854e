"""Servers of Quire in place of another project's: what its tests would start becomes a ``quire serve``.

The shims of this folder are loaded into environments of other projects, so this file imports the standard library only.
"""

import atexit
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KEPT = 5
"""Servers that run at a time."""

_START_SECONDS = 240
_PORT_TRIES = 3
_CONTEXT = 8192
"""The context where a test wants none in particular."""
_LONG = 1024
"""No test fills a context of this length, so that those that want it, or one up to ``_CONTEXT``, share a server."""
_KINDS = {
    "rerank": ("reranker", "cross-encoder", "rerank"),
    "embed": ("e5-", "bge-", "minilm", "embed", "gte-", "jina", "arctic", "bert"),
}
"""Words in the names of models, by the checkpoint that stands for them; all others are the chat model."""
_OWN = {"--port", "--host", "--model", "--seed", "--served-model-name", "--http-port"}
_DROPPED = {
    *("--dtype", "--gpu-memory-utilization", "--device", "--kv-cache-memory-bytes", "--block-size"),
    *("--enforce-eager", "--max-num-seqs", "--max-num-batched-tokens", "--enable-prefix-caching", "--runner"),
}
"""Flags about the hardware that the other project's tests run on, and those that change nothing here. Without them more
tests share a server.
"""


class PortTakenError(RuntimeError):
    """Something else listens on a port that was free a moment ago."""


def thinking_template() -> str:
    """Returns a template with which a model thinks before it answers, unless a request says otherwise."""
    templates = Path(os.environ["QUIRE_SOURCES"]) / "llama.cpp/vendor/llama.cpp/models/templates"
    thinks = "{%- set enable_thinking = enable_thinking is not defined or enable_thinking %}"
    return thinks + (templates / "Qwen-QwQ-32B.jinja").read_text(encoding="utf-8")


def checkpoint_kind(model: str) -> str:
    """Returns which checkpoint stands for a model: ``chat``, ``embed`` or ``rerank``."""
    name = model.lower()
    return next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), "chat")


def options(arguments: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Returns the flags of a command line, each with its values."""
    found: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            found.append((name.replace("_", "-"), [value] if equals else []))
        elif found:
            found[-1][1].append(argument)
    return found


def served_names(model: str, arguments: Iterable[str]) -> list[str]:
    """Returns the names that another server's command line gives its model."""
    return [value for name, values in options(arguments) if name == "--served-model-name" for value in values] or [
        model
    ]


def serve_arguments(arguments: Iterable[str], known: frozenset[str], longest: int) -> list[str]:
    """Returns the arguments of ``quire serve`` for those of another server: flags that both have, but for the
    hardware's, with a context that the checkpoint has and tests share.
    """
    chosen, length = [], _CONTEXT
    for name, values in options(arguments):
        if name == "--max-model-len":
            given = int(values[0]) if values and values[0].isdigit() else _CONTEXT
            length = _CONTEXT if _LONG <= given <= _CONTEXT else given
        elif name in known and name not in _OWN | _DROPPED:
            chosen += [name, *values]
    return [*chosen, "--max-model-len", str(min(length, longest))]


@dataclass
class Server:
    """A running ``quire serve``."""

    process: subprocess.Popen[bytes]
    port: int
    names: Sequence[str]

    def stop(self) -> None:
        """Ends it and what it started."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Servers:
    """The servers of one run, kept by their arguments while later tests may want the same. All have ``names``, so that
    tests of several models share one.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = names
        self._command = shlex.split(os.environ["QUIRE_COMMAND"])
        self._checkpoints = Path(os.environ["QUIRE_CHECKPOINTS"])
        self._known = frozenset((self._checkpoints / "flags.txt").read_text().split())
        self._running: dict[tuple[str, ...], Server] = {}
        atexit.register(self.stop)
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    def get(
        self, model: str, arguments: Sequence[str], template: str | None = None, **sampling: float | None
    ) -> Server:
        """Returns a server of the checkpoint that stands for ``model``, with the template and defaults of sampling
        that are given. Raises ``RuntimeError`` if none starts.
        """
        folder = self._variant(self.folder(model), template, sampling)
        config = json.loads((folder / "config.json").read_text())
        key = (str(folder), *serve_arguments(arguments, self._known, config.get("max_position_embeddings", 512)))
        names = served_names(model, arguments)
        server = self._running.pop(key, None)
        if server is not None and not {*names} <= {*server.names}:
            server.stop()
        if server is None or server.process.poll() is not None:
            while len(self._running) >= KEPT:
                self._running.pop(next(iter(self._running))).stop()
            server = self._start(key, list(dict.fromkeys([*names, *self._names])))
        self._running[key] = server
        return server

    def _variant(self, folder: Path, template: str | None, sampling: Mapping[str, float | None]) -> Path:
        """Returns a folder with the files of another, and a template and defaults of its own."""
        given = {name: value for name, value in sampling.items() if value is not None}
        if template is None and not given:
            return folder
        digest = hashlib.sha256(json.dumps([folder.name, template, given], sort_keys=True).encode()).hexdigest()
        variant = self._checkpoints / "variants" / digest[:16]
        if not variant.exists():
            shutil.copytree(folder, variant)
            if template is not None:
                (variant / "chat_template.jinja").write_text(template, encoding="utf-8")
            defaults = variant / "generation_config.json"
            known = json.loads(defaults.read_text()) if defaults.exists() else {}
            defaults.write_text(json.dumps({**known, **given}))
        return variant

    @property
    def adapter(self) -> Path:
        """The folder of a LoRA adapter of the chat model."""
        return self._checkpoints / "lora"

    def folder(self, model: str) -> Path:
        """Returns the folder of the checkpoint that stands for a model."""
        return self._checkpoints / checkpoint_kind(model)

    def _start(self, key: tuple[str, ...], names: Sequence[str]) -> Server:
        for _ in range(_PORT_TRIES - 1):
            with contextlib.suppress(PortTakenError):
                return self._start_once(key, names)
        return self._start_once(key, names)

    def _start_once(self, key: tuple[str, ...], names: Sequence[str]) -> Server:
        port = free_port()
        log = self._checkpoints / f"server-{port}.log"
        fixed = ["--port", str(port), "--no-journal", "--device", "cpu", "--max-num-seqs", "16"]
        fixed += ["--served-model-name", ",".join(names)]
        with log.open("wb") as output:
            process = subprocess.Popen([*self._command, "serve", *key, *fixed], stdout=output, stderr=output)
        server = Server(process, port, names)
        try:
            self._wait(server, log)
        except BaseException:
            server.stop()
            raise
        return server

    @staticmethod
    def _wait(server: Server, log: Path) -> None:
        """Waits until a server and its engine are ready. Raises ``RuntimeError`` if it ends, or takes too long."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and server.process.poll() is None:
            if "ready: " in log.read_text():
                return
            time.sleep(0.3)
        said = log.read_text()
        last = next(reversed(said.splitlines()), "it says nothing")
        error = PortTakenError if "cannot be listened on" in said else RuntimeError
        raise error(f"quire serve did not start: {last} ({log})")

    def stop(self) -> None:
        """Ends all of them."""
        for server in self._running.values():
            server.process.terminate()  # at once, as each takes a while
        for server in self._running.values():
            server.stop()
        self._running.clear()


def free_port() -> int:
    """Returns a port that nothing listens on, nor on the two behind it, which are those of gRPC and of metrics."""
    while True:
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            first = probes.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in (first + 1, first + 2):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            return int(first)
