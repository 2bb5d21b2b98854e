"""What ranks say to each other arrives as it was sent or not at all; what they share is all of the model, once; and
whether they have parted is known.
"""

import json
import logging
import os
import socket
import struct
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from quire_engine.attention.kv_cache_spec import MAX_GROUPS
from quire_engine.checkpoint.config import DecoderConfig, MoEConfig
from quire_engine.checkpoint.weights import Checkpoint
from quire_engine.config import EngineArgs
from quire_engine.core.block_pool import BlockCopies, BlockCopy, Transfer
from quire_engine.core.kv_transfer.transfer import TransferOutcome, TransferResult
from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import BeamCandidates, ModelOutput, SchedulerOutput, StepTimings
from quire_engine.distributed.communicator import Communicator, GroupCoordinator, largest_shard_size, shard
from quire_engine.errors import ModelError
from quire_engine.executor import rpc, start_checks
from quire_engine.executor.multiproc import RankCacheSizes, compute_rank_cache_sizes, sum_profiles
from quire_engine.executor.rank_processes import RankFailure, RankFailureTracker
from quire_engine.executor.rank_worker import RankSettings
from quire_engine.executor.rpc import (
    MessageError,
    RpcMessage,
    RpcMethod,
    bitmask_from_arrays,
    bitmask_to_arrays,
    json_from_array,
    json_to_array,
    output_from_arrays,
    output_to_arrays,
    receive,
    result_from_array,
    result_to_array,
    send,
    step_from_arrays,
    step_to_arrays,
)
from quire_engine.executor.start_checks import check_start
from quire_engine.models.transformers_backend import TransformersConfig
from quire_engine.sampling.grammar_bitmask import GrammarBitmask
from quire_engine.worker.memory import CacheBudget, CacheSizes, MemoryProfile, compute_cache_sizes
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import TokenLogprobs
from safetensors.torch import save_file
from torch import distributed

from tests.support.steps import PENDING, KnownChunk, make_step

CPU = torch.device("cpu")
GIB = 1 << 30


@dataclass(frozen=True)
class Place:
    """A rank that talks to nobody."""

    rank: int
    size: int

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    join = sum


def places(size: int) -> list[Communicator]:
    return [Place(rank, size) for rank in range(size)]


# Shares


@given(total=st.integers(0, 200), size=st.integers(1, 9))
def test_the_shares_of_all_ranks_are_everything_once_and_in_order(total: int, size: int) -> None:
    shares = [range(total)[shard(total, one)] for one in places(size)]
    assert [each for part in shares for each in part] == list(range(total))
    assert max(map(len, shares)) == len(shares[0]) == largest_shard_size(total, places(size)[0])


