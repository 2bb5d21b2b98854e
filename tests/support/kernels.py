"""The two ways in which the CPU computes: the compiled kernels, and torch alone."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from quire_engine.kernels.bindings import library
from quire_engine.kernels.build import BuildError, shared_object

SWITCH = "QUIRE_ENGINE_CPU_KERNELS"
PATHS = [
    pytest.param(
        "kernel", marks=pytest.mark.skipif(library() is None, reason="the CPU kernels cannot be compiled here")
    ),
    pytest.param("torch"),
]


@contextmanager
def cpu_path(path: str) -> Iterator[None]:
    """Whatever is loaded and run inside computes by ``kernel`` or by ``torch``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "on" if path == "kernel" else "off")
        library.cache_clear()
        assert (library() is not None) == (path == "kernel")
        try:
            yield
        finally:
            patch.undo()
            library.cache_clear()


def cache_with_kernels(folder: Path) -> Path:
    """A folder for ``$XDG_CACHE_HOME`` that has nothing but the compiled kernels, where there are any."""
    cache = folder / "cache"
    (cache / "quire").mkdir(mode=0o700, parents=True)
    with suppress(BuildError):
        shutil.copy(shared_object(), cache / "quire")
    return cache
