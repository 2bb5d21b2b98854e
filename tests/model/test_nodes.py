"""Ranks on several machines, which are addresses of this one, make the tokens of transformers, and end together however
one of them ends. Rank 0 is in this process, and the other nodes are the engine's command.
"""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import Any

import psutil
import pytest
from quire_engine.config import EngineConfig
from quire_engine.errors import ModelError
from quire_engine.executor.rank_processes import END_GRACE_SECONDS, RankError
from quire_engine.executor.torch_executor import TorchExecutor

from tests.model.models import SmallModels, small_model
from tests.model.ranks import assert_near, assert_only_its_own_request_fails, chunk, expected, generate
from tests.support.certificates import Authority
from tests.support.executors import load_executor
from tests.support.nodes import MASTER, NODE_NAME, Node, tls_flags
from tests.support.ports import cut_off, free_port
from tests.support.processes import eventually
from tests.support.steps import make_step

SECONDS_TO_END = 20.0
POOLS = ("--kv-cache-memory", str(1 << 21), "--swap-space", "0", "--dtype", "float32", "--device", "cpu")


class Nodes:
    """An executor whose other ranks are on ``count`` - 1 other machines, and what it told of a loss."""

    def __init__(self, folder: Path, tmp: Path, *flags: str, tls: list[str]) -> None:
        self.tmp = tmp
        self.port = free_port()
        self.told: list[str] = []
        common = ["--master-addr", MASTER, "--dist-timeout", "60", "--model", str(folder)]
        self.flags = [*common, *POOLS, *flags, *tls]
        self.executor: TorchExecutor | None = None
        self.others: list[Node] = []

    def start_other(self, *flags: str, port: int = 0, **where: Any) -> Node:
        self.others.append(Node(self.tmp, *self.flags, "--master-port", str(port or self.port), *flags, **where))
        return self.others[-1]

    def load(self, *flags: str) -> TorchExecutor:
        arguments = [*self.flags, "--master-port", str(self.port), *flags]
        pairs = zip(arguments[::2], arguments[1::2], strict=True)
        config = EngineConfig.model_validate({name[2:].replace("-", "_"): value for name, value in pairs})
        self.executor = TorchExecutor.load(config, self.told.append, nodes=config)
        return self.executor

    def close(self) -> None:
        if self.executor is not None:
            self.executor.close()
        for other in self.others:
            if other.popen.poll() is None:
                other.signal(signal.SIGCONT)
            other.wait(SECONDS_TO_END)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> list[str]:
    return tls_flags(authority.issue(NODE_NAME), authority)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    return small_model("llama2", folder, num_hidden_layers=4, num_key_value_heads=2, tie_word_embeddings=True)


@contextmanager
def nodes(folder: Path, tmp: Path, *flags: str, tls: list[str]) -> Iterator[Nodes]:
    made = Nodes(folder, tmp, *flags, tls=tls)
    try:
        yield made
    finally:
        made.close()


TWO = ("--pipeline-parallel-size", "2", "--nnodes", "2")


def test_two_stages_on_two_machines_make_the_tokens_of_transformers(
    small_models: SmallModels, tmp_path: Path, tls: list[str]
) -> None:
    with nodes(small_models.folder("llama3"), tmp_path, *TWO, tls=tls) as made:
        other = made.start_other()
        assert generate(made.load(), small_models, num_stages=2).outputs == expected(small_models, "llama3")
        assert made.executor is not None
        assert_only_its_own_request_fails(made.executor)
        (rank,) = psutil.Process(other.popen.pid).children()
        addresses = {each.laddr.ip for each in rank.net_connections() if each.status == psutil.CONN_LISTEN}
        assert addresses == {"127.0.0.3"}
    assert other.popen.returncode == 0, other.text


@pytest.mark.soak
@pytest.mark.parametrize("nnodes", [2, 4])
def test_a_grid_over_machines_makes_the_tokens_of_one_process(
    small_models: SmallModels, deep: Path, tmp_path: Path, tls: list[str], nnodes: int
) -> None:
    """With two machines each has a stage of two ranks, and with four each has one rank."""
    sizes = ("--pipeline-parallel-size", "2", "--tensor-parallel-size", "2", "--nnodes", str(nnodes))
    alone = load_executor(deep, swap_bytes=0, dtype="float32", kv_cache_memory=1 << 21)
    with nodes(deep, tmp_path, *sizes, tls=tls) as made:
        for rank in range(1, nnodes):
            made.start_other(rank=rank, address=f"127.0.0.{rank + 2}")
        assert_near(generate(made.load(), small_models, num_stages=2), generate(alone, small_models))
    assert [other.popen.returncode for other in made.others] == [0] * (nnodes - 1)


