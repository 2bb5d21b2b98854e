"""An engine on a GPU sleeps with its weights on the host, and its graphs are captured again when it wakes up."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.core.engine_core import Sleep, WakeUp
from quire_proto.errors import ErrorCode

from tests.model.engine import load
from tests.support.running_core import PROMPT, Running

pytestmark = pytest.mark.gpu


@contextmanager
def awake(folder: Path, **settings: Any) -> Iterator[Running]:
    executor = load(folder, 64, 32, dtype="bfloat16", deterministic=True, **settings)
    with closing(Running(executor)) as running:
        yield running


def outputs(running: Running) -> list[list[int]]:
    return [running.run(PROMPT[count:]) for count in range(4)]


@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_tokens_after_wake_up_on_a_gpu_are_those_before_sleep(
    model_folders: dict[str, Path], name: str, enforce_eager: bool
) -> None:
    with awake(model_folders[name], enforce_eager=enforce_eager) as running:
        expected, runner = outputs(running), running.executor._worker.runner
        assert (runner._cuda_graphs is None) is enforce_eager
        held = torch.cuda.memory_reserved()
        for _ in range(2):
            assert running.ask(Sleep) is None
            assert torch.cuda.memory_reserved() < held / 4
            assert outputs(running) == expected  # the first request wakes it
            assert (runner._cuda_graphs is None) is enforce_eager
            assert torch.cuda.memory_reserved() <= held * 1.2


def test_an_engine_whose_memory_others_took_sleeps_on(model_folders: dict[str, Path], gpu: torch.device) -> None:
    with awake(model_folders["llama3"]) as running:
        expected = outputs(running)
        assert running.ask(Sleep) is None
        torch.cuda.set_per_process_memory_fraction(1e-6, gpu)
        try:
            failure = running.ask(WakeUp)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, gpu)
        assert failure is not None
        assert failure.code is ErrorCode.UNAVAILABLE
        assert running.core.is_sleeping
        assert outputs(running) == expected
