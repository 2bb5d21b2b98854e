"""An ``LLM`` over the paged executor of ``paged_executor``: everything but the model is real."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.errors import LoRAError
from quire_engine.llm import LLM, AsyncLLM, offline_engine

from tests.support.model_folders import byte_level, write_model_folder
from tests.support.paged_executor import PagedExecutor

EOS = 2
MAX_MODEL_LEN = 256
BLOCK_SIZE = 4


@dataclass(frozen=True)
class PagedModel:
    """What an executor tells about its model."""

    eos_token_ids: tuple[int, ...] = (EOS,)
    vocab_size: int = byte_level().get_vocab_size()
    pooler_config = None
    is_causal = True
    model_revision: str = "paged"


class OfflineExecutor(PagedExecutor):
    """Calls ``before`` with each step, counts what it ran, and knows whether it was closed."""

    config = PagedModel()
    max_model_len = MAX_MODEL_LEN
    disk_contents = None

    def __init__(self, capacity: KVCacheConfig) -> None:
        super().__init__(capacity)
        self.before: Callable[[SchedulerOutput], None] = lambda scheduler_output: None
        self.steps = 0
        self.closed = False

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        self.before(scheduler_output)
        self.steps += 1
        return super().execute_model(scheduler_output)

    def check_lora(self, lora: LoRARequest) -> LoRARequest:
        raise LoRAError("This engine serves no adapters.")

    def close(self) -> None:
        self.closed = True


class Offline:
    """An ``LLM`` and what is behind it."""

    api: ClassVar[type[LLM | AsyncLLM]] = LLM

    def __init__(self, folder: Path, blocks: int = 400, host_blocks: int = 0, **settings: object) -> None:
        self.executor = OfflineExecutor(KVCacheConfig(BLOCK_SIZE, blocks, host_blocks))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offline_engine, "load_executor", lambda config: self.executor)
            self.llm: Any = self.api(write_model_folder(folder), **settings)
        self.scheduler = self.llm._core.scheduler

    @property
    def memory(self) -> KVCacheManager:
        return self.scheduler.kv_cache_manager

    def assert_idle(self) -> None:
        assert not self.scheduler.has_work
        self.memory.check_integrity()
        assert self.memory.device_pool.num_free == self.memory.device_pool.num_blocks


class OfflineAsync(Offline):
    """An ``AsyncLLM`` and what is behind it."""

    api = AsyncLLM
