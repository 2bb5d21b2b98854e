"""Two engines that share the experts of a model, behind a router: each serves its own requests, both end when one of
them does, and what a client reads goes on where it was when they are back.
"""

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from openai import OpenAI

from tests.model.models import small_model
from tests.service.conftest import FLOAT32, MODEL, SMALL_POOLS
from tests.service.test_failures import IGNORE_EOS, texts
from tests.service.test_serve import Tree
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.model_folders import byte_level
from tests.support.ports import free_port
from tests.support.processes import eventually

SIZE = 2
SECONDS_TO_END = 5.0
LONG = {"model": MODEL, "prompt": "hello world", "max_tokens": 300, "temperature": 1.0, "seed": 11}
SHORT = {**LONG, "max_tokens": 40}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with experts and a tokenizer."""
    tokenizer = byte_level()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 2048}
    folder = small_model("mixtral", tmp_path_factory.mktemp("experts"), **sizes)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class Group:
    """The engines of a group, which can be started again, and their router."""

    model: Path
    folder: Path
    port: int = field(default_factory=free_port)
    ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(SIZE)])
    engines: list[ForkedEngine] = field(default_factory=list)

    def start(self) -> None:
        group = ("--data-parallel-size", str(SIZE), "--data-parallel-rpc-port", str(self.port), "--dist-timeout", "60")
        flags = (*SMALL_POOLS, *FLOAT32, *group)
        self.engines = [
            ForkedEngine(self.model, self.folder, *flags, "--data-parallel-rank", str(rank), port=port)
            for rank, port in enumerate(self.ports)
        ]

    def wait_ready(self) -> None:
        for engine in self.engines:
            engine.wait_ready()

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.router.url}/v1", api_key="none", max_retries=0, timeout=120)

    def serve(self) -> None:
        addresses = [f"127.0.0.1:{port}" for port in self.ports]
        self.router = ForkedRouter(self.model, addresses, self.folder, "--hold-timeout", "120")
        self.router.wait_ready()

    def working_engine(self) -> int:
        """The rank of the one that runs a request."""

        def working() -> list[int]:
            return [
                rank for rank, engine in enumerate(self.engines) if engine.metric("quire_engine_running_sequences") > 0
            ]

        eventually(working)
        return working()[0]


@pytest.fixture
def group(experts: Path, tmp_path: Path) -> Iterator[Group]:
    made = Group(experts, tmp_path)
    made.start()
    made.wait_ready()
    made.serve()
    yield made
    for process in (made.router, *made.engines):
        if process.popen.poll() is None:
            process.kill()


def test_each_engine_serves_its_own_requests(group: Group) -> None:
    """One alone is served while the other engine takes part, and many by both."""
    alone = group.client.completions.create(**SHORT, **IGNORE_EOS).choices[0].text
    with ThreadPoolExecutor(8) as pool:
        made = list(
            pool.map(lambda _: group.client.completions.create(**SHORT, **IGNORE_EOS).choices[0].text, range(8))
        )
    assert made == [alone] * 8
    served = [engine.metric("quire_engine_generation_tokens_total") for engine in group.engines]
    assert sum(served) == 9 * SHORT["max_tokens"]
    assert min(served) > 0


@pytest.mark.parametrize("killed", ["the one that works", pytest.param("the other one", marks=pytest.mark.soak)])
def test_a_stream_goes_on_unchanged_when_the_engines_are_back_after_one_was_killed(group: Group, killed: str) -> None:
    undisturbed = group.client.completions.create(**LONG, **IGNORE_EOS).choices[0].text
    stream = texts(group.client.completions.create(**LONG, **IGNORE_EOS, stream=True))
    seen = [next(stream) for _ in range(20)]
    rank = group.working_engine()
    gone = rank if killed == "the one that works" else 1 - rank
    group.engines[gone].kill()
    other = group.engines[1 - gone]
    assert other.wait(SECONDS_TO_END) == 1
    said = rf"CRITICAL.*Engine {gone} \(127\.0\.0\.1.*\) has closed the connection, and the engines of its group cannot"
    assert len(re.findall(said, other.text)) == 1, other.text
    group.start()
    group.wait_ready()
    seen += stream
    assert "".join(seen) == undisturbed


def test_an_engine_that_is_stopped_is_lost_within_seconds(group: Group) -> None:
    gone, other = group.engines
    gone.signal(signal.SIGSTOP)
    assert other.wait(60) == 1
    assert re.search(r"CRITICAL.*Engine 0 .* has sent nothing for 10 seconds", other.text)
    gone.signal(signal.SIGCONT)
    assert gone.wait(60) == 1, gone.text


@pytest.mark.soak
def test_all_engines_finish_their_requests_when_one_is_terminated(group: Group) -> None:
    undisturbed = group.client.completions.create(**LONG, **IGNORE_EOS).choices[0].text
    stream = texts(group.client.completions.create(**LONG, **IGNORE_EOS, stream=True))
    seen = [next(stream) for _ in range(20)]
    works = group.working_engine()
    group.engines[1 - works].signal(signal.SIGTERM)
    assert "".join([*seen, *stream]) == undisturbed
    assert [engine.wait(60) for engine in group.engines] == [0, 0], [engine.text for engine in group.engines]
    told = ["another engine of the group is stopping" in engine.text for engine in group.engines]
    assert told[works]
    assert not told[1 - works]


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_quire_serve_starts_a_group_and_starts_all_of_it_again(
    experts: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """One that was killed is back before the other has ended, and finds no old engine 0. One that was stopped is killed
    some time after the other has ended.
    """
    tree = Tree(tmp_path / "tree.log", "--data-parallel-size", str(SIZE), *FLOAT32, model=experts, name=MODEL)
    try:
        client = tree.wait_ready().client
        undisturbed = client.completions.create(**LONG, **IGNORE_EOS).choices[0].text
        engines = tree.named("quire_engine.cli")
        assert len(engines) == SIZE
        stream = texts(client.completions.create(**LONG, **IGNORE_EOS, stream=True))
        seen = [next(stream) for _ in range(20)]
        engines[0 if number == signal.SIGSTOP else 1].send_signal(number)
        seen += stream
        assert "".join(seen) == undisturbed
        assert {engine.pid for engine in engines}.isdisjoint(process.pid for process in tree.processes)
        assert tree.end(signal.SIGTERM) == 143
    finally:
        if tree.popen.poll() is None:
            tree.end(signal.SIGKILL)


def test_engines_with_other_settings_are_refused_with_what_differs(experts: Path, tmp_path: Path) -> None:
    flags = [*SMALL_POOLS, *FLOAT32, "--data-parallel-size", "2", "--data-parallel-rpc-port", str(free_port())]
    one = ForkedEngine(experts, tmp_path, *flags, "--dist-timeout", "60")
    other = ForkedEngine(
        experts, tmp_path, *flags, "--dist-timeout", "60", "--data-parallel-rank", "1", "--max-num-seqs", "7"
    )
    try:
        assert other.wait(60) == 1
        assert "Engine 1 has another --max-num-seqs than engine 0: 7 instead of 64." in other.text
    finally:
        one.kill()
