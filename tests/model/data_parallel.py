"""Engines of a data-parallel group under test: each has its own core in a thread of its own, and its links are real."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread
from typing import Any

from quire_engine.config import EngineArgs, NodeArgs
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.data_parallel import DPEngineCore
from quire_engine.core.engine_core import AbortRequest, AddRequest, EngineCoreOutputs, Shutdown
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.lora import LoRARequest
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.executor.torch_executor import TorchExecutor
from quire_proto.errors import QuireError
from quire_proto.sampling import SamplingParams

from tests.model.engine import SWAPPING_PAYS
from tests.support.ports import free_port

SECONDS = 120.0
POOL = 2 << 20


@dataclass
class Answer:
    """What came of a request so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: QuireError | None = None
    has_ended: bool = False


class Engine:
    """Engine ``rank`` of a group, whose core runs once ``start`` is called."""

    def __init__(self, executor: TorchExecutor, rank: int, told: list[str], **limits: Any) -> None:
        self.executor, self.rank, self.told = executor, rank, told
        self.answers: dict[str, Answer] = {}
        self.failures: list[BaseException] = []
        self.is_closed = False
        self._changed = Condition()
        config = SchedulerConfig(
            max_model_len=executor.max_model_len,
            eos_token_ids=frozenset(executor.config.eos_token_ids),
            model_revision=executor.config.model_revision,
            **{"vocab_size": executor.config.vocab_size, "max_num_batched_tokens": 64, "max_num_seqs": 5, **limits},
        )
        self.memory = KVCacheManager(executor.kv_cache_config)
        assert executor.data_parallel is not None
        self.lockstep = executor.data_parallel.lockstep
        scheduler = Scheduler(config, self.memory, rates=SWAPPING_PAYS)
        self.core = DPEngineCore(scheduler, executor, self._receive, executor.data_parallel)
        self._thread = Thread(target=self._run, name=f"core-{rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(
        self, prompts: Sequence[list[int]], name: str = "", *, lora: LoRARequest | None = None, **params: Any
    ) -> list[str]:
        """Adds greedy requests, or what ``params`` say; returns their names."""
        wanted = SamplingParams(**{"temperature": 0, "ignore_eos": True, "logprobs": 3, **params})
        names = [f"{name}{index}" for index in range(len(prompts))]
        for each, prompt in zip(names, prompts, strict=True):
            self.answers[each] = Answer()
            self.core.send(AddRequest(Request(each, prompt, wanted, lora=lora)))
        return names

    def abort(self, name: str) -> None:
        self.core.send(AbortRequest(name))
        with self._changed:
            self.answers[name].has_ended = True
            self._changed.notify_all()

    def wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.failures) or done(), SECONDS), f"engine {self.rank} hangs"
        if self.failures:
            raise self.failures[0]

    def wait_for_tokens(self, name: str, count: int) -> None:
        self.wait(lambda: len(self.answers[name].token_ids) >= count)

    def outputs(self, names: Sequence[str]) -> list[list[int]]:
        """The tokens of these requests, once they have ended."""
        self.wait(lambda: all(self.answers[name].has_ended for name in names))
        assert [self.answers[name].error for name in names] == [None] * len(names)
        return [self.answers[name].token_ids for name in names]

    def run(self, prompts: Sequence[list[int]], name: str = "", **params: Any) -> list[list[int]]:
        return self.outputs(self.add(prompts, name, **params))

    def shut_down(self) -> None:
        self.core.send(Shutdown())

    def join(self, seconds: float = SECONDS) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"engine {self.rank} does not end"

    def close(self) -> None:
        """Ends its links, and gives its memory back. Its core has ended."""
        if not self.is_closed:
            self.is_closed = True
            self.executor.close()

    def check_memory(self) -> None:
        self.memory.check_integrity()
        assert self.memory.device_pool.num_free == self.memory.device_pool.num_blocks

    def _run(self) -> None:
        try:
            self.core.run()
        except BaseException as failure:  # noqa: BLE001 - the test looks at it
            self.failures.append(failure)
        with self._changed:
            self._changed.notify_all()

    def _receive(self, step: EngineCoreOutputs) -> None:
        with self._changed:
            for output in step.all_outputs():
                answer = self.answers[output.request_id]
                answer.token_ids += output.token_ids
                answer.logprobs += [each.logprob for each in output.logprobs]
                answer.error = answer.error or output.error
                answer.has_ended |= output.finish_reason is not None
            self._changed.notify_all()


def node_args(rank: int, port: int, **settings: Any) -> NodeArgs:
    return NodeArgs(**{"data_parallel_rank": rank, "data_parallel_rpc_port": port, "dist_timeout": 60.0, **settings})


def load(folder: Path, size: int, **settings: Any) -> list[Engine]:
    """The engines of a group, loaded at the same time, as they wait for each other."""
    limits = {name: settings.pop(name) for name in SchedulerConfig.model_fields if name in settings}
    defaults = {"dtype": "float32", "device": "cpu", "kv_cache_memory": POOL, "swap_space": 0.0}
    args = EngineArgs(model=folder).model_copy(update={**defaults, "data_parallel_size": size, **limits, **settings})
    port, told = free_port(), [list[str]() for _ in range(size)]
    made: dict[int, TorchExecutor | BaseException] = {}

    def load_one(rank: int) -> None:
        try:
            made[rank] = TorchExecutor.load(args, told[rank].append, nodes=node_args(rank, port))
        except BaseException as error:  # noqa: BLE001 - raised below
            made[rank] = error

    threads = [Thread(target=load_one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for each in made.values():
        if isinstance(each, BaseException):
            raise each
    executors = [made[rank] for rank in range(size)]
    return [Engine(each, rank, told[rank], **limits) for rank, each in enumerate(executors)]  # type: ignore[arg-type]


@contextmanager
def group(
    folder: Path, size: int, *, first: Callable[[Engine], object] = lambda _: None, **settings: Any
) -> Iterator[list[Engine]]:
    """Engines that run, and end together. ``first`` is done with each before any runs."""
    engines = load(folder, size, **settings)
    for engine in engines:
        first(engine)
    for engine in engines:
        engine.start()
    try:
        yield engines
        for engine in engines:
            engine.shut_down()
        for engine in engines:
            engine.join()
            assert not engine.failures, engine.failures
    finally:
        for engine in engines:
            engine.close()
    assert [engine.told for engine in engines] == [[]] * size
