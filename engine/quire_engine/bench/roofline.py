"""The roofline: a device's measured limits, and the least time that a workload takes with them.

The roofline model (Williams, Waterman and Patterson 2009), for each step: no less time than its products take at the
highest rate that products reach here, and no less than reading the weights and the context once takes at the highest
rate at which anything here reads memory. Everything else in a step counts as free.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quire_engine.bench.workload import Workload
from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.quantization.base import DenseMethod, Linear
from quire_engine.quantization.quantized_linear import QuantizedLinear
from quire_engine.quantization.schemes import make_linear, make_quantization

PRODUCT_ROWS, PRODUCT_SIDES = 2048, (1024, 2048, 4096)
READ_SIDES = (1024, 2048)
# Bytes that are read at once, whatever a model's weights are: more than a processor's caches hold, and little enough to
# lie beside a model and its KV memory.
LEAST_READ, MOST_READ = 1 << 24, 1 << 29
TRIES = 3
SAMPLE_SIDE = 1024  # of the layers by which the bytes of a weight are found
LEADERS = 2  # kernels that are measured again after the first time


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The device's limits: floating-point operations and bytes read, a second."""

    operations: float
    bytes: float

    def seconds(self, operations: float, size: float) -> float:
        """The least time for ``operations`` and for reading ``size`` bytes."""
        return max(operations / self.operations, size / self.bytes)


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes a number: of a layer's weight, of the head's, and of KV memory. Scales count with what they scale."""

    layers: float
    head: float
    context: float

    @classmethod
    def of(cls, options: LoadOptions, dtype: torch.dtype, kv_cache_dtype: torch.dtype) -> "Widths":
        """Those of a model of ``dtype`` that is loaded with ``options``, by the layers that these make."""
        made = make_quantization(options, dtype)
        layers, head = (_bytes_a_weight(method, dtype) for method in (made.linear, made.head))
        return cls(layers, head, kv_cache_dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Costs:
    """A model's costs: ``layers`` and ``head`` numbers of weights, ``context`` numbers of KV memory a token,
    ``attention`` operations for each pair of a token and one that it sees, and how wide numbers are.
    """

    layers: int
    head: int
    context: int
    attention: int
    widths: Widths

    @property
    def weights(self) -> float:
        """Bytes of weights that a step reads."""
        return self.layers * self.widths.layers + self.head * self.widths.head

    @classmethod
    def of(cls, config: DecoderConfig, widths: Widths) -> "Costs":
        """The costs of a decoder; of experts, those that one token uses."""
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = config.hidden_size * (2 * heads + 2 * kv_heads)
        dense = 3 * config.hidden_size * config.intermediate_size
        feed_forward = config.num_layers * dense
        if config.moe is not None:
            sparse = 3 * config.hidden_size * config.moe.moe_intermediate_size * config.moe.num_experts_per_tok
            feed_forward = sum(sparse if is_sparse else dense for is_sparse in config.moe.is_moe_layer)
        return cls(
            layers=config.num_layers * attention + feed_forward,
            head=config.hidden_size * config.vocab_size,
            context=2 * config.num_layers * kv_heads,
            attention=4 * config.num_layers * heads,
            widths=widths,
        )


class Ceiling:
    """The highest rate that any of several kernels has reached so far, each given with the amount of work of one call.
    0 before the first measurement.
    """

    def __init__(self, kernels: Sequence[tuple[float, Callable[[], object]]], device: torch.device) -> None:
        self._kernels = list(kernels)
        self._device = device
        self.rate = 0.0

    def measure(self) -> None:
        """Measures all kernels the first time, and the fastest of them each further time."""
        rates = [amount / _best_seconds(work, self._device) for amount, work in self._kernels]
        self.rate = max(self.rate, *rates)
        order = sorted(range(len(rates)), key=rates.__getitem__, reverse=True)
        self._kernels = [self._kernels[place] for place in order[:LEADERS]]


class Machine:
    """A device's limits, with as many threads as torch has.

    A shared machine is slower at one time than at another, so its limits are measured again and again among the rounds
    of the systems, and the best of all times counts. Products have several shapes: those of this engine, with weights
    as ``options`` hold them and plain, and torch's own. What is read is as large as the ``weights`` of the model, in
    bytes, as a part of them may lie in a cache.
    """

    def __init__(self, dtype: torch.dtype, options: LoadOptions, weights: float) -> None:
        size = int(max(LEAST_READ, min(weights, MOST_READ)))
        self._operations = Ceiling(list(_products(dtype, options)), options.device)
        self._bytes = Ceiling(list(_reads(dtype, options, size)), options.device)

    def measure(self) -> None:
        """Measures once more."""
        with torch.inference_mode():
            self._operations.measure()
            self._bytes.measure()

    @property
    def ceilings(self) -> Ceilings:
        """The best rates until now."""
        return Ceilings(self._operations.rate, self._bytes.rate)


def _products(dtype: torch.dtype, options: LoadOptions) -> Iterator[tuple[float, Callable[[], object]]]:
    """Products of a matrix with ``PRODUCT_ROWS`` rows, and the operations in each."""
    for side in PRODUCT_SIDES:
        weight = torch.randn(side, side).to(options.device, dtype)
        x = torch.randn(PRODUCT_ROWS, side).to(options.device, dtype)
        operations = 2 * PRODUCT_ROWS * side**2
        yield from ((operations, partial(linear, x)) for linear in _held(weight, options))
        yield operations, partial(torch.mm, x, weight)


def _reads(dtype: torch.dtype, options: LoadOptions, size: int) -> Iterator[tuple[float, Callable[[], object]]]:
    """A sum over a large tensor, and products of one row with a large weight."""
    numbers = torch.ones(size // 4, device=options.device)
    yield 4 * len(numbers), numbers.sum
    for side in READ_SIDES:
        weight = torch.ones(size // dtype.itemsize // side, side, dtype=dtype, device=options.device)
        x = torch.ones(1, side, dtype=dtype, device=options.device)
        yield from ((_held_bytes(linear, weight), partial(linear, x)) for linear in _held(weight, options))


def _held(weight: torch.Tensor, options: LoadOptions) -> Iterator[Linear]:
    """A layer of ``weight`` in plain numbers, and one as ``options`` hold it where that is another."""
    yield make_linear(weight, None, LoadOptions(device=options.device))
    if options.config.quantization is not None:
        yield make_linear(weight, None, options)


def _held_bytes(linear: Linear, weight: torch.Tensor) -> int:
    return linear.nbytes if isinstance(linear, QuantizedLinear) else weight.nbytes


def _bytes_a_weight(method: object, dtype: torch.dtype) -> float:
    """By a layer that ``method``, which takes plain weights, makes on the CPU."""
    assert isinstance(method, DenseMethod)
    weight = torch.zeros(SAMPLE_SIDE, SAMPLE_SIDE, dtype=dtype)
    return _held_bytes(method.pack(weight, None), weight) / SAMPLE_SIDE**2


def least_seconds(workload: Workload, costs: Costs, ceilings: Ceilings) -> float:
    """The least time for a workload whose requests all run at once: the prompts, then a step for each further token."""
    seconds = _prefill_seconds(workload, costs, ceilings)
    for made in range(1, max(workload.outputs)):
        contexts = [
            len(prompt) + made for prompt, size in zip(workload.prompts, workload.outputs, strict=True) if size > made
        ]
        seen = sum(contexts)
        operations = 2 * len(contexts) * (costs.layers + costs.head) + seen * costs.attention
        size = costs.weights + seen * costs.context * costs.widths.context
        seconds += ceilings.seconds(operations, size)
    return seconds


def _prefill_seconds(workload: Workload, costs: Costs, ceilings: Ceilings) -> float:
    tokens = sum(map(len, workload.prompts))
    pairs = sum(len(prompt) * (len(prompt) + 1) // 2 for prompt in workload.prompts)
    operations = 2 * (tokens * costs.layers + len(workload.prompts) * costs.head) + pairs * costs.attention
    return ceilings.seconds(operations, costs.weights)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    measure = _seconds_on_gpu if device.type == "cuda" else _seconds
    return min(measure(work) for _ in range(TRIES))


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _seconds_on_gpu(work: Callable[[], object]) -> float:
    """By the GPU's clock, as a launch takes a good part of what the work does."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))
