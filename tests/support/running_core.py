"""An engine core on a thread of its own, as the server has it, with a real model."""

from collections.abc import Iterator
from queue import Queue
from threading import Thread
from typing import Any

from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import AddRequest, EngineCore, EngineCoreOutputs, Shutdown, Sleep, WakeUp
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import EngineCoreOutput
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.executor.torch_executor import TorchExecutor
from quire_proto.errors import QuireError
from quire_proto.sampling import SamplingParams

SECONDS = 60
PROMPT = [(7 * place) % 200 + 3 for place in range(53)]
DRAWN = SamplingParams(temperature=0.8, seed=7, max_tokens=20, ignore_eos=True)


class Running:
    """Requests run one after the other; ``published`` has the steps that nobody has taken yet."""

    def __init__(self, executor: TorchExecutor, **settings: Any) -> None:
        self.executor = executor
        limits = SchedulerConfig(max_model_len=256, vocab_size=executor.config.vocab_size, **settings)
        self.scheduler = Scheduler(limits, KVCacheManager(executor.kv_cache_config))
        self.published: Queue[EngineCoreOutputs] = Queue()
        self.core = EngineCore(self.scheduler, executor, self.published.put, sleeper=executor)
        self._thread = Thread(target=self.core.run)
        self._thread.start()
        self._count = 0

    def close(self) -> None:
        self.core.send(Shutdown())
        self._thread.join(SECONDS)
        self.executor.close()

    def submit(self, prompt: list[int], sampling: SamplingParams = DRAWN) -> None:
        self._count += 1
        self.core.send(AddRequest(Request(str(self._count), prompt, sampling)))

    def outputs(self) -> Iterator[EngineCoreOutput]:
        """Those of the request that was submitted last, until it has ended."""
        while True:
            for output in self.published.get(timeout=SECONDS).all_outputs():
                yield output
                if output.ends_request:
                    return

    def run(self, prompt: list[int] = PROMPT, sampling: SamplingParams = DRAWN) -> list[int]:
        self.submit(prompt, sampling)
        outputs = list(self.outputs())
        assert outputs[-1].error is None
        return [token for output in outputs for token in output.token_ids]

    def ask(self, kind: type[Sleep] | type[WakeUp]) -> QuireError | None:
        answer: Queue[QuireError | None] = Queue()
        self.core.send(kind(answer.put))
        return answer.get(timeout=SECONDS)
