"""Several outputs of one prompt: each is what it would be alone, and together they take little more memory than one."""

from functools import cache
from pathlib import Path

import pytest
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.executor.torch_executor import TorchExecutor
from quire_proto.sampling import SamplingParams, choice_seed

from tests.model.engine import load, run
from tests.model.models import OUTPUT_TOKENS, SmallModels, tight
from tests.support.paged_executor import VOCAB_SIZE, PagedExecutor
from tests.support.variants import one_in

OTHER_MODELS = ("mixtral", "gemma3", "mistral")
PRESSURES = {"no pressure": (300, 0), "recompute": (18, 0), "swap": (18, 200)}
SCHEDULES = [(pressure, caching) for pressure in PRESSURES for caching in ("device", "none")] + [("swap", "host")]


@cache
def executor_of(folder: Path, pressure: str) -> TorchExecutor:
    device, host = PRESSURES[pressure]
    return load(folder, tight(folder, device), host)


def sampled(seed: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.9, top_p=0.95, seed=seed, n=n, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(small_models: SmallModels) -> list[list[list[int]]]:
    """The tokens of three choices for each of eight prompts, each made by itself."""
    roomy = executor_of(small_models.folder("llama3"), "no pressure")
    return [
        [run(roomy, [prompt], [sampled(choice_seed(index, choice))]).outputs[0] for choice in range(3)]
        for index, prompt in enumerate(small_models.prompts[:8])
    ]


@pytest.mark.parametrize(("pressure", "caching", "chunk"), list(one_in(2, SCHEDULES, (7, 1 << 20))))
def test_each_choice_is_what_it_would_be_alone(
    small_models: SmallModels, alone: list[list[list[int]]], pressure: str, chunk: int, caching: str
) -> None:
    prompts = small_models.prompts[:8]
    made = run(
        executor_of(small_models.folder("llama3"), pressure),
        prompts,
        [sampled(index, n=3) for index in range(len(prompts))],
        chunk=chunk,
        prefix_caching=caching != "none",
        host_caching=caching == "host",
        max_num_seqs=12,
    )
    assert [[choice.token_ids for choice in choices] for choices in made.choices] == alone
    assert len({tuple(output) for output in alone[0]}) == 3
    counted = made.statistics
    assert counted.blocks_parted > 0
    assert pressure != "recompute" or counted.preemptions_by_recompute > 0
    assert (counted.preemptions_by_swap > 0) == (pressure == "swap")


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_choices_of_other_models_part_and_come_back_alike(small_models: SmallModels, name: str) -> None:
    folder, prompts = small_models.folder(name), small_models.prompts[:8]
    params = [sampled(index, n=3) for index in range(len(prompts))]
    roomy = run(executor_of(folder, "no pressure"), prompts, params)
    made = run(executor_of(folder, "swap"), prompts, params, chunk=64, max_num_seqs=12)
    assert made.choices == roomy.choices
    assert made.statistics.preemptions_by_swap > 0


def blocks_at_first_token(requests: list[Request]) -> int:
    """Blocks in use once every output has its first token and the memory for its second."""
    capacity = KVCacheConfig(16, 1000, 0)
    memory = KVCacheManager(capacity, prefix_caching=False)
    config = SchedulerConfig(max_num_batched_tokens=1 << 20, max_model_len=1 << 16, vocab_size=VOCAB_SIZE)
    core = EngineCore(Scheduler(config, memory), PagedExecutor(capacity), ignore)
    for request in requests:
        core.scheduler.add_request(request)
    for _ in range(2):
        core.step()
    assert len(core.scheduler.running) == 8
    return memory.device_pool.num_blocks - memory.device_pool.num_free


def ignore(step: EngineCoreOutputs) -> None:
    del step


def test_eight_choices_of_a_prompt_take_a_fifth_of_the_memory_of_eight_requests() -> None:
    prompt = [index % VOCAB_SIZE for index in range(500)]
    params = {"max_tokens": 20, "ignore_eos": True}
    together = blocks_at_first_token([Request("one", prompt, SamplingParams(n=8, **params))])
    apart = blocks_at_first_token([Request(str(i), prompt, SamplingParams(seed=i, **params)) for i in range(8)])
    assert (together, apart) == (39, 256)
    assert together < 0.2 * apart
