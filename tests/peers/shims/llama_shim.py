"""A pytest plugin for the tests of llama.cpp's server: their ``ServerProcess`` is a server of Quire, which is kept for
the next test that wants the same.
"""

import os
import sys
from typing import Any

import quire_servers

sys.path.insert(0, os.getcwd())

import utils

SERVERS = quire_servers.Servers()


def arguments_of(server: Any) -> list[str]:
    """Returns the flags that a test's settings are with vLLM's names."""
    flags = ["--served-model-name", str(server.model_alias or server.model_hf_repo)]
    if server.n_ctx and server.n_slots:
        flags += ["--max-model-len", str(server.n_ctx // server.n_slots)]
    if server.n_slots:
        flags += ["--max-num-seqs", str(max(server.n_slots, 2))]
    return flags


def _start(self: Any, timeout_seconds: int = 0) -> None:
    model = f"{self.model_hf_repo or ''}/{self.model_hf_file or ''}"
    self.server_port = SERVERS.get(model, arguments_of(self)).port
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
