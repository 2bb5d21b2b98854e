"""``make up`` starts several engines on one machine, and bounds what each of them takes."""

from pathlib import Path

import pytest

from scripts.up import Plan, commands

PLAN = Plan(Path("model"), "model", 2, 1, 2, 3, [(4, 5), (14, 15)], None)


def engines(tmp: Path) -> list[list[str]]:
    return [command for name, command in commands(PLAN, tmp) if name.startswith("engine")]


@pytest.mark.parametrize(
    ("variable", "bounded"),
    [(None, True), ("QUIRE_ENGINE_KV_CACHE_MEMORY", False), ("QUIRE_ENGINE_GPU_MEMORY_UTILIZATION", False)],
)
def test_every_engine_has_a_bounded_pool_unless_someone_decided_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, bounded: bool
) -> None:
    for name in ("QUIRE_ENGINE_KV_CACHE_MEMORY", "QUIRE_ENGINE_GPU_MEMORY_UTILIZATION"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")
    started = engines(tmp_path)
    assert len(started) == 2
    for command in started:
        assert ("--kv-cache-memory" in command) == bounded
        if bounded:
            assert command[command.index("--kv-cache-memory") + 1] == str(512 << 20)
