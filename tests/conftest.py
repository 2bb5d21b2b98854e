"""Settings of the whole test run."""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# The models here are tiny: more threads would only wait for each other, and the engines that tests start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Who started the tests may ignore Ctrl-C, as a shell does for what it runs in the background: programs that tests
# start, and interrupt, would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine may take as long as it likes. Most properties that break do so in the first few examples.
# A run that decides whether a change lands does not depend on luck: there, examples are the same each time, and fewer.
CI = bool(os.environ.get("CI"))
settings.register_profile("quire", max_examples=25 if CI else 40, deadline=None, derandomize=CI)
settings.load_profile("quire")


# Folders whose tests compute, many in processes of their own; and those whose tests are short or mostly wait. Folders
# with files that take long come first, so that no worker has one left when the others have ended.
COMPUTING = ("chaos", "service", "clients", "browser", "cluster", "gpu", "model")
WAITING = ("unit/cli", "kube", "sim", "unit/proto", "unit/house", "unit/engine", "unit/examples", "unit/router")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mixes files of both kinds where several workers run them, which then have all cores busy from begin to end."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    folder, files = Path(__file__).parent, list(dict.fromkeys(item.path for item in items))
    places: dict[Path, float] = {}
    for kind in (COMPUTING, WAITING):
        own = [path for name in kind for path in files if path.is_relative_to(folder / name)]
        places |= {path: number / len(own) for number, path in enumerate(own)}
    items.sort(key=lambda item: places.get(item.path, 0.0))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spares the garbage collector a million objects that stay until the end: what was imported and collected."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
