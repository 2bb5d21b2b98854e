"""A pytest plugin for the tests of llama.cpp's server: their ``ServerProcess`` is a server of Quire, which is kept for
the next test that wants the same.
"""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import quire_servers

sys.path.insert(0, os.getcwd())

import utils

SERVERS = quire_servers.Servers()


def names_in(texts: Iterable[str]) -> list[str]:
    """Returns the names of models in the sources of tests: llama.cpp's server answers to any name."""
    return sorted({name for text in texts for name in re.findall(r'\bmodel"?[=:] ?"([A-Za-z0-9._/-]+)"', text)})


_NAMES = names_in(path.read_text() for path in Path("unit").glob("*.py"))


def arguments_of(server: Any) -> list[str]:
    """Returns the flags that a test's settings are with vLLM's names."""
    flags = ["--served-model-name", ",".join([str(server.model_alias or server.model_hf_repo), *_NAMES])]
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


utils.ServerProcess.start = _start
utils.ServerProcess.stop = _stop
utils.ServerPreset.load_all = staticmethod(lambda: None)
