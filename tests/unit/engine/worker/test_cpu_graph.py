"""A CPU graph does what it captured, again, for any number of rows and on the same memory, and refuses to capture what
it could not repeat.
"""

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.kernels import ops as fused
from quire_engine.kernels.bindings import library
from quire_engine.kernels.host_call import host_call
from quire_engine.kernels.packed_linear import PackedInt8, PackedWeight, pack_weight, quantize
from quire_engine.worker.cpu_graph import KERNELS, CpuGraph, NotCapturableError, capture

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels cannot be compiled here")
HIDDEN, INNER, HEADS = 64, 96, 4


@dataclass
class Layers:
    """Layers of all kernels but attention, on residual states that they change in place."""

    norm: torch.Tensor
    gate_up: list[PackedWeight]
    down: list[PackedInt8]

    @classmethod
    def random(cls, dtype: torch.dtype, count: int = 3) -> "Layers":
        torch.manual_seed(0)
        kernels = library()
        assert kernels is not None
        gate_up = [pack_weight(torch.randn(2 * INNER, HIDDEN).to(dtype) / 8, None) for _ in range(count)]
        down = [PackedInt8(kernels, *quantize(torch.randn(HIDDEN, INNER) / 8), None, dtype) for _ in range(count)]
        return cls(torch.randn(HIDDEN).to(dtype), [each for each in gate_up if each], down)

    def run(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        update = None
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            if update is None:
                normed = fused.rms_norm(states, self.norm, 1e-5)
            else:
                normed = fused.add_rms_norm(update, states, self.norm, 1e-5)
            fused.rotate(normed.view(len(states), HEADS, -1)[:, 1:], cos, sin)
            update = down.matmul(fused.silu_mul(gate_up.matmul(normed)), gated=False)
        assert update is not None
        return update


def num_calls(graph: CpuGraph) -> int:
    """The calls of kernels, where there are none of the host."""
    (calls,) = graph._parts
    assert not callable(calls)
    return len(calls)


def inputs(rows: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    angles = torch.randn(rows, HIDDEN // HEADS // 2)
    return torch.randn(rows, HIDDEN).to(dtype), angles.cos(), angles.sin()


@settings(deadline=None, max_examples=30)
@given(
    captured=st.integers(2, 9),
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_every_replay_is_the_work_itself(captured: int, sizes: list[int], dtype: torch.dtype) -> None:
    layers, made = Layers.random(dtype), list[torch.Tensor]()

    def work(*states: torch.Tensor) -> torch.Tensor:
        made.append(layers.run(*states))
        return made[0]

    graph = capture(work, *inputs(70, 7, dtype), tokens=captured)
    expected = layers.run(*(each[:captured] for each in inputs(70, 7, dtype)))
    assert torch.equal(made[0], expected), "capturing does the work too"
    for rows in sizes:
        assert torch.equal(graph.replay(*inputs(rows, rows, dtype)), layers.run(*inputs(rows, rows, dtype)))


def test_a_graph_has_room_for_so_many_tokens_and_no_more() -> None:
    graph = capture(Layers.random(torch.float32).run, *inputs(10, 7, torch.float32), tokens=2)
    assert graph.replay(*inputs(10, 7, torch.float32)).shape == (10, HIDDEN)
    with pytest.raises(AssertionError):
        graph.replay(*inputs(11, 7, torch.float32))


def test_work_on_a_part_of_the_tokens_is_not_captured() -> None:
    states, norm = torch.randn(4, HIDDEN), torch.ones(HIDDEN)
    with pytest.raises(NotCapturableError, match="some rows of the tokens"):
        capture(lambda rows: fused.rms_norm(rows[:3], norm, 1e-5), states, tokens=4)


def test_the_first_capture_does_not_import_what_torch_compiles_with() -> None:
    first = (
        "import sys, torch\n"
        "from quire_engine.worker.cpu_graph import capture\n"
        "capture(lambda x: torch.empty(4).view(2, 2), torch.empty(2), tokens=2)\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", first], check=True, timeout=120)


def test_a_graphs_memory_is_reused_within_it_only() -> None:
    def held(count: int) -> int:
        layers = Layers.random(torch.bfloat16, count)
        states = inputs(8, 0, torch.bfloat16)
        graph = capture(layers.run, *states, tokens=8)
        graphs.append((graph, layers, states))
        return sum(size * len(free) for size, free in graph._captured.allocator._free.items())

    graphs: list[tuple[CpuGraph, Layers, tuple[torch.Tensor, ...]]] = []
    assert held(20) == held(3), "more layers need no more memory"
    before = [graph.replay(*inputs(8, 1, torch.bfloat16)).clone() for graph, _, _ in graphs]
    for graph, _, (_, cos, sin) in graphs:
        assert not graph.replay(torch.zeros(8, HIDDEN, dtype=torch.bfloat16), cos, sin).any()
    for (graph, _, _), result in zip(graphs, before, strict=True):
        made = graph.replay(*inputs(8, 1, torch.bfloat16))
        assert torch.equal(made, result), "another graph's replay changed nothing here"


@pytest.mark.parametrize(
    "work",
    [
        lambda states: states + 1,
        lambda states: fused.rms_norm(states, torch.ones(HIDDEN), 1e-5),  # makes its own weights, by torch
        lambda states: states.sum(),
        lambda states: states.clone(),
        lambda states: states.t().reshape(-1),  # a copy, as it is no view
        lambda states: states.index_select(0, torch.tensor([0])),
    ],
)
def test_work_that_cannot_be_replayed_is_not_captured(work: Callable[[torch.Tensor], torch.Tensor]) -> None:
    states = torch.randn(4, HIDDEN)
    with pytest.raises(NotCapturableError, match="is not one of the compiled kernels"):
        capture(work, states, tokens=4)
    with pytest.raises(NotCapturableError), torch.inference_mode():
        capture(work, states, tokens=4)
    assert torch.equal(states.clone() + 0, states), "torch works as before"


def test_the_host_does_its_work_again_at_its_place() -> None:
    norm, states, update = torch.ones(HIDDEN), torch.zeros(4, HIDDEN), torch.zeros(4, HIDDEN)
    numbers = update.numpy()

    def add_one() -> None:
        numbers[:] += 1
        if numbers[0, 0] == 3:
            raise OSError("no more")

    def work(_: torch.Tensor) -> torch.Tensor:
        fused.add_rms_norm(update, states, norm, 1e-5)
        host_call(add_one)
        return fused.add_rms_norm(update, states, norm, 1e-5)

    unused = torch.zeros(4)
    graph = capture(work, unused, tokens=4)
    assert torch.equal(states, torch.full_like(states, 0 + 1))
    graph.replay(unused)
    assert torch.equal(states, torch.full_like(states, 0 + 1 + 1 + 2))
    with pytest.raises(OSError, match="no more"):
        graph.replay(unused)
    assert torch.equal(states, torch.full_like(states, 0 + 1 + 1 + 2 + 2)), "nothing comes after a failure"
    host_call(lambda: None)
    assert len(graph._parts) == 3, "nothing is captured afterwards"


def test_nothing_is_captured_after_a_recording_or_from_other_threads() -> None:
    norm, states, others = torch.ones(HIDDEN), torch.randn(4, HIDDEN), torch.randn(4, HIDDEN)

    def work(states: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=fused.rms_norm, args=(others, norm, 1e-5))
        other.start()
        other.join()
        return fused.rms_norm(states, norm, 1e-5)

    graph = capture(work, states, tokens=4)
    assert num_calls(graph) == 1
    kernels = library()
    assert kernels is not None
    for name in KERNELS:
        assert not hasattr(getattr(kernels, name), "errcheck") or getattr(kernels, name).errcheck is None
    fused.rms_norm(states, norm, 1e-5)
    assert num_calls(graph) == 1


def test_several_threads_record_and_compute_at_once() -> None:
    norm, large = torch.ones(HIDDEN), torch.randn(4000, HIDDEN)
    counts: list[int] = []
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            fused.rms_norm(large, norm, 1e-5)

    def record_often() -> None:
        states = torch.randn(4, HIDDEN)
        for _ in range(150):
            graph = capture(lambda x: [fused.rms_norm(x, norm, 1e-5) for _ in range(8)][-1], states, tokens=4)
            counts.append(num_calls(graph))

    recorders = [threading.Thread(target=record_often) for _ in range(2)]
    computers = [threading.Thread(target=compute, daemon=True) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in (*computers, *recorders):
            thread.start()
        for thread in recorders:
            thread.join(60)
    finally:
        done.set()
        sys.setswitchinterval(interval)
    for thread in computers:
        thread.join(60)
    assert counts == [8] * 300


def test_every_kernel_that_can_be_recorded_is_known_to_the_library() -> None:
    kernels = library()
    assert kernels is not None
    assert all(kernels.quire_player(name.encode()) for name in KERNELS)
    assert not kernels.quire_player(b"quire_linear_pack")
