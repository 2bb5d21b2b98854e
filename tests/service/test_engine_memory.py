"""An engine in a container takes what the container has, tells so, and stays within it while it works."""

import math
import random
import sys
from pathlib import Path

import pytest

from tests.service.conftest import DEMO
from tests.support.engine_session import EngineSession
from tests.support.fake_container import container
from tests.support.ports import free_port
from tests.support.processes import MIB, Engine, Process

# The engine's own command, in a process that reads its limits below another folder than /.
CONFINED = """
import sys
from pathlib import Path
from quire_engine.worker import memory
from quire_engine.cli import main
container = memory.CpuMemory(Path(sys.argv.pop(1)))
memory.device_memory = lambda device: container
main()
"""


class ConfinedEngine(Engine):
    """An engine on the demo model in a container of so many MiB."""

    def __init__(self, folder: Path, limit_mib: int, *flags: str) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        root = container(folder / "container", limit_mib * MIB)
        command = [sys.executable, "-c", CONFINED, str(root), "--model", str(DEMO), "--port", str(self.port)]
        Process.__init__(self, [*command, "--metrics-port", str(self.metrics_port), *flags], folder / "engine.log")


def work(engine: Engine, requests: int, prompt: int, output: int) -> None:
    """Prompts that share nothing, so that blocks are filled and none is found again."""
    generator = random.Random(0)
    with EngineSession(engine, "work") as link:
        link.snapshot()
        for index in range(requests):
            link.submit(f"r{index}", [generator.randrange(3, 1000) for _ in range(prompt)], max_tokens=output)
        ended = 0
        while ended < requests:
            ended += sum(output.finish_reason != 0 for output in link.batch().outputs)


@pytest.fixture(scope="module")
def baseline_mib(tmp_path_factory: pytest.TempPathFactory) -> float:
    """MiB that an engine on the demo model takes before it has done any work. Torch's CUDA build takes hundreds more
    than its CPU build, on a machine without a GPU too.
    """
    engine = Engine(DEMO, tmp_path_factory.mktemp("baseline"), "--kv-cache-memory", str(8 * MIB), "--swap-space", "0")
    try:
        return engine.wait_ready().resident_mib
    finally:
        engine.stop()


def test_an_engine_stays_within_its_containers_limit(tmp_path: Path, baseline_mib: float) -> None:
    # Besides its baseline the engine keeps 128 MiB for what grows later, runs its largest step (20 MiB), and fills
    # pools of some 100 MiB; a tenth of a container stays free.
    limit = math.ceil((baseline_mib + 128 + 20 + 100) / 0.9)
    engine = ConfinedEngine(tmp_path, limit, "--swap-space", "0.03", "--max-num-batched-tokens", "1024")
    try:
        engine.wait_ready()
        rows = (line.partition(" memory: ")[2] for line in engine.text.splitlines() if " memory: " in line)
        table = {row.split("  ")[0]: row for row in rows}
        assert f"{limit:,.1f} MiB  the container's limit; 90% of it may be taken" in table["limit"]
        work(engine, requests=60, prompt=400, output=4)
        blocks = {tier: engine.metric("quire_engine_blocks", tier=tier) for tier in ("device", "host")}
        assert f"{blocks['device'] + 1:.0f} blocks" in table["KV pool"]
        block_mib = 5 * 2 * 2 * 16 * 64 * 2 / MIB
        assert 20 < sum(blocks.values()) * block_mib < 0.9 * limit - baseline_mib
        assert 28 < blocks["host"] * block_mib < 31
        assert engine.resident_mib < limit
    finally:
        assert engine.stop() == 0


def test_a_container_that_is_too_small_is_refused_with_the_numbers(tmp_path: Path, baseline_mib: float) -> None:
    limit = math.floor(baseline_mib)
    engine = ConfinedEngine(tmp_path, limit)
    assert engine.wait() == 1
    sentence = engine.text.splitlines()[-1]
    assert sentence.startswith(f"error: There is no memory for KV blocks: the container's limit is {limit:,.1f} MiB")
    assert "Traceback" not in engine.text