@given(rows=st.integers(1, 12), columns=st.integers(1, 12), size=st.integers(1, 5), divided=st.integers(0, 1))
def test_ranks_read_parts_that_make_up_the_tensors(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, size: int, divided: int
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    generator = torch.Generator().manual_seed(rows)
    tensors = {name: torch.randn(count, columns, generator=generator) for name, count in (("a", rows), ("b", 3))}
    save_file(tensors, folder / "model.safetensors")
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    checkpoint = Checkpoint(folder)
    parts = [
        checkpoint.load_fused(["a", "b"], shapes, torch.float32, CPU, communicator=one, dim=divided)
        for one in places(size)
    ]
    if divided == 1:
        assert torch.equal(torch.cat(parts, 1), torch.cat(list(tensors.values())))
        return
    counts = [[len(range(shape[0])[shard(shape[0], one)]) for shape in shapes] for one in places(size)]
    firsts, seconds = zip(*(part.split(count) for part, count in zip(parts, counts, strict=True)), strict=True)
    assert torch.equal(torch.cat(firsts), tensors["a"])
    assert torch.equal(torch.cat(seconds), tensors["b"])


def test_only_the_ranks_part_of_a_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.arange(24.0).view(6, 4)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    monkeypatch.setattr("quire_engine.checkpoint.weights.safe_open", OnlySlices)
    part = checkpoint.load_fused(["a"], [(6, 4)], torch.float32, CPU, communicator=Place(1, 2), dim=1)
    assert torch.equal(part, torch.arange(24.0).view(6, 4)[:, 2:])


class OnlySlices:
    """A safetensors file of which no tensor can be had as a whole."""

    def __init__(self, path: Path, **options: Any) -> None:
        from safetensors import safe_open

        self._file = safe_open(path, **options)

    def __enter__(self) -> "OnlySlices":
        return self

    def __exit__(self, *_: object) -> None: ...

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(name)


# The wire

ARRAYS = st.lists(
    st.tuples(st.sampled_from(["uint8", "int32", "int64"]), st.lists(st.integers(0, 255), max_size=20)).map(
        lambda pair: np.array(pair[1], pair[0])
    ),
    max_size=rpc.MAX_ARRAYS,
)


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), ARRAYS), max_size=4))
def test_messages_arrive_as_they_were_sent(messages: list[tuple[int, int, list[Any]]]) -> None:
    one, other = socket.socketpair()
    with one, other:
        for kind, number, arrays in messages:
            send(one, RpcMessage(kind, number, arrays))
        one.close()
        for kind, number, arrays in messages:
            got = receive(other)
            assert got is not None
            assert (got.code, got.call_number) == (kind, number)
            assert [array.dtype for array in got.arrays] == [array.dtype for array in arrays]
            assert all(np.array_equal(*pair) for pair in zip(got.arrays, arrays, strict=True))
        assert receive(other) is None


def received(data: bytes) -> RpcMessage | None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(data)
        one.shutdown(socket.SHUT_WR)
        return receive(other)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<IIQ", 1, rpc.MAX_ARRAYS + 1, 1),
        struct.pack("<IIQIQ", 1, 1, 1, 0, rpc.MAX_BYTES + 1),
        struct.pack("<IIQIQIQ", 1, 2, 1, 0, rpc.MAX_BYTES, 1, 1),
        struct.pack("<IIQIQ", 1, 1, 1, 3, 1),
        struct.pack("<IIQIQ", 1, 1, 1, 2, 2**61),
        b"half a head",
    ],
)
def test_a_malformed_message_is_refused_before_memory_is_allocated(data: bytes) -> None:
    with pytest.raises(MessageError):
        received(data)


@given(st.integers(1, 39))
def test_a_message_that_ends_in_the_middle_is_refused(size: int) -> None:
    one, other = socket.socketpair()
    with one, other:
        send(one, RpcMessage(1, 2, [np.arange(3)]))
        whole = other.recv(1000)
    with pytest.raises(MessageError):
        received(whole[:size])


@pytest.mark.parametrize("value", [None, {"a": [1.5, "x"]}, "ü", [], 10**30])
def test_plain_values_come_back(value: object) -> None:
    assert json_from_array(json_to_array(value)) == value


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(MessageError):
        json_from_array(np.frombuffer(b"{", np.uint8))


# Calls


@st.composite
def chunks(draw: st.DrawFn) -> list[KnownChunk]:
    made = []
    for number in range(draw(st.integers(1, 5))):
        start, tokens = draw(st.integers(0, 9)), draw(st.lists(st.integers(0, 999), min_size=1, max_size=9))
        tokens[-1] = draw(st.sampled_from([tokens[-1], PENDING]))
        made.append(
            KnownChunk(
                number,
                tokens,
                start,
                list(range(20)),
                lora=draw(st.none() | st.builds(LoRARequest, st.just("x"), st.integers(1, 9), st.just("x"))),
            )
        )
    return made


COPIES = st.lists(st.builds(BlockCopy, st.integers(0, 2**40), st.integers(0, 2**40)), max_size=5)
TRANSFERS = st.lists(
    st.builds(
        Transfer,
        st.integers(0, 2**40),
        st.sampled_from(["disk", "peer"]),
        st.booleans(),
        *[st.integers(0, 2**40)] * 2,
        st.binary(min_size=16, max_size=16),
    ),
    max_size=5,
)
NUMBERS = st.lists(st.integers(0, 2**31 - 1), max_size=9)
STEPS = st.builds(
    lambda chunks, copies, freed, changes, drawn, number: (
        make_step(number, chunks, copies, freed_rows=array("i", freed), new_blocks=tuple(map(numbers, changes))),
        numbers(drawn),
    ),
    chunks(),
    st.builds(BlockCopies, COPIES, COPIES, COPIES, COPIES, TRANSFERS),
    NUMBERS,
    st.lists(NUMBERS, max_size=MAX_GROUPS),
    NUMBERS,
    st.integers(0, 2**40),
)