def test_a_step_that_no_machine_can_run_ends_its_own_request_alone(
    small_models: SmallModels, tmp_path: Path, tls: list[str]
) -> None:
    """Neither machine has another rank than the one."""
    sizes = ("--tensor-parallel-size", "2", "--nnodes", "2")
    with nodes(small_models.folder("llama3"), tmp_path, *sizes, tls=tls) as made:
        made.start_other()
        executor = made.load()
        assert_only_its_own_request_fails(executor)
        sleep(2 * END_GRACE_SECONDS)
        assert_only_its_own_request_fails(executor)
        assert made.told == []


def test_another_model_or_another_setting_is_refused(small_models: SmallModels, tmp_path: Path, tls: list[str]) -> None:
    with nodes(small_models.folder("llama3"), tmp_path, *TWO, tls=tls) as made:
        others = [
            (made.start_other("--model", str(small_models.folder("qwen2"))), "another --model than node 0"),
            (made.start_other("--max-num-seqs", "7"), "another --max-num-seqs than node 0: 7 instead of 64"),
        ]
        for other, _ in others:  # both ask again and again, so that they come before node 0 gives up
            eventually(lambda other=other: "waiting for node 0" in other.text, 3 * SECONDS_TO_END, "it is not there")
        with pytest.raises(ModelError, match=r"^Node 1 has not joined within 5 seconds\.$"):
            made.load("--dist-timeout", "5")
        for other, said in others:
            assert other.wait(SECONDS_TO_END) == 1
            assert said in other.text


@pytest.fixture(params=[pytest.param("killed", marks=pytest.mark.soak), "stopped", "its rank killed"])
def ending(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_engine_ends_with_any_of_its_machines(
    small_models: SmallModels, tmp_path: Path, tls: list[str], ending: str
) -> None:
    with nodes(small_models.folder("llama3"), tmp_path, *TWO, tls=tls) as made:
        other = made.start_other()
        executor = made.load()
        executor.execute_model(make_step(0, [chunk([5, 6, 7], [1])]))
        (rank,) = psutil.Process(other.popen.pid).children()
        if ending == "stopped":
            rank.suspend()
            other.signal(signal.SIGSTOP)
        else:
            (rank if ending == "its rank killed" else other.popen).kill()
        eventually(lambda: made.told, SECONDS_TO_END, "nothing was told")
        with pytest.raises(RankError):
            executor.execute_model(make_step(0, [chunk([5, 6, 7], [1])]))
        if ending == "stopped":
            other.signal(signal.SIGCONT)
        other.wait(SECONDS_TO_END)
        eventually(lambda: not rank.is_running(), SECONDS_TO_END, "a rank is left")
    said = {
        "killed": "Node 1 (127.0.0.3) has closed the connection",
        "stopped": "Node 1 (127.0.0.3) has sent nothing for 10 seconds",
        "its rank killed": f"On node 1 (127.0.0.3): Rank 1 (process {rank.pid}) was killed by SIGKILL, as the system "
        "does when memory runs out",
    }
    assert made.told == [f"{said[ending]}, and the engine cannot go on without it."]


def test_machines_that_are_cut_off_from_each_other_end_on_both_sides(
    small_models: SmallModels, tmp_path: Path, tls: list[str]
) -> None:
    """A way between them takes no more bytes, and closes nothing."""
    ready, cut, over = Event(), Event(), Event()
    ports: list[int] = []

    async def way(port: int) -> None:
        async with cut_off(port) as (between, dead):
            ports.append(between)
            ready.set()
            await asyncio.to_thread(cut.wait)
            dead.set()
            await asyncio.to_thread(over.wait)

    with ExitStack() as stack:
        made = stack.enter_context(
            nodes(small_models.folder("llama3"), tmp_path, *TWO, "--node-addr", "127.0.0.1", tls=tls)
        )
        stack.callback(over.set)
        thread = Thread(target=lambda: asyncio.run(way(made.port)))
        thread.start()
        ready.wait()
        other = made.start_other("--master-addr", "127.0.0.1", port=ports[0])
        executor = made.load()
        executor.execute_model(make_step(0, [chunk([5, 6, 7], [1])]))
        cut.set()
        eventually(lambda: made.told, SECONDS_TO_END, "nothing was told")
        assert other.wait(SECONDS_TO_END) == 1
        assert "sent nothing for 10 seconds" in made.told[0]
        assert "has sent nothing for 10 seconds, and this node ends" in other.text
