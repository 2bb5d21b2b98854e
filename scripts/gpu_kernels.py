"""Compiles FlashInfer's kernels ahead, on a machine without a GPU: `make gpu-kit` runs it for each kind of GPU.

    FLASHINFER_CUDA_ARCH_LIST=9.0a CUDA_HOME=... python scripts/gpu_kernels.py --out FOLDER [--groups engine,short]

FlashInfer and apache-tvm-ffi must be importable. A module that is in the folder already is not compiled again.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

GROUPS = ("engine", "short", "all", "fa3")
"""Those of the engine with Qwen3 in bfloat16; what the short form of tests/gpu needs beside them; those of all its
tests; FA3's, which takes ten minutes of one core.
"""
Spec = Any  # flashinfer.jit.core.JitSpec


def main() -> None:
    """Prints a line for each module. Exits with 1 if one cannot be compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="gets NAME/NAME.so of each module")
    parser.add_argument("--groups", default="engine,short", metavar="NAMES", help=f"which modules: {', '.join(GROUPS)}")
    parser.add_argument("--only", default="", metavar="TEXT", help="of these only those whose names contain it")
    parser.add_argument("--list", action="store_true", help="print the names and compile nothing")
    options = parser.parse_args()
    failed = 0
    for group in options.groups.split(","):
        for spec in specs(group):
            if options.only not in spec.name:
                continue
            if options.list:
                print(f"{group} {spec.name}")
            else:
                failed += not compile_module(spec, options.out)
    sys.exit(failed > 0)


def compile_module(spec: Spec, out: Path) -> bool:
    """Compiles one module, unless it is there. Returns whether it is there now."""
    target = out / spec.name / f"{spec.name}.so"
    if not target.is_file():
        began = time.monotonic()
        try:
            spec.build(verbose=False)
        except RuntimeError as error:
            print(f"{spec.name}: {error}", file=sys.stderr, flush=True)
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        shutil.copyfile(spec.jit_library_path, part)
        part.rename(target)
        size = target.stat().st_size / 1e6
        print(f"{spec.name}: {size:.1f} MB after {time.monotonic() - began:.0f} s", flush=True)
    return True


def specs(group: str) -> Iterator[Spec]:
    """The modules of a group, as the engine's calls have FlashInfer name them."""
    import torch

    half, bf16, fp8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
    match group:
        case "engine":
            yield from small()
            yield from (decode(bf16, 128, False), prefill(bf16, bf16, 128, False))
        case "short":
            yield from (prefill(bf16, bf16, 64, False), prefill(bf16, bf16, 128, True), decode(bf16, 128, True))
        case "all":
            from flashinfer.jit.activation import gen_act_and_mul_module

            yield gen_act_and_mul_module("gelu_tanh")
            for dtype, size, window in product((bf16, half), (64, 128, 256), (False, True)):
                yield prefill(dtype, dtype, size, window)
            for dtype, size, window in product((bf16, half), (64, 128, 256), (False, True)):
                yield prefill(dtype, fp8, size, window)
            for dtype, window in product((bf16, half), (False, True)):
                yield prefill(dtype, dtype, 256, window, soft_cap=True)
                yield sinks(dtype, 64, window)
        case "fa3":
            yield prefill(bf16, bf16, 128, False, backend="fa3")
        case _:
            raise SystemExit(f"error: no group of kernels is called {group}; there are {', '.join(GROUPS)}")


def small() -> Iterator[Spec]:
    """Storing keys and values, norms, rotation and the activation."""
    from flashinfer.jit.activation import gen_act_and_mul_module
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.page import gen_page_module
    from flashinfer.jit.rope import gen_rope_module

    makers: tuple[Callable[[], Spec], ...] = (
        gen_page_module,
        gen_norm_module,
        gen_rope_module,
        partial(gen_act_and_mul_module, "silu"),
    )
    yield from (make() for make in makers)


def decode(dtype: Any, head_dim: int, window: bool) -> Spec:
    """Decode steps on CUDA cores."""
    import torch
    from flashinfer.jit.attention.modules import gen_batch_decode_module

    return gen_batch_decode_module(dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, window, False)


def prefill(
    dtype: Any, kv_dtype: Any, head_dim: int, window: bool, *, soft_cap: bool = False, backend: str = "fa2"
) -> Spec:
    """Prompts, and decode steps on tensor cores."""
    import torch
    from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module, gen_batch_prefill_module

    make = _gen_batch_prefill_primary_module if backend == "fa2" else gen_batch_prefill_module
    return make(
        *(backend, dtype, kv_dtype, dtype, torch.int32, head_dim, head_dim),
        *(0, window, soft_cap, False),  # no rotation inside, and float32 for products of queries and keys
    )


def sinks(dtype: Any, head_dim: int, window: bool) -> Spec:
    """Layers with sinks, as BatchAttentionWithAttentionSinkWrapper makes the module."""
    import torch
    from flashinfer.jit.attention import gen_customize_batch_prefill_module
    from flashinfer.jit.attention.variants import attention_sink_decl
    from flashinfer.jit.utils import filename_safe_dtype_map

    names: Mapping[Any, str] = filename_safe_dtype_map
    return gen_customize_batch_prefill_module(
        "fa2",
        f"batch_prefill_attention_sink_{names[dtype]}_swa_{window}_fa2",
        *(dtype, dtype, dtype, torch.int32, head_dim, head_dim),
        *(["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", attention_sink_decl["fa2"]),
        use_sliding_window=window,
        use_fp16_qk_reduction=False,
        pos_encoding_mode=0,
        paged_kv_stride_mode="independent",
        module_surface="full",
    )


if __name__ == "__main__":
    if not os.environ.get("FLASHINFER_CUDA_ARCH_LIST"):
        raise SystemExit("error: FLASHINFER_CUDA_ARCH_LIST names no GPU to compile for, such as 9.0a")
    main()
