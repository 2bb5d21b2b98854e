"""The compiled kernels are there where they can be: without them, tests of each kernel skip."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from quire_engine.kernels import bindings
from quire_engine.kernels.bindings import library
from quire_engine.kernels.build import shared_object


@pytest.mark.skipif(os.environ.get("QUIRE_ENGINE_CPU_KERNELS") == "off", reason="the kernels were turned off")
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_where_there_is_a_compiler_there_are_kernels() -> None:
    assert library() is not None


def test_threads_that_load_the_kernels_at_once_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of a second copy would not tell a CPU graph of their calls."""
    if library() is None:
        pytest.skip("there are no kernels")
    path = shared_object()

    def slowly() -> Path:
        time.sleep(0.05)
        return path

    monkeypatch.setattr(bindings, "shared_object", slowly)
    library.cache_clear()
    bindings._load.cache_clear()
    with ThreadPoolExecutor(4) as threads:
        copies = [each.result() for each in [threads.submit(library) for _ in range(4)]]
    assert len({id(copy) for copy in copies}) == 1
    assert library() is copies[0]
