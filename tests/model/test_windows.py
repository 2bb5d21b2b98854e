"""Layers with a window give up the blocks that it has left, and the tokens are those that transformers makes: in
contexts of many windows, whatever is preempted, swapped, found again, guessed or launched ahead.
"""

import logging
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from quire_engine.config import EngineArgs
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.factory import make_scheduler
from quire_engine.worker import input_batch
from quire_proto.sampling import SamplingParams

from tests.model.engine import BLOCK_SIZE, run
from tests.model.models import VOCAB_SIZE, greedy_oracle, small_model
from tests.support.executors import load_executor
from tests.support.guessing import guess
from tests.support.rank_threads import ranks_are_threads

CHUNK, OUTPUT_TOKENS = 16, 56
# Of five local layers one is global, as in Gemma 3.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    "gemma2": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
# Those of Gemma 4 have other heads, and some read the keys of others; Mistral has no layer that sees all tokens.
GROUPS = {
    "gemma2": (None, 20),
    "gemma3": (None, 20, 20, 20, 20, 20),
    "gemma4": (None, 20, 20),
    "gpt-oss": (None, 20),
    "qwen2-yarn": (None, 20),
    "mistral": (24,),
}
FULL = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


@pytest.fixture(autouse=True)
def short_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the contexts of these tests begin where those of long ones do: not with the first token."""
    monkeypatch.setattr(input_batch, "WINDOW_ALIGNMENT", 64)


class Windows:
    """Folders and executors of models with windows, long prompts and what transformers makes of them."""

    def __init__(self, tmp: Path) -> None:
        self._tmp = tmp
        self.folder = cache(self._folder)
        self.outputs = cache(self._outputs)
        self.executor = cache(self._executor)
        noise = random.Random(1)
        stem = [noise.randrange(3, VOCAB_SIZE) for _ in range(130)]
        others = [[noise.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (5, 12, 40, 25, 17, 7)]
        self.prompts = [stem + other if number % 2 == 0 else other for number, other in enumerate(others)]

    def _folder(self, name: str) -> Path:
        return small_model(name, self._tmp, **CHANGES.get(name, {}))

    def _outputs(self, name: str) -> list[list[int]]:
        return greedy_oracle(self.folder(name), self.prompts, OUTPUT_TOKENS)

    def _executor(self, name: str, device: int, host: int, **settings: Any) -> TorchExecutor:
        """With pools of so many blocks."""
        block_bytes = self._block_bytes(name)
        return load_executor(
            self.folder(name),
            kv_cache_memory=device * block_bytes,
            swap_bytes=host * block_bytes,
            **{"dtype": "float32", "block_size": BLOCK_SIZE, "max_num_batched_tokens": CHUNK, **settings},
        )

    @cache  # noqa: B019 - the object lives as long as the tests
    def _block_bytes(self, name: str) -> int:
        with_one = load_executor(self.folder(name), kv_cache_memory=1 << 20, swap_bytes=0, block_size=BLOCK_SIZE)
        try:
            return with_one.kv_cache_config.block_bytes
        finally:
            with_one.close()


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Windows:
    return Windows(tmp_path_factory.mktemp("windows"))


def held_at_most(name: str, length: int) -> int:
    """Blocks of a sequence of this length, whose chunks have up to ``CHUNK`` tokens."""
    whole = -(-length // BLOCK_SIZE)
    return sum(whole if each is None else min(whole, -(-(each - 1 + CHUNK) // BLOCK_SIZE) + 1) for each in GROUPS[name])


@pytest.mark.parametrize("name", GROUPS)
def test_layers_that_see_as_far_share_blocks_and_long_sequences_need_few(windows: Windows, name: str) -> None:
    capacity = windows.executor(name, 400, 0).kv_cache_config
    assert tuple(group.window for group in capacity.groups) == GROUPS[name]
    assert capacity.max_blocks(240) == held_at_most(name, 240) < 15 * len(GROUPS[name])


@pytest.mark.parametrize("name", GROUPS)
def test_a_sequence_fits_where_it_would_not_if_all_of_it_were_kept(windows: Windows, name: str) -> None:
    """This fails where nothing is given up."""
    most = held_at_most(name, 240)
    assert most < len(GROUPS[name]) * -(-207 // BLOCK_SIZE), "all blocks would fit"
    executor = windows.executor(name, 1 + most, 0)
    scheduler = make_scheduler(EngineArgs(model=windows.folder(name)), executor)
    assert scheduler.config.max_model_len >= 240 // BLOCK_SIZE * BLOCK_SIZE
    made = run(executor, windows.prompts[:4], [FULL] * 4, chunk=CHUNK, max_num_seqs=1)
    assert made.outputs == windows.outputs(name)[:4]
    assert made.statistics.out_of_memory == 0


SCHEDULES = ["alone", "recompute", "swap", "overlap", "host", "swap and overlap"]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(name, schedule, marks=() if row % 3 == column % 3 else pytest.mark.soak)
        for row, name in enumerate(GROUPS)
        for column, schedule in enumerate(SCHEDULES)
    ],
)
def test_output_is_transformers_own(windows: Windows, name: str, schedule: str) -> None:
    one = held_at_most(name, 240)
    device, host = (400, 0) if schedule in ("alone", "overlap") else (1 + one + one // 3, 0)
    host = 400 if "swap" in schedule or schedule == "host" else host
    executor = windows.executor(name, device, host, async_scheduling="overlap" in schedule)
    made = run(
        executor,
        windows.prompts,
        [FULL] * len(windows.prompts),
        chunk=CHUNK,
        max_num_seqs=4,
        preemption_mode="recompute" if schedule == "recompute" else "swap",
    )
    assert made.outputs == windows.outputs(name)
    counted = made.statistics
    assert counted.prefix_hit_tokens > 0 or device < 400
    assert (counted.preemptions_by_recompute > 0) == (schedule == "recompute")
    assert (counted.preemptions_by_swap > 0) == (host > 0)


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_guesses_change_nothing(windows: Windows, name: str) -> None:
    made = run(
        windows.executor(name, 400, 0),
        windows.prompts,
        [FULL] * len(windows.prompts),
        chunk=CHUNK,
        guesses=lambda scheduler: guess(scheduler, 1),
    )
    assert made.outputs == windows.outputs(name)
    assert made.statistics.num_draft_tokens > 20


def test_a_disk_tier_needs_all_tokens_and_the_log_says_so(
    windows: Windows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        executor = load_executor(
            windows.folder("gemma3"), kv_cache_memory=1 << 20, swap_bytes=0, kv_disk_path=tmp_path / "disk"
        )
    assert [group.window for group in executor.kv_cache_config.groups] == [None]
    assert "keep the keys and values of all tokens, with --kv-disk-path" in caplog.text
    executor.close()


def test_windows_that_no_sequence_outgrows_make_no_groups(windows: Windows) -> None:
    executor = load_executor(windows.folder("gemma3"), kv_cache_memory=1 << 20, swap_bytes=0, max_model_len=20)
    assert [group.window for group in executor.kv_cache_config.groups] == [None]
    executor.close()


@pytest.mark.parametrize("name", ["qwen2-yarn", "gemma3"])
def test_ranks_give_up_the_same_blocks(windows: Windows, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ranks_are_threads(monkeypatch)
    folder = windows.folder(name)
    settings = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": CHUNK, "dtype": "float32"}
    executor = load_executor(folder, kv_cache_memory=1 << 19, swap_bytes=0, tensor_parallel_size=2, **settings)
    try:
        assert tuple(group.window for group in executor.kv_cache_config.groups) == GROUPS[name]
        made = run(executor, windows.prompts[:3], [FULL] * 3, chunk=CHUNK)
    finally:
        executor.close()
    assert made.outputs == windows.outputs(name)[:3]


def test_ranks_run_a_model_of_more_than_four_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    folder = small_model("qwen2-yarn", tmp_path, num_hidden_layers=6, layer_types=kinds)
    settings = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": CHUNK, "dtype": "float32"}
    executor = load_executor(folder, kv_cache_memory=1 << 18, swap_bytes=0, tensor_parallel_size=2, **settings)
    prompts, few = [[5, 6, 7], list(range(3, 40))], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    try:
        assert len(executor.kv_cache_config.groups) == 6
        made = run(executor, prompts, [few] * 2, chunk=CHUNK)
    finally:
        executor.close()
    assert made.outputs == greedy_oracle(folder, prompts, 8)


def test_a_pipeline_keeps_all_tokens(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)
    folder = windows.folder("qwen2-yarn")
    executor = load_executor(folder, kv_cache_memory=1 << 18, swap_bytes=0, pipeline_parallel_size=2)
    assert [group.window for group in executor.kv_cache_config.groups] == [None]
    executor.close()
