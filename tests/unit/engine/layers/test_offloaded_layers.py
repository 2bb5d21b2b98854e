"""Layers in host memory (``--cpu-offload-gb``), on simulated streams: whatever the device does first, a layer computes
with its own weights, and each of the two waits is needed for that. And the budget: what is moved, and what is refused.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from quire_engine.config import EngineArgs
from quire_engine.errors import ModelError
from quire_engine.kernels.packed_linear import in_arena
from quire_engine.layers.offloaded import DeviceArena, HostWeights, load_offloaded_layers
from quire_engine.layers.streamed import AT_ONCE, StreamedLayer
from quire_engine.worker.memory import GROWTH_RESERVE, CpuMemory, check_host_memory

from tests.support.fake_streams import FakeDevice
from tests.support.offload import HostWeightsWithout, Wait

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB, SIZE = 1 << 30, 1024


class StopStepError(Exception):
    """What ends a step before its last layer."""


class NumberedLayer:
    """A layer that reads its weights when the device comes to it, which are all ``number``. Called with True it fails,
    after that is launched.
    """

    is_capturable = True

    def __init__(self, fake: FakeDevice | None, number: int, read: list[Any], nbytes: int) -> None:
        self._fake, self._read = fake, read
        self.weights = in_arena(torch.full((nbytes,), number, dtype=torch.uint8))

    def __call__(self, *args: Any) -> torch.Tensor:
        assert self._fake is not None
        self._fake.launch(lambda: self._read.append(self.weights.unique().tolist()))
        if args[0]:
            raise StopStepError
        return self.weights


def read_on(seed: int, sizes: Sequence[int], steps: Sequence[int], left_out: Wait | None = None) -> list[list[int]]:
    """What each layer reads in ``steps``, each of which ends with the layer of its number, or behind the last one. No
    step waits for the one before.
    """
    fake, read = FakeDevice(seed), list[list[int]]()
    with pytest.MonkeyPatch.context() as patch, fake:
        fake.install(patch)
        weights = HostWeightsWithout(left_out, len(sizes), SIZE, CPU)
        layers = [
            weights.add(lambda number=number, size=size: NumberedLayer(fake, number, read, size))
            for number, size in enumerate(sizes)
        ]
        for stop in steps:
            with suppress(StopStepError):
                for number, layer in enumerate(layers):
                    layer(number == stop)
        fake.run()
    return read


def read_in_order(sizes: Sequence[int], steps: Sequence[int]) -> list[list[int]]:
    return [[number] for stop in steps for number in range(len(sizes))[: stop + 1]]


layer_sizes = st.lists(st.integers(1, SIZE), min_size=1, max_size=7)
stops = st.lists(st.one_of(st.just(9), st.integers(0, 7)), max_size=4)


@given(st.integers(0, 1 << 30), layer_sizes, stops)
def test_whatever_the_device_does_first_each_layer_has_its_weights(
    seed: int, sizes: list[int], steps: list[int]
) -> None:
    assert read_on(seed, sizes, steps) == read_in_order(sizes, steps)


@pytest.mark.parametrize("left_out", Wait)
@pytest.mark.parametrize("steps", [[9], [9, 9], [1, 9]], ids=["one", "two in flight", "after a failure"])
def test_each_wait_is_needed(left_out: Wait, steps: list[int]) -> None:
    sizes, seeds = [SIZE] * 4, range(60)
    assert all(read_on(seed, sizes, steps) == read_in_order(sizes, steps) for seed in seeds)
    assert any(read_on(seed, sizes, steps, left_out) != read_in_order(sizes, steps) for seed in seeds)


def test_the_second_step_in_flight_leaves_a_slot_to_the_first_until_it_has_run() -> None:
    """The copies of its first layers are launched while the first step's last ones still wait for theirs."""
    sizes, seeds, last = [SIZE] * 4, range(60), slice(2, 4)
    assert all(read_on(seed, sizes, [9, 9])[last] == [[2], [3]] for seed in seeds)
    assert any(read_on(seed, sizes, [9, 9], Wait.COPIES_FOR_COMPUTE)[last] != [[2], [3]] for seed in seeds)


def test_a_layer_is_copied_while_the_one_before_it_computes_and_not_before_its_slot_is_free() -> None:
    orders = set()
    for seed in range(200):
        fake, done = FakeDevice(seed), list[Any]()

        class Traced(HostWeights):
            def _copy(self, place: int) -> None:
                self.name = f"copy {place}"
                super()._copy(place)

            def _wait_for_compute(self) -> None:
                super()._wait_for_compute()
                with torch.cuda.stream(self._stream):
                    fake.launch(lambda name=self.name: done.append(name))  # noqa: B023 - run before the next seed

        with pytest.MonkeyPatch.context() as patch, fake:
            fake.install(patch)
            weights = Traced(4, SIZE, CPU)
            layers = [weights.add(lambda place=place: NumberedLayer(fake, place, done, SIZE)) for place in range(4)]  # noqa: B023
            for _ in range(2):
                done.clear()
                for layer in layers:
                    layer(False)
                fake.run()
        assert done.index([0]) < done.index("copy 2") < done.index([2])
        assert done.index([1]) < done.index("copy 3") < done.index([3])
        assert done.index([2]) < done.index("copy 0"), "of the next step"
        orders.add(done.index("copy 2") < done.index([1]))
    assert orders == {False, True}


