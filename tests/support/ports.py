"""Ports for processes that tests start."""

import os
import random
import socket

_FIRST, _OF_A_WORKER, _WORKERS = 20_000, 3_000, 4
_given: set[int] = set()


def free_port() -> int:
    """A port that nothing listens on, and that was not given before. It is below those that the kernel gives out by
    itself, so that no connection takes it before it is used, and tests that run side by side draw from parts of their
    own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    first = _FIRST + worker * _OF_A_WORKER
    while True:
        port = random.SystemRandom().randrange(first, first + _OF_A_WORKER)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
