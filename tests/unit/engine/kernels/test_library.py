"""The compiled kernels are there where they can be: without them, tests of each kernel skip."""

import os
import shutil

import pytest
from quire_engine.kernels.bindings import library


@pytest.mark.skipif(os.environ.get("QUIRE_ENGINE_CPU_KERNELS") == "off", reason="the kernels were turned off")
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_where_there_is_a_compiler_there_are_kernels() -> None:
    assert library() is not None