def numbers(values: list[int]) -> "array[int]":
    return array("i", values)


@given(STEPS, st.lists(st.integers(1, 99), max_size=3))
def test_a_step_arrives_as_it_was(sent: tuple[SchedulerOutput, "array[int]"], without_loras: list[int]) -> None:
    step, drawn = sent
    one, other = socket.socketpair()
    with one, other:
        send(one, RpcMessage(RpcMethod.EXECUTE, 1, step_to_arrays(step, drawn, without_loras)))
        message = receive(other)
    assert message is not None
    assert step_from_arrays(message.arrays) == (step, drawn, without_loras)


@given(STEPS, st.data())
def test_what_is_no_step_is_refused(sent: tuple[SchedulerOutput, "array[int]"], data: st.DataObject) -> None:
    text, *arrays = step_to_arrays(*sent, [])
    plain = json_from_array(text)
    fields = [
        name for name in plain if name not in ("sampled", "without_loras", "freed_rows", "new_tokens", "awaiting")
    ]
    name = data.draw(st.sampled_from(fields))
    values = {"step": None, "groups": {}, "transfers": [1], "new_blocks": 5, "copies": [1], "drafts": [1]}
    damaged = {**plain, name: values.get(name, [1.5])}
    if name == "step":
        del damaged["step"]
    if name == "groups" and "new_blocks" in plain:
        return
    with pytest.raises(MessageError):
        step_from_arrays([json_to_array(damaged), *arrays])


FLOATS = st.floats(allow_nan=False)
LOGPROBS = st.builds(TokenLogprobs, FLOATS, st.lists(st.tuples(st.integers(0, 99), FLOATS), max_size=2).map(tuple))
DRAWS = st.integers(0, 99)
ERRORS = st.dictionaries(
    DRAWS, st.builds(QuireError, st.sampled_from(ErrorCode), st.text(), param=st.none() | st.text()), max_size=2
)
OUTPUTS = st.builds(
    ModelOutput,
    NUMBERS,
    logprobs=st.dictionaries(DRAWS, LOGPROBS, max_size=2),
    candidates=st.dictionaries(DRAWS, st.builds(BeamCandidates, NUMBERS, st.lists(FLOATS)), max_size=2),
    pooled=st.dictionaries(DRAWS, st.binary(max_size=9), max_size=2),
    prompt_logprobs=st.dictionaries(DRAWS, st.lists(LOGPROBS, max_size=2), max_size=2),
    timings=st.builds(StepTimings, FLOATS, FLOATS, FLOATS),
)


def fields_of(errors: dict[int, QuireError]) -> dict[int, dict[str, Any]]:
    return {number: vars(error) for number, error in errors.items()}


@given(OUTPUTS, ERRORS, ERRORS)
def test_the_output_of_a_step_arrives_as_it_was(
    output: ModelOutput, errors: dict[int, QuireError], draw_errors: dict[int, QuireError]
) -> None:
    again = output_from_arrays(output_to_arrays(replace(output, errors=errors, draw_errors=draw_errors)))
    assert (fields_of(again.errors), fields_of(again.draw_errors)) == (fields_of(errors), fields_of(draw_errors))
    assert replace(again, errors={}, draw_errors={}) == output


@given(st.dictionaries(DRAWS, st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 3), ERRORS)
def test_a_bitmask_arrives_as_it_was(rows: dict[int, int], width: int, errors: dict[int, QuireError]) -> None:
    words = np.arange(len(rows) * width, dtype=np.int32).reshape(-1, width)
    again = bitmask_from_arrays(bitmask_to_arrays(GrammarBitmask(words, rows, errors)))
    assert np.array_equal(again.words, words)
    assert (again.rows, fields_of(again.errors)) == (rows, fields_of(errors))


