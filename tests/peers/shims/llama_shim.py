"""A pytest plugin for the tests of llama.cpp's server: their ``ServerProcess`` is a server of Quire, which is kept for
the next test that wants the same.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import quire_servers

sys.path.insert(0, os.getcwd())

import utils

_TEMPLATES = Path("../../../models/templates")
_NAMED = {
    "llama3": "meta-llama-Llama-3.2-3B-Instruct",
    "chatml": "Qwen-Qwen2.5-7B-Instruct",
    "command-r": "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
}
"""Templates that llama.cpp has built in, as files of models with the same form."""
_LONG = 2048
"""A context that no test fills: tests that want it, or a longer one, share a server."""
_LONG_OUTPUT = 128
"""The same of outputs."""
_ASKED = re.compile(r"""\bmodel(?:_alias)?["']?\s*[:=]\s*["']([^"']+)["']""")


def names_asked() -> list[str]:
    """Returns the models that the tests start or ask for, as llama.cpp's server answers to any name."""
    texts = (path.read_text() for path in (Path("utils.py"), *Path("unit").glob("*.py")))
    return [name for text in texts for found in _ASKED.findall(text) for name in found.split(",")]


NAMES = names_asked()
SERVERS = quire_servers.Servers()


def arguments_of(server: Any) -> list[str]:
    """Returns the flags that a test's settings are with vLLM's names."""
    length = (server.n_ctx or _LONG) // (1 if server.kv_unified else server.n_slots or 1)
    flags = ["--served-model-name", *NAMES, "--max-model-len", str(length)]
    if server.api_key:
        flags += ["--api-key", server.api_key]
    if server.pooling and server.pooling != "none":
        flags += ["--pooling-type", server.pooling]
    return flags


def template_of(server: Any) -> str | None:
    """Returns the template that a test wants."""
    if server.chat_template_file:
        return Path(server.chat_template_file).read_text(encoding="utf-8")
    if server.chat_template in _NAMED:
        return (_TEMPLATES / f"{_NAMED[server.chat_template]}.jinja").read_text(encoding="utf-8")
    if "DeepSeek-R1" in str(server.model_hf_repo):
        return (_TEMPLATES / "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja").read_text(encoding="utf-8")
    return str(server.chat_template) if server.chat_template else None


def _start(self: Any, timeout_seconds: int = 0) -> None:
    model = f"{self.model_hf_repo or ''}/{self.model_hf_file or ''}"
    limit = self.n_predict if 0 < (self.n_predict or 0) < _LONG_OUTPUT else None
    self.server_port = SERVERS.get(model, arguments_of(self), template_of(self), max_new_tokens=limit).port
    self.server_host = "127.0.0.1"


def _stop(self: Any) -> None:
    """It is kept."""


_UNVERSIONED = ("/chat/completions", "/completions", "/embeddings", "/responses", "/messages")
_make_url = utils.ServerProcess.make_url


def _versioned(self: Any, path: str, host: str | None = None) -> str:
    """Returns the address of a route, with the version that llama.cpp's server lets clients leave out."""
    return str(_make_url(self, f"/v1{path}" if path.startswith(_UNVERSIONED) else path, host))


utils.ServerProcess.make_url = _versioned
utils.ServerProcess.start = _start
utils.ServerProcess.stop = _stop
utils.ServerPreset.load_all = staticmethod(lambda: None)
