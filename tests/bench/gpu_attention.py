"""FlashInfer's ways to compute a decode step's attention, and a prompt's: `python -m tests.bench.gpu_attention`.

On tensor cores (what the engine uses), on CUDA cores, and with the kernels for Hopper (FA3), each in a CUDA graph over
the layers of a KV pool as the engine's; microseconds a layer, and the bytes of keys and values that are read a second.
"""

import statistics
from collections.abc import Callable
from functools import partial

import flashinfer
import torch
from quire_engine.attention.flashinfer import LAYOUT
from quire_engine.errors import first_line

DTYPE, BLOCK, LAYERS, TRIES = torch.bfloat16, 16, 8, 10
# Query heads, KV heads, numbers of a head.
SHAPES = {"qwen3-0.6b": (16, 8, 128), "qwen3-8b": (32, 8, 128), "llama3-1b": (32, 8, 64)}
# Sequences, tokens of each.
DECODES = ((1, 400), (1, 4000), (8, 1000), (64, 350), (64, 2000), (256, 500))
# Tokens of a prompt, tokens before them.
PROMPTS = ((512, 0), (2048, 0), (8192, 0), (2048, 16_000))
WAYS = {"tensor cores": (True, "fa2"), "CUDA cores": (False, "fa2"), "FA3": (True, "fa3")}


def main() -> None:
    device = torch.device("cuda")
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    for name, shape in SHAPES.items():
        for count, length in DECODES:
            read = count * length * 2 * shape[1] * shape[2] * DTYPE.itemsize
            told = [tell(way, partial(decode, workspace, shape, count, length, *WAYS[way]), read) for way in WAYS]
            print(f"{name}, {count} sequences of {length}: {'; '.join(told)}", flush=True)
        for count, past in PROMPTS:
            done = 4 * shape[0] * shape[2] * (count * past + count * (count + 1) // 2)
            told = [tell(way, partial(prefill, workspace, shape, count, past, way), done) for way in ("fa2", "fa3")]
            print(f"{name}, a prompt of {count} behind {past}: {'; '.join(told)}", flush=True)


def tell(way: str, measure: Callable[[], float], amount: int) -> str:
    """The time, and ``amount`` (bytes or operations) a second, in tera; or why there is none, as not every way is for
    every GPU and shape.
    """
    try:
        seconds = measure()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"{way} cannot: {first_line(error)}"
    return f"{way} {1e6 * seconds:.1f} us ({amount / seconds / 1e12:.2f} T/s)"


def pool(blocks: int, kv_heads: int, head_dim: int) -> torch.Tensor:
    return torch.randn(blocks, LAYERS, 2, kv_heads, BLOCK, head_dim, device="cuda").to(DTYPE)


def decode(
    workspace: torch.Tensor, shape: tuple[int, int, int], count: int, length: int, on_tensor_cores: bool, backend: str
) -> float:
    heads, kv_heads, head_dim = shape
    pages = -(-length // BLOCK)
    kv, ids = pool(count * pages + 1, kv_heads, head_dim), torch.randperm(count * pages, device="cuda").int() + 1
    indptr, last = (torch.arange(count + 1) * pages).int(), torch.full((count,), length - (pages - 1) * BLOCK).int()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        LAYOUT,
        use_cuda_graph=True,
        use_tensor_cores=on_tensor_cores,
        backend=backend,
        paged_kv_indptr_buffer=indptr.cuda(),
        paged_kv_indices_buffer=ids.clone(),
        paged_kv_last_page_len_buffer=last.cuda(),
    )
    lengths = torch.full((count,), length).int()
    options = {"q_data_type": DTYPE, "kv_data_type": DTYPE, "seq_lens": lengths, "non_blocking": True}
    wrapper.plan(indptr, ids, last, heads, kv_heads, head_dim, BLOCK, **options)
    return seconds_a_layer(wrapper, kv, torch.randn(count, heads, head_dim, device="cuda").to(DTYPE))


def prefill(workspace: torch.Tensor, shape: tuple[int, int, int], count: int, past: int, backend: str) -> float:
    heads, kv_heads, head_dim = shape
    length = count + past
    pages = -(-length // BLOCK)
    kv, ids = pool(pages + 1, kv_heads, head_dim), torch.randperm(pages, device="cuda").int() + 1
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT, backend=backend)
    arrays = (torch.tensor(each).int() for each in ([0, count], [0, pages]))
    last, lengths = torch.tensor([length - (pages - 1) * BLOCK]).int(), torch.tensor([length]).int()
    options = {"q_data_type": DTYPE, "kv_data_type": DTYPE, "seq_lens": lengths, "non_blocking": True, "causal": True}
    wrapper.plan(*arrays, ids, last, heads, kv_heads, head_dim, BLOCK, **options)
    return seconds_a_layer(wrapper, kv, torch.randn(count, heads, head_dim, device="cuda").to(DTYPE))


def seconds_a_layer(wrapper: object, kv: torch.Tensor, query: torch.Tensor) -> float:
    out = torch.empty_like(query)

    def run() -> None:
        for layer in range(LAYERS):
            wrapper.run(query, kv[:, layer], out=out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(TRIES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e-3 * begin.elapsed_time(end) / LAYERS)
    return statistics.median(times)


if __name__ == "__main__":
    main()
