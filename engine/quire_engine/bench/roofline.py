"""How fast the device could be at best: its measured ceilings, and the least work of a workload.

The roofline model (Williams, Waterman and Patterson 2009), for each step: no less time than its products take at the
highest rate that products reach here, and no less than reading the weights and the context once takes at the highest
rate at which anything here reads memory. What a step does besides counts as free.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire_engine.bench.workload import Workload
from quire_engine.models.config import DecoderConfig
from quire_engine.models.linear import make_linear
from quire_engine.models.options import LoadOptions

PRODUCT_ROWS, PRODUCT_SIDE = 2048, 2048
READ_BYTES = 1 << 28
TRIES = 7


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device does at best: floating-point operations and bytes read, a second."""

    operations: float
    bytes: float

    def seconds(self, operations: float, size: float) -> float:
        """The least time for so many of both."""
        return max(operations / self.operations, size / self.bytes)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model costs: ``layers`` and ``head`` numbers of weights, ``context`` numbers of KV memory a token,
    ``attention`` operations for each pair of a token and one that it sees, ``width`` bytes a number.
    """

    layers: int
    head: int
    context: int
    attention: int
    width: int

    @classmethod
    def of(cls, config: DecoderConfig, width: int) -> "Costs":
        """Of a decoder in numbers of ``width`` bytes; of experts, those that one token takes."""
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = config.hidden_size * (2 * heads + 2 * kv_heads)
        dense = 3 * config.hidden_size * config.ffn_size
        feed_forward = config.num_layers * dense
        if config.experts is not None:
            sparse = 3 * config.hidden_size * config.experts.ffn_size * config.experts.per_token
            feed_forward = sum(sparse if is_sparse else dense for is_sparse in config.experts.layers)
        return cls(
            layers=config.num_layers * attention + feed_forward,
            head=config.hidden_size * config.vocab_size,
            context=2 * config.num_layers * kv_heads,
            attention=4 * config.num_layers * heads,
            width=width,
        )


def measure_ceilings(dtype: torch.dtype, device: torch.device) -> Ceilings:
    """Of this device, with as many threads as torch has."""
    weight = torch.randn(PRODUCT_SIDE, PRODUCT_SIDE).to(device, dtype)
    product, x = (
        make_linear(weight, None, LoadOptions(device)),
        torch.randn(PRODUCT_ROWS, PRODUCT_SIDE).to(device, dtype),
    )
    operations = 2 * PRODUCT_ROWS * PRODUCT_SIDE**2 / _best_seconds(lambda: product(x), device)
    return Ceilings(operations, max(_sum_bytes(device), _row_bytes(dtype, device)))


def _sum_bytes(device: torch.device) -> float:
    """Bytes a second that a sum over a large tensor reads."""
    numbers = torch.ones(READ_BYTES // 4, device=device)
    return READ_BYTES / _best_seconds(numbers.sum, device)


def _row_bytes(dtype: torch.dtype, device: torch.device) -> float:
    """Bytes a second that the product of a large weight with one row reads."""
    weight = torch.ones(READ_BYTES // dtype.itemsize // PRODUCT_SIDE, PRODUCT_SIDE, dtype=dtype, device=device)
    product, x = make_linear(weight, None, LoadOptions(device)), torch.ones(1, PRODUCT_SIDE, dtype=dtype, device=device)
    return READ_BYTES / _best_seconds(lambda: product(x), device)


def least_seconds(workload: Workload, costs: Costs, ceilings: Ceilings) -> float:
    """The least time for a workload whose requests all run at once: the prompts, then a step for each further token."""
    seconds = _prefill_seconds(workload, costs, ceilings)
    for made in range(1, max(workload.outputs)):
        contexts = [
            len(prompt) + made for prompt, size in zip(workload.prompts, workload.outputs, strict=True) if size > made
        ]
        seen = sum(contexts)
        operations = 2 * len(contexts) * (costs.layers + costs.head) + seen * costs.attention
        size = costs.width * (costs.layers + costs.head + seen * costs.context)
        seconds += ceilings.seconds(operations, size)
    return seconds


def _prefill_seconds(workload: Workload, costs: Costs, ceilings: Ceilings) -> float:
    tokens = sum(map(len, workload.prompts))
    pairs = sum(len(prompt) * (len(prompt) + 1) // 2 for prompt in workload.prompts)
    operations = 2 * (tokens * costs.layers + len(workload.prompts) * costs.head) + pairs * costs.attention
    return ceilings.seconds(operations, costs.width * (costs.layers + costs.head))


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(TRIES):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best
