"""File descriptors: as many as the machine allows are asked for, and where there are too few the log says so."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.service.conftest import DEMO
from tests.support.processes import Router, eventually, fetch

HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
FEW = 400


@pytest.fixture
def router(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Router]:
    """A router that begins with these limits."""
    router = Router(DEMO, [], tmp_path, "--max-connections", "8192")
    try:
        psutil.Process(router.popen.pid).rlimit(psutil.RLIMIT_NOFILE, request.param)  # long before it has loaded
        eventually(lambda: fetch(router.http_port, "/live")[0] == 200, 60)
        yield router
    finally:
        router.stop()


@pytest.mark.parametrize("router", [(256, HARD)], indirect=True)
def test_the_soft_limit_is_raised_to_the_hard_one(router: Router) -> None:
    soft, hard = psutil.Process(router.popen.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == min(hard, 2**20)


@pytest.mark.parametrize("router", [(FEW, FEW)], indirect=True)
def test_ports_admit_as_many_connections_as_descriptors_allow_and_log_it(router: Router) -> None:
    (warning,) = [line for line in router.text.splitlines() if "file descriptors" in line]
    assert str(FEW) in warning
    assert "--max-connections 8192" in warning
    with ExitStack() as opened:
        for _ in range(2 * FEW):
            opened.enter_context(socket.create_connection(("127.0.0.1", router.http_port), timeout=10))
        assert fetch(router.http_port, "/live")[0] == 200
        assert fetch(router.metrics_port, "/live")[0] == 200
    assert "no file descriptor is left" not in router.text


@pytest.mark.parametrize("router", [(256, HARD)], indirect=True)
def test_running_out_of_descriptors_is_logged_once(router: Router) -> None:
    process = psutil.Process(router.popen.pid)
    limits = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
    eventually(lambda: "no file descriptor is left" in router.text)
    assert fetch(router.http_port, "/live")[0] == 0
    process.rlimit(psutil.RLIMIT_NOFILE, limits)
    eventually(lambda: fetch(router.http_port, "/live")[0] == 200)
    assert router.text.count("no file descriptor is left") == 1