# What is moved, and what is refused


def load_plain(sizes: Sequence[int], offload_gb: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Layers of these sizes in bytes, on the CPU; nothing is run."""
    fake = FakeDevice(0)
    fake.install(monkeypatch)
    return load_offloaded_layers(
        range(5, 5 + len(sizes)), lambda index: NumberedLayer(fake, index, [], sizes[index - 5]), offload_gb, CPU
    )


@given(count=st.integers(4, 40), layers=st.floats(0, 45))
def test_as_much_as_was_asked_for_is_moved_in_whole_layers_spread_evenly(count: int, layers: float) -> None:
    reason = "too little" if layers < AT_ONCE + 1 else "too much" if layers >= count else None
    with pytest.MonkeyPatch.context() as patch:
        if reason is not None:
            with pytest.raises(ModelError, match=reason):
                load_plain([SIZE] * count, layers * SIZE / GIB, patch)
            return
        made, stats = load_plain([SIZE] * count, layers * SIZE / GIB, patch)
    places = [place for place, layer in enumerate(made) if isinstance(layer, StreamedLayer)]
    assert stats.host_bytes == len(places) * SIZE <= layers * SIZE < stats.host_bytes + SIZE
    assert stats.memory_bytes == (count - len(places) + AT_ONCE) * SIZE
    assert places[0] > 0
    gaps = [after - before for before, after in pairwise(places)]
    assert max(gaps) - min(gaps) <= 1


def test_all_layers_of_a_slot_have_their_tensors_at_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = load_plain([SIZE] * 8, 5 * SIZE / GIB, monkeypatch)
    moved = [layer for layer in made if isinstance(layer, StreamedLayer)]
    addresses = [layer._layer.weights.data_ptr() for layer in moved]  # type: ignore[attr-defined]
    assert addresses[::2] == addresses[:1] * 3
    assert addresses[1::2] == addresses[1:2] * 2
    assert addresses[0] != addresses[1]
    assert not any(layer.is_capturable for layer in moved)


def test_weights_begin_where_any_kernel_can_read() -> None:
    arena = DeviceArena(CPU, torch.empty(4096, dtype=torch.uint8))
    starts = [arena.allocate(nbytes).storage_offset() for nbytes in (1, 0, 512, 513)]
    assert (starts, arena.allocated) == ([0, 512, 512, 1024], 2048)


@pytest.mark.parametrize(("sizes", "refused"), [([4, 4, 1, 4, 2, 4], False), ([2, 2, 2, 4, 2, 2], True)])
def test_smaller_layers_are_moved_too_and_larger_ones_than_the_first_are_refused(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], refused: bool
) -> None:
    blocks = [512 * size for size in sizes]
    if refused:
        with pytest.raises(ModelError, match=r"is exceeded: layers of this model are larger than its first one"):
            load_plain(blocks, 5 * blocks[0] / GIB, monkeypatch)
        return
    _, stats = load_plain(blocks, 5 * blocks[0] / GIB, monkeypatch)
    assert stats.host_bytes == sum(blocks[1:])


def test_memory_that_cannot_be_pinned_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cudart:
        def cudaHostRegister(self, *_: int) -> int:  # noqa: N802 - named by CUDA
            return 2

    def check(code: int) -> None:
        raise RuntimeError(f"out of memory ({code})\n")

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    sentence = r"^3072 bytes of host memory cannot be pinned \(out of memory \(2\)\); lower --cpu-offload-gb\.$"
    with pytest.raises(ModelError, match=sentence):
        HostWeights(3, SIZE, CUDA)


def test_memory_that_is_not_there_is_refused_in_one_sentence() -> None:
    with pytest.raises(ModelError, match="no host memory for weights of"):
        HostWeights(1 << 20, 1 << 40, CPU)


@pytest.fixture
def container(tmp_path: Path) -> Callable[[int], CpuMemory]:
    """The memory of a container with a limit in GiB."""

    def make(limit: int) -> CpuMemory:
        for name, text in {
            "proc/meminfo": f"MemTotal: {900 << 20} kB\nMemAvailable: {500 << 20} kB",
            "proc/self/cgroup": "0::/pod",
            "sys/fs/cgroup/pod/memory.max": str(limit * GIB),
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return CpuMemory(tmp_path)

    return make


@pytest.mark.parametrize(("limit", "processes", "fits"), [(64, 1, True), (64, 3, True), (64, 4, False), (16, 1, False)])
def test_what_all_processes_pin_stays_within_the_containers_limit(
    container: Callable[[int], CpuMemory], limit: int, processes: int, fits: bool
) -> None:
    memory, nbytes = container(limit), 16 * GIB
    if fits:
        check_host_memory(nbytes, processes, memory)
        assert processes * nbytes + memory.used() + GROWTH_RESERVE <= limit * GIB
    else:
        sentence = rf"^--cpu-offload-gb is too much: {processes * 16}\.000 GiB for .* the container's limit, {limit}\."
        with pytest.raises(ModelError, match=sentence):
            check_host_memory(nbytes, processes, memory)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"cpu_offload_gb": -1}, "greater than or equal to 0"),
        ({"cpu_offload_gb": float("inf")}, "finite"),
        ({"cpu_offload_gb": 1, "weights_memory_gb": 1}, "the former is for the CPU, .* and the latter for GPUs"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        EngineArgs.model_validate({"model": Path("model"), **settings})
