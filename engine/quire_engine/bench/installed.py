"""Which peers there are, and how they are started. Knows where they may be installed, not how they run."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quire_engine.bench.child import PeerProcess, has_module, own_python
from quire_engine.bench.config import PEERS, BenchConfig
from quire_engine.bench.measure import System, SystemFailedError


@dataclass(frozen=True, slots=True)
class Peer:
    """The module that a peer is, the script that runs it, and where ``make peers`` puts its environment."""

    module: str
    script: str
    beside: Path | None = None


INSTALLED = {
    "transformers": Peer("transformers", "run_transformers.py"),
    "vllm": Peer("vllm", "run_vllm.py", Path(".peers/vllm/bin/python")),
    "llama.cpp": Peer("llama_cpp", "run_llama_cpp.py", Path(".peers/llama/bin/python")),
}


def find_peers(config: BenchConfig, settings: Callable[[], Mapping[str, object]]) -> dict[str, Callable[[], System]]:
    """How to start each peer that is wanted. Of those that were not asked for by name, only what is installed. ``told``
    is what they are told, known once the first is started. Raises ``SystemFailedError`` for one that was asked for and
    is not there.
    """
    if "none" in config.against:
        return {}
    found: dict[str, Callable[[], System]] = {}
    for name in PEERS:
        python = _python(config, name) if name in config.against or "auto" in config.against else None
        if python is not None:
            found[name] = partial(_start, python, INSTALLED[name].script, settings)
        elif name in config.against:
            raise SystemFailedError(f"{name} is not installed; docs/bench.md says how.")
    return found


def _python(config: BenchConfig, name: str) -> Path | None:
    """The first interpreter in whose environment a peer is."""
    given = {"vllm": config.vllm_python, "llama.cpp": config.llama_python}.get(name)
    beside = INSTALLED[name].beside
    candidates = [given] if given else [own_python(), *([beside] if beside else [])]
    return next((python for python in candidates if has_module(python, INSTALLED[name].module)), None)


def _start(python: Path, script: str, settings: Callable[[], Mapping[str, object]]) -> System:
    return PeerProcess(python, script, settings(), os.environ)
