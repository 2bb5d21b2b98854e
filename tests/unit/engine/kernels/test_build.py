"""When an engine says beforehand that it will compile its kernels."""

from pathlib import Path

import pytest
from quire_engine.kernels import build


@pytest.mark.parametrize(
    ("switch", "built", "compiler", "needed"),
    [
        ("on", False, "c++", True),
        ("neither", False, "c++", True),  # what is not understood counts as on
        ("off", False, "c++", False),
        ("OFF", False, "c++", False),
        ("on", True, "c++", False),
        ("on", False, "", False),  # it runs without kernels
    ],
)
def test_kernels_are_compiled_where_they_are_wanted_and_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, switch: str, built: bool, compiler: str, needed: bool
) -> None:
    monkeypatch.setenv(build.SWITCH, switch)
    monkeypatch.setattr(build, "find_build", lambda: tmp_path if built else None)
    monkeypatch.setattr(build, "find_compiler", lambda: compiler)
    assert build.needs_build() is needed
