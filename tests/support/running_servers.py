"""Entries of running servers, as ``quire serve`` leaves them, of any process."""

import os

from quire_cli.machine.running import RunningServer, start_ticks


def a_server(url: str = "http://127.0.0.1:8000", pid: int | None = None, **fields: object) -> RunningServer:
    """A server that this process, or the one with ``pid``, could be."""
    pid = os.getpid() if pid is None else pid
    values: dict[str, object] = {
        "pid": pid, "ticks": start_ticks(pid), "since": 1.0, "url": url, "model": "demo", "source": "demo/model",
        "engines": 2, "device": "cpu", "host": "127.0.0.1", "metrics_port": 9,
    }  # fmt: skip
    return RunningServer(**{**values, **fields})  # type: ignore[arg-type]