@pytest.mark.parametrize("read", [output_from_arrays, bitmask_from_arrays])
@pytest.mark.parametrize("value", [None, {}, [], {"rows": 1, "errors": 2, "token_ids": 3}])
def test_what_is_neither_output_nor_bitmask_is_refused(read: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(MessageError):
        read([json_to_array(value)])


def test_a_step_of_arrays_that_did_not_come_is_refused() -> None:
    arrays = step_to_arrays(make_step(0, [KnownChunk(1, [5, 6], 0, [1])]), array("i"), [])
    with pytest.raises(MessageError):
        step_from_arrays(arrays[:-1])


def test_a_message_of_too_many_arrays_is_not_sent() -> None:
    one, other = socket.socketpair()
    with one, other, pytest.raises(AssertionError):
        send(one, RpcMessage(1, 1, [np.zeros(1, np.uint8)] * (rpc.MAX_ARRAYS + 1)))


@given(st.builds(TransferResult, st.integers(1, 2**40), st.sampled_from(TransferOutcome), st.floats(0, 9), st.text()))
def test_the_result_of_a_transfer_arrives_as_it_was(result: TransferResult) -> None:
    assert result_from_array(result_to_array(result)) == result


@pytest.mark.parametrize("value", [None, {}, {"transfer_id": 1, "outcome": 7, "seconds": 0.0, "reason": ""}])
def test_what_is_no_result_of_a_transfer_is_refused(value: Any) -> None:
    with pytest.raises(MessageError):
        result_from_array(json_to_array(value))


# Settings and refusals

CONFIG = DecoderConfig(
    architecture="MixtralForCausalLM",
    vocab_size=30,
    max_length=64,
    eos_token_ids=(2, 5),
    model_revision="r",
    hidden_size=16,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=2,
    intermediate_size=24,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_scale=2**-0.5,
    sliding_windows=(None, 7),
    rope_frequencies=(0.1, 1 / 3),
    rope_scale=1.0,
    moe=MoEConfig(4, 2, 24, True, False, (True, True)),
)
SETTINGS = RankSettings(
    EngineArgs(model=Path("/models/m"), tensor_parallel_size=2, quantization="int8", deterministic=True),
    CONFIG,
    device="cpu",
    threads=1,
    rendezvous=Path("/tmp/s"),
)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, moe=None)])
def test_settings_arrive_as_they_were(config: DecoderConfig) -> None:
    settings = replace(SETTINGS, config=config)
    again = RankSettings.from_plain(json.loads(json.dumps(settings.to_plain())))
    assert again == settings


