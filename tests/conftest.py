"""Settings of the whole test run."""

import gc
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings

# The models here are tiny: more threads would only wait for each other, and the engines that tests start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Who started the tests may ignore Ctrl-C, as a shell does for what it runs in the background: programs that tests
# start, and interrupt, would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine may take as long as it likes. Most properties that break do so in the first few examples.
# A run that decides whether a change lands does not depend on luck: there, examples are the same each time.
settings.register_profile("quire", max_examples=40, deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("quire")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spares the garbage collector a million objects that stay until the end: what was imported and collected."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
