"""The whole engine on a GPU: against transformers in fp32, close to it in bf16, without waits on the way, within its
memory.
"""

from pathlib import Path

import pytest
import torch
from quire_engine.errors import ModelError
from quire_proto.sampling import SamplingParams

from tests.model.engine import load, run
from tests.model.models import OUTPUT_TOKENS, SmallModels, tight
from tests.model.test_bfloat16 import PARAMS, check_close, theirs
from tests.support.executors import load_executor
from tests.support.sampling_inputs import make_output
from tests.support.steps import PENDING, KnownChunk, make_step

pytestmark = pytest.mark.gpu
PRESSURES = {"no pressure": (200, 0), "recompute": (24, 0), "swap": (24, 200)}
MIB = 1 << 20


@pytest.mark.parametrize(("pressure", "chunk"), [("no pressure", 1 << 20), ("recompute", 64), ("swap", 7)])
@pytest.mark.parametrize("overlaps", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("model_name", ["llama3", "qwen2-yarn", "qwen3", "mistral", "mixtral", "granite"])
def test_greedy_output_is_transformers_own(
    small_models: SmallModels, model_name: str, pressure: str, chunk: int, overlaps: bool
) -> None:
    folder, prompts, (blocks, host_blocks) = small_models.folder(model_name), small_models.prompts, PRESSURES[pressure]
    settings = {"device": "cuda", "attention": "reference", "async_scheduling": overlaps}
    executor = load(folder, tight(folder, blocks), host_blocks, **settings)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    made = run(executor, prompts, [params] * len(prompts), chunk=chunk, max_num_seqs=8)
    executor.close()
    assert made.outputs == small_models.outputs(model_name)
    assert (made.statistics.preemptions_by_swap > 0) == (pressure == "swap")


@pytest.mark.parametrize("model_name", ["llama3", "qwen2", "qwen3", "mistral"])
def test_tokens_part_from_transformers_only_where_both_are_probable(
    model_folders: dict[str, Path], small_models: SmallModels, model_name: str
) -> None:
    folder, prompts = model_folders[model_name], small_models.prompts[:6]
    executor = load(folder, 200, 0, "bfloat16", device="cuda")
    assert executor.depth == 2
    made = run(executor, prompts, [PARAMS] * len(prompts))
    executor.close()
    for (choice,), their_steps in zip(made.choices, theirs(folder, tuple(map(tuple, prompts))), strict=True):
        check_close(choice, their_steps)


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_nothing_waits_between_the_launch_of_a_step_and_its_result(
    model_folders: dict[str, Path], enforce_eager: bool
) -> None:
    """Greedy and random draws with and without filters, as steps of one token that follow each other."""
    executor = load(model_folders["qwen3"], 60, 20, "bfloat16", device="cuda", enforce_eager=enforce_eager)
    styles = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20}, {"temperature": 1.0, "top_p": 0.9}]
    outputs = [make_output(id, [5, 6, id + 7], seed=id, **style) for id, style in enumerate(styles)]
    first = make_step(
        0, [KnownChunk(each.id, [*each.token_ids], 0, [each.id + 1], (each.request,)) for each in outputs]
    )
    last = executor.execute_model_async(first)
    last.sample_tokens()
    for step in range(1, 8):
        scheduler_output = make_step(
            step,
            [
                KnownChunk(each.id, [PENDING], 2 + step, [each.id + 1], (each.request,), known=[*each.token_ids])
                for each in outputs
            ],
        )
        # The first of these steps learns shapes and compiles; what comes after it is what a step is.
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            launched = executor.execute_model_async(scheduler_output)
            torch.cuda.set_sync_debug_mode("default")
            for output, token_id in zip(outputs, last.get_output().token_ids, strict=True):
                output.token_ids.append(token_id)
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            launched.sample_tokens()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        last = launched
    assert len(last.get_output().token_ids) == 4
    executor.close()


def test_an_engine_that_sizes_its_pools_stays_within_its_share_and_frees_it(model_folders: dict[str, Path]) -> None:
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    executor = load_executor(
        model_folders["llama3"], device="cuda", dtype="bfloat16", swap_bytes=64 * MIB, gpu_memory_utilization=0.5
    )
    free = torch.cuda.mem_get_info()[0]
    # A large model's first step may still load kernels: a part of a percent.
    assert total - free <= 0.51 * total
    assert total - free >= 0.4 * total
    capacity = executor.kv_cache_config
    assert capacity.host_blocks == 64 * MIB // capacity.block_bytes
    tokens = [3 + place % 200 for place in range(200)]
    request = make_output(0, tokens).request
    assert executor.execute_model(make_step(0, [KnownChunk(0, tokens, 0, list(range(1, 14)), (request,))])).token_ids
    executor.close()
    del executor
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info()[0] < 1 << 30, "weights and workspaces aside, all is back"


def test_a_token_outside_of_the_vocabulary_ends_its_step_and_not_the_gpu(model_folders: dict[str, Path]) -> None:
    executor = load(model_folders["llama3"], 20, 0, "bfloat16", device="cuda")
    with pytest.raises(IndexError):
        executor.execute_model(make_step(0, [KnownChunk(0, [1 << 20], 0, [1], (make_output(0, [1 << 20]).request,))]))
    assert executor.execute_model(make_step(1, [KnownChunk(1, [5], 0, [1], (make_output(1, [5]).request,))])).token_ids
    executor.close()


def test_a_full_device_is_reported_in_one_sentence(model_folders: dict[str, Path]) -> None:
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(ModelError, match="no memory"):
        load_executor(model_folders["llama3"], device="cuda", dtype="bfloat16", swap_bytes=0, kv_cache_memory=total)
