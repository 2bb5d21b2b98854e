"""Tokens that are sent to the ranks of their experts get what they get where every rank has all tokens, to the last
bit, however unevenly they are spread; and no more is sent than has to be.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from quire_engine.checkpoint.config import MoEConfig
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import ExecutorConfig
from quire_engine.distributed.communicator import GroupCoordinator, shard, shard_sizes
from quire_engine.distributed.rank_group import file_store
from quire_engine.layers.mlp import AllToAllExperts, make_experts
from quire_engine.quantization.unquantized import UnquantizedMethod

CPU = torch.device("cpu")
HIDDEN, INNER, SIZES = 24, 16, (2, 3, 4)
Groups = dict[int, list[GroupCoordinator]]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    """Connected ranks, which are threads, of each size."""
    made = {size: [GroupCoordinator(rank, size, CPU, ordered=True) for rank in range(size)] for size in SIZES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        for size, ranks in made.items():
            folder = tmp_path_factory.mktemp("ranks")
            together(ranks, lambda group: group.connect(file_store(folder, size), None))  # noqa: B023
    yield made
    for group in [group for ranks in made.values() for group in ranks]:
        group.close()


def together(groups: list[GroupCoordinator], work: Any) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return [future.result(60) for future in [pool.submit(work, group) for group in groups]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("total", [1, 2, 5, 12])
@pytest.mark.parametrize("shares_memory", [True, False])
def test_scattered_sums_are_shards_of_the_sum_and_gathered_are_all_of_it(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int, total: int, shares_memory: bool
) -> None:
    ranks, generator = groups[size], torch.Generator().manual_seed(total)
    if not shares_memory:
        for group in ranks:
            monkeypatch.setattr(group, "_sums", None)
    parts = [torch.randn(total, 5, generator=generator).to(dtype) for _ in ranks]
    wanted = parts[0].float()
    for part in parts[1:]:
        wanted = wanted + part.float()
    scattered = together(ranks, lambda group: group.reduce_scatter(parts[group.rank].clone()))
    assert [len(one) for one in scattered] == shard_sizes(total, ranks[0])
    for group, one in zip(ranks, scattered, strict=True):
        assert torch.equal(one, wanted.to(dtype)[shard(total, group)])
    gathered = together(ranks, lambda group: group.all_gather(scattered[group.rank], total))
    assert all(torch.equal(one, wanted.to(dtype)) for one in gathered)


@pytest.mark.parametrize("size", SIZES)
def test_rows_arrive_by_rank_and_in_their_order(groups: Groups, size: int) -> None:
    """Rank r sends (r + s) % 3 rows to rank s."""

    def work(group: GroupCoordinator) -> list[float]:
        sent = [(group.rank + other) % 3 for other in range(size)]
        rows = torch.arange(float(sum(sent)))[:, None] + 100 * group.rank
        return group.all_to_all(rows, sent, sent).flatten().tolist()

    wanted = [
        [
            100 * rank + sum((rank + before) % 3 for before in range(other)) + place
            for rank in range(size)
            for place in range((rank + other) % 3)
        ]
        for other in range(size)
    ]
    assert together(groups[size], work) == wanted


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.sampled_from(SIZES),
    tokens=st.integers(1, 20),
    count=st.integers(1, 9),
    top=st.integers(1, 4),
    skewed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
@example(size=3, tokens=20, count=6, top=4, skewed=False, dtype=torch.float32, seed=0)  # tokens with three ranks
@example(
    size=4, tokens=1, count=5, top=1, skewed=True, dtype=torch.float32, seed=0
)  # one token, and ranks without experts
def test_every_token_gets_the_sum_of_its_experts_and_is_sent_to_each_of_their_ranks_once(
    groups: Groups, size: int, tokens: int, count: int, top: int, skewed: bool, dtype: torch.dtype, seed: int
) -> None:
    """With skewed routers all tokens have the first experts, so some ranks get all of them and others none."""
    ranks, top, generator = groups[size], min(top, count), torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(count, 2 * INNER, HIDDEN, generator=generator) / 4).to(dtype)
    down = (torch.randn(count, HIDDEN, INNER, generator=generator) / 4).to(dtype)
    states = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    chosen = torch.rand(tokens, count, generator=generator).topk(top)[1]
    if skewed:
        chosen = torch.arange(top).expand(tokens, top).contiguous()
    weights = torch.rand(tokens, top, generator=generator)
    config = MoEConfig(count, top, INNER, True, False, (True,))
    method = UnquantizedMethod(LoadOptions(ExecutorConfig(deterministic=True)), dtype)

    def work(group: GroupCoordinator) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        held, own = shard(count, group), shard(tokens, group)
        local = make_experts(config, method, lambda part: (gate_up, down)[part][held], held, dtype)
        experts, before = AllToAllExperts(local, count, group), group.num_collectives
        with torch.inference_mode():
            made = experts(states[own], weights[own], chosen[own])
            started = group.num_collectives - before
            return made, group.all_reduce(local(states, weights, chosen))[own], started, count_sent(group)

    sent: list[list[int]] = [[] for _ in ranks]

    def count_sent(group: GroupCoordinator) -> int:
        return sum(sent[group.rank])

    with pytest.MonkeyPatch.context() as patch:
        for group in ranks:
            patch.setattr(group, "all_to_all", Recorder(group.all_to_all, sent[group.rank]))
        results = together(ranks, work)
    assert all(torch.equal(made, wanted) for made, wanted, _, _ in results)
    assert [started for *_, started, _ in results] == [3] * size, "each rank starts as many collectives"
    each = -(-count // size)
    pairs = {(token, expert // each) for token, experts in enumerate(chosen.tolist()) for expert in experts}
    assert sum(rows for *_, rows in results) == len(pairs)


class Recorder:
    """An ``all_to_all`` that keeps how many rows of states were sent."""

    def __init__(self, all_to_all: Any, sent: list[int]) -> None:
        self._all_to_all, self._sent = all_to_all, sent

    def __call__(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        if rows.dim() == 2 and rows.shape[1] > HIDDEN:  # neither counts nor results
            self._sent += sent
        return self._all_to_all(rows, sent, received)