def test_each_rank_has_a_gpu_of_its_own_and_all_share_the_cpu() -> None:
    on_gpu = replace(SETTINGS, device="cuda:0")
    assert [str(on_gpu.device_for(rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert str(replace(on_gpu, device="cuda:3", engine=EngineArgs(model=Path("/models/m"))).device_for(0)) == "cuda:3"
    assert [str(SETTINGS.device_for(rank)) for rank in range(2)] == ["cpu", "cpu"]


def args(size: int, num_stages: int = 1) -> EngineArgs:
    return EngineArgs(model=Path("/models/m"), tensor_parallel_size=size, pipeline_parallel_size=num_stages)


def refused(config: Any, size: int, device: torch.device = CPU) -> str:
    with pytest.raises(ModelError) as caught:
        check_start(args(size), config, device)
    text = str(caught.value)
    assert str(size) in text
    assert text.endswith(".")
    return text


def test_a_size_that_does_not_divide_the_model_is_refused() -> None:
    dense = replace(CONFIG, moe=None)
    assert "8 attention heads" in refused(CONFIG, 3)
    assert "4 KV heads" in refused(CONFIG, 8)
    assert "21 inner numbers" in refused(replace(dense, intermediate_size=21), 2)
    mixed = MoEConfig(4, 2, 24, True, False, (True, False))
    assert "21 inner numbers" in refused(replace(dense, intermediate_size=21, moe=mixed), 2)
    for size in (1, 2, 4):
        check_start(args(size), replace(CONFIG, intermediate_size=21), CPU)


def test_a_pipeline_has_a_layer_for_each_stage() -> None:
    check_start(args(2, CONFIG.num_layers), CONFIG, CPU)
    with pytest.raises(ModelError, match=rf"pipeline parallel size is 9, and the model has {CONFIG.num_layers} layers"):
        check_start(args(1, 9), CONFIG, CPU)
    many = replace(CONFIG, num_layers=64, moe=None)
    with pytest.raises(ModelError, match=r"2 × 33 ranks are more than 64"):
        check_start(args(2, 33), many, CPU)


@pytest.mark.parametrize("more", [{"async_scheduling": True}, {"speculative_method": "ngram"}])
def test_what_needs_a_token_before_it_is_known_does_not_go_with_a_pipeline(more: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="--pipeline-parallel-size exclude each other"):
        EngineArgs(model=Path("/models/m"), pipeline_parallel_size=2, **more)


def test_models_of_transformers_are_not_divided() -> None:
    config = TransformersConfig("GPT2LMHeadModel", 30, 64, (2,), "r", hf_config=None, model_class=None)
    assert "GPT2LMHeadModel" in refused(config, 2)
    check_start(args(1), config, CPU)


def test_there_must_be_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_start(args(2), CONFIG, torch.device("cuda:0"))
    assert "2 GPUs" in refused(CONFIG, 4, torch.device("cuda:0"))


def test_more_ranks_than_cores_are_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(start_checks, "usable_cores", lambda: 2)
    with caplog.at_level(logging.WARNING):
        check_start(args(2), CONFIG, CPU)
        assert not caplog.records
        check_start(args(4), CONFIG, CPU)
    assert "4 ranks share 2 cores" in caplog.text


# Memory

MEASURED = MemoryProfile(
    limit=10 * GIB,
    source="the container's limit",
    dedicated=True,
    used_before=GIB // 4,
    used_loaded=GIB,
    available=9 * GIB,
    peak=GIB + GIB // 2,
    growth_reserve=GIB // 8,
)
SMALLEST = CacheSizes(1 << 20, 0)


def decide(
    budget: CacheBudget, profiles: list[MemoryProfile], smallest: CacheSizes, *layers: int, nnodes: int = 1
) -> Any:
    return compute_rank_cache_sizes(budget, profiles, smallest, layers, nnodes)


def test_one_rank_decides_as_if_there_were_no_others() -> None:
    request = CacheBudget(None, GIB)
    decided = decide(request, [MEASURED], SMALLEST, 1)
    assert decided == RankCacheSizes(compute_cache_sizes(request, MEASURED, SMALLEST), MEASURED, 1)


def test_blocks_are_counted_with_all_of_their_parts_in_one_memory() -> None:
    budget = CacheBudget(GIB, 0)
    assert decide(budget, [MEASURED] * 4, SMALLEST, 2, 2, 2, 2).num_layers == 8
    assert decide(budget, [MEASURED], SMALLEST, 2).num_layers == 2
    assert decide(budget, [replace(MEASURED, host_available=1, host_limit=1)] * 4, SMALLEST, 2, 2, 2, 2).num_layers == 2
    assert decide(budget, [MEASURED] * 4, SMALLEST, 2, 2, 3, 3, nnodes=2).num_layers == 6, "the fuller node's"


@given(size=st.integers(2, 4), swap=st.integers(0, 4 * GIB))
def test_ranks_of_one_memory_stay_within_it_together(size: int, swap: int) -> None:
    decided = decide(CacheBudget(None, swap), [MEASURED] * size, SMALLEST, *[2] * size)
    pools, whole = decided.sizes, decided.profile
    taken = size * (MEASURED.used_without_cache + pools.kv_cache_bytes + pools.swap_bytes)
    assert 0.89 * whole.limit < taken <= 0.9 * whole.limit
    assert size * pools.swap_bytes <= swap


@given(ranks=st.integers(1, 3), nnodes=st.integers(1, 3), used=st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_each_machine_keeps_within_its_own_memory_and_the_fullest_decides(
    ranks: int, nnodes: int, used: list[int]
) -> None:
    """The ranks of each machine alone, by blocks of one layer, are the oracle."""
    nodes = [[replace(MEASURED, used_loaded=GIB + many * GIB // 4)] * ranks for many in used[:nnodes]]
    budget, layers = CacheBudget(None, 0), [2 + number % 2 for number in range(ranks * nnodes)]
    profiles = [profile for node in nodes for profile in node]
    made = decide(budget, profiles, SMALLEST, *layers, nnodes=nnodes).sizes.kv_cache_bytes // layers[0]
    alone = []
    for number, node in enumerate(nodes):
        own = layers[number * ranks : (number + 1) * ranks]
        alone.append(compute_cache_sizes(budget, sum_profiles(node), SMALLEST).kv_cache_bytes // sum(own))
    assert abs(made - min(alone)) <= 1


def test_stages_of_more_layers_get_more_bytes_for_as_many_blocks() -> None:
    budget = CacheBudget(60 * SMALLEST.kv_cache_bytes, 0)
    smallest = CacheSizes(2 * SMALLEST.kv_cache_bytes, 0)
    shared = decide(budget, [replace(MEASURED, peak=None)] * 2, smallest, 2, 4).sizes
    assert shared.kv_cache_bytes == 20 * SMALLEST.kv_cache_bytes, "60 for 2 + 4 layers"
    apart = decide(budget, [replace(MEASURED, peak=None)] * 2, smallest, 2, 4, nnodes=2).sizes
    assert apart.kv_cache_bytes == 30 * SMALLEST.kv_cache_bytes, "60 on the machine of 4 layers"
    on_gpus = [replace(MEASURED, host_available=8 * GIB, host_limit=8 * GIB)] * 2
    own = decide(budget, on_gpus, smallest, 2, 4).sizes
    assert own.kv_cache_bytes == 30 * SMALLEST.kv_cache_bytes, "60 on the GPU of 4 layers"


def test_a_given_size_is_for_all_ranks_of_one_memory() -> None:
    measures = [replace(MEASURED, peak=None)] * 2
    assert decide(CacheBudget(4 * GIB, GIB), measures, SMALLEST, 1, 1).sizes == CacheSizes(2 * GIB, GIB // 2)
    assert decide(CacheBudget(4 * GIB, GIB), measures, SMALLEST, 1, 1, nnodes=2).sizes == CacheSizes(4 * GIB, GIB)
    with pytest.raises(ModelError, match="no memory for a KV pool"):
        decide(CacheBudget(9 * GIB, 0), measures, SMALLEST, 1, 1)


def test_the_fullest_gpu_decides_for_all() -> None:
    roomy = replace(MEASURED, host_available=8 * GIB, host_limit=8 * GIB, growth_reserve=0)
    full = replace(roomy, used_loaded=4 * GIB, available=6 * GIB, peak=4 * GIB)
    request = CacheBudget(None, 6 * GIB)
    decided = decide(request, [roomy, full], SMALLEST, 1, 1)
    assert decided.profile.used_loaded == full.used_loaded
    least = compute_cache_sizes(request, full, SMALLEST).kv_cache_bytes
    assert decided.sizes == CacheSizes(least, 3 * GIB)
    assert decide(request, [roomy, full], SMALLEST, 1, 1, nnodes=2).sizes == CacheSizes(least, 6 * GIB)
    assert decide(CacheBudget(GIB, 0), [roomy, full], SMALLEST, 1, 1).sizes == CacheSizes(GIB, 0)


@given(
    used=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    layers=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    swap=st.integers(0, 30),
)
def test_swap_pools_stay_within_the_hosts_memory_beside_what_all_ranks_have_pinned(
    used: list[int], layers: list[int], swap: int
) -> None:
    """Each rank has measured what it could have if there were no others."""
    limit = 16 * GIB
    ranks = [
        replace(MEASURED, host_available=limit - many * GIB, host_used=many * GIB, host_limit=limit) for many in used
    ]
    layers = layers[: len(ranks)]
    pools = decide(CacheBudget(GIB, swap * GIB), ranks, SMALLEST, *layers).sizes
    taken = sum(used) * GIB + pools.swap_bytes * sum(layers) // layers[0]
    assert pools.swap_bytes == 0 or taken <= limit
    room = min(swap * GIB, limit - sum(used) * GIB)
    assert pools.swap_bytes * sum(layers) // layers[0] >= room - len(ranks) * sum(layers)


# Accord


def failure(number: int, collectives: int = 0, **more: Any) -> RankFailure:
    return RankFailure(number, collectives, "it broke", **more)


def test_a_failure_reported_before_rank_0_succeeds_outlives_the_next_call() -> None:
    accord = RankFailureTracker(2)
    accord.record_remote_failure(2, failure(accord.begin_call()))
    accord.record_success()
    accord.begin_call()
    assert accord.divergence == "Rank 2 failed in a step that rank 0 computed: it broke."


def test_a_failure_of_all_ranks_in_one_place_is_settled() -> None:
    accord = RankFailureTracker(2)
    number = accord.begin_call()
    accord.record_remote_failure(1, failure(number, 3))
    assert (accord.all_failed_alike, accord.divergence) == (False, None)
    assert "Rank 1 failed" in str(accord.suspected_failure)
    accord.record_failure(3, "it broke here")
    assert not accord.all_failed_alike
    accord.record_remote_failure(2, failure(number, 3))
    assert (accord.all_failed_alike, accord.divergence, accord.suspected_failure) == (True, None, None)
    accord.begin_call()
    assert (accord.all_failed_alike, accord.divergence, accord.suspected_failure) == (False, None, None)


def test_ranks_that_fail_in_different_places_have_parted() -> None:
    accord = RankFailureTracker(1)
    accord.record_remote_failure(1, failure(accord.begin_call(), 2))
    accord.record_failure(3, "it broke here")
    assert not accord.all_failed_alike
    assert accord.divergence == "Rank 1 failed in another place than rank 0: it broke."


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_fails_where_rank_0_did_not_has_parted(late: bool) -> None:
    accord = RankFailureTracker(1)
    number = accord.begin_call()
    accord.record_success()
    if late:
        accord.begin_call()
    accord.record_remote_failure(1, failure(number))
    assert accord.divergence == "Rank 1 failed in a step that rank 0 computed: it broke."


def test_rank_0_failing_alone_is_undecided_until_the_others_have_failed_too() -> None:
    accord = RankFailureTracker(1)
    accord.begin_call()
    accord.record_failure(0, "it broke here")
    assert accord.suspected_failure == "Rank 0 failed in a step in which other ranks did not: it broke here."
    assert accord.divergence is None


def test_logits_that_fail_in_one_place_on_all_ranks_of_the_last_stage_are_settled() -> None:
    """Two steps in flight may fail."""
    accord = RankFailureTracker(3, last_stage=range(2, 4))
    first, second = (accord.begin_call() for _ in range(2))
    accord.record_success()
    accord.record_logits_failure(2, failure(first, 4))
    accord.record_logits_failure(2, failure(second, 5))
    accord.record_logits_failure(3, failure(first, 4))
    assert accord.suspected_failure == "Rank 2 failed in a step in which other ranks did not: it broke."
    accord.record_logits_failure(3, failure(second, 5))
    assert (accord.logits_failures, accord.divergence, accord.suspected_failure) == ({}, None, None)


def test_logits_that_fail_in_different_places_have_parted() -> None:
    accord = RankFailureTracker(3, last_stage=range(2, 4))
    number = accord.begin_call()
    accord.record_success()
    accord.record_logits_failure(3, failure(number, 4))
    accord.record_logits_failure(2, failure(number, 5))
    assert accord.divergence == "Rank 3 failed in another place than rank 2: it broke."


def test_a_sentence_for_the_user_is_kept_as_it_is() -> None:
    accord = RankFailureTracker(1)
    accord.record_remote_failure(1, RankFailure(accord.begin_call(), 0, "There is no memory.", user_error=True))
    assert accord.divergence == "There is no memory."


# The group


@pytest.fixture(scope="module", params=[2, 3])
def groups(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All ends of one group, in threads of this process."""
    store = tmp_path_factory.mktemp("group") / "store"
    made = [GroupCoordinator(rank, request.param, CPU, ordered=True) for rank in range(request.param)]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            patch.setenv(name, "lo")
        each(made, lambda group: group.connect(distributed.FileStore(str(store), group.size), None))
    yield made
    for group in made:
        group.close()


def each(groups: list[GroupCoordinator], work: Any) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return [future.result(60) for future in [pool.submit(work, group) for group in groups]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_the_same_on_all_ranks_and_at_all_places(groups: list[GroupCoordinator], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(7, 13, generator=generator).to(dtype) for _ in groups]
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    made = each(groups, lambda group: group.all_reduce(parts[group.rank].clone()))
    assert all(torch.equal(one, expected.to(dtype)) for one in made)
    alone = each(groups, lambda group: group.all_reduce(parts[group.rank][5:6].clone()))
    assert all(torch.equal(one, expected[5:6].to(dtype)) for one in alone)


def test_rank_0_gets_the_parts_side_by_side(groups: list[GroupCoordinator]) -> None:
    parts = [torch.full((4, 2), float(group.rank)) for group in groups]
    made = each(groups, lambda group: group.gather(parts[group.rank]))
    assert torch.equal(made[0], torch.cat(parts, 1))
    assert all(torch.equal(one, part) for one, part in zip(made[1:], parts[1:], strict=True))


def test_all_ranks_get_what_rank_0_has(groups: list[GroupCoordinator]) -> None:
    tensors = [torch.full((3,), 5 * group.rank + 2) for group in groups]
    each(groups, lambda group: group.broadcast(tensors[group.rank]))
    assert all(tensor.tolist() == [2, 2, 2] for tensor in tensors)


def test_started_collectives_are_counted(groups: list[GroupCoordinator]) -> None:
    before = [group.num_collectives for group in groups]
    each(groups, lambda group: group.gather(group.all_reduce(torch.ones(1, 2))))
    assert [group.num_collectives - count for group, count in zip(groups, before, strict=True)] == [2] * len(groups)


class Nccl:
    """What the group uses of torch's ``ProcessGroupNCCL``, as it behaves: it makes its communicator, and chooses
    the interface for it, at the first exchange; and an orderly shutdown waits for the other ranks.
    """

    def __init__(self, store: object, rank: int, size: int, timeout: timedelta) -> None:
        self.timeout = timeout
        self.interface: str | None = None
        self.ended: list[str] = []

    def allreduce(self, tensors: list[torch.Tensor]) -> "Nccl":
        self.interface = self.interface or os.environ.get("NCCL_SOCKET_IFNAME", "the default route's")
        return self

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        self.ended.append("abort")

    def shutdown(self) -> None:
        self.ended.append("shutdown")


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[GroupCoordinator, Nccl]:
    """A rank's end of a group of two GPUs, and what it is connected through."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size, device="cpu"))
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    group = GroupCoordinator(0, 2, torch.device("cuda", 0), ordered=False)
    group.connect(distributed.FileStore(str(tmp_path / "store"), 2), None)
    return group, group._process_group


def test_nccl_listens_on_the_loopback_interface_alone(on_cuda: tuple[GroupCoordinator, Nccl]) -> None:
    assert on_cuda[1].interface == "lo"
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_a_rank_that_hangs_on_a_gpu_is_waited_for_for_minutes(on_cuda: tuple[GroupCoordinator, Nccl]) -> None:
    assert timedelta(minutes=5) <= on_cuda[1].timeout <= timedelta(minutes=30)


def test_a_group_of_gpus_whose_other_ranks_have_ended_is_left_without_waiting(
    on_cuda: tuple[GroupCoordinator, Nccl],
) -> None:
    group, nccl = on_cuda
    group.close()
    group.close()
    assert nccl.ended == ["abort"]
