"""Writes model folders of random weights fast, plain or quantised: for benchmarks, which need a model's shape only.

    python -m tests.bench.random_checkpoint --shape qwen3-8b --form int4

``model_of_shape`` initialises weights as transformers does, in minutes for 8 B parameters. Here every tensor is cut
from one pool of random numbers, so that writing takes as long as the file system does. Qwen3 is published in these
forms: bfloat16; ``fp8`` in blocks of 128 × 128; ``int4`` as AWQ stores it, in groups of 128.
"""

import argparse
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from quire_engine.bench.workload import SHAPES, settings_of_shape
from quire_proto.folders import user_cache_folder
from safetensors.torch import save_file

FORMS = ("bf16", "fp8", "int4")
BLOCK, GROUP, WEIGHTS_A_WORD = 128, 128, 8
SPREAD = 0.02  # the standard deviation that transformers initialises Qwen3 with
# Of the stored numbers: in float8 far below the largest, which is 448; four random bits have theirs.
FP8_SPREAD, INT4_SPREAD = 16.0, 4.61
POOL_NUMBERS = 1 << 24
FILE_BYTES = 4 << 30
QUANTIZATION: Mapping[str, Mapping[str, Any] | None] = {
    "bf16": None,
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head"],
    },
    "int4": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
}
# Bytes that a step reads for a weight of a layer, with scales and zeros.
BYTES_A_WEIGHT = {"bf16": 2.0, "fp8": 1 + 4 / BLOCK**2, "int4": 0.5 + 2.5 / GROUP}
Tensors = Iterator[tuple[str, torch.Tensor]]


def checkpoint(shape: str, form: str) -> Path:
    """Returns the folder of a model of ``shape``, as ``settings_of_shape`` takes it. Writes it if there is none."""
    settings = settings_of_shape(shape)
    name = shape if shape in SHAPES else hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    folder = user_cache_folder() / "checkpoints" / f"{name}-{form}"
    if not folder.is_dir():
        temporary = folder.with_suffix(".part")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary, settings, form)
        temporary.rename(folder)
    return folder


def write(folder: Path, settings: Mapping[str, Any], form: str) -> None:
    """Writes ``config.json``, the weights in files of at most ``FILE_BYTES`` and one tensor more, and their index."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(folder)
    stored = QUANTIZATION[form]
    if stored is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stored}, indent=1))
    linears = {f"{name}.weight" for name, each in model.model.named_modules() if isinstance(each, torch.nn.Linear)}
    index: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    pool, size = Pool(), 0

    def flush() -> None:
        name = f"model-{len(set(index.values())):05}.safetensors"
        index.update(dict.fromkeys(pending, name))
        save_file(pending, folder / name, {"format": "pt"})
        pending.clear()

    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, empty in model.state_dict().items():
        if name in tied:
            continue
        is_linear = name.removeprefix("model.") in linears
        make = _FORMS[form] if is_linear else _plain
        for each, tensor in make(name, empty, pool):
            pending[each] = tensor
            size += tensor.nbytes
        if size > FILE_BYTES:
            flush()
            size = 0
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


class Pool:
    """Random numbers, cut into tensors of any shape; each begins elsewhere."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        normal = torch.randn(POOL_NUMBERS, generator=generator)
        self._numbers = {
            torch.bfloat16: (normal * SPREAD).bfloat16(),
            torch.float8_e4m3fn: (normal * FP8_SPREAD).to(torch.float8_e4m3fn).view(torch.uint8),
            torch.int32: torch.randint(-(1 << 31), 1 << 31, (POOL_NUMBERS,), dtype=torch.int32, generator=generator),
        }
        self._offset = 0

    def take(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of random numbers: bfloat16, float8 or words of 32 bits."""
        numbers, size = self._numbers[dtype], torch.Size(shape).numel()
        out = torch.empty(size, dtype=numbers.dtype)
        self._offset = (self._offset + 1_000_003) % POOL_NUMBERS
        done, begin = 0, self._offset
        while done < size:
            part = numbers[begin : begin + size - done]
            out[done : done + len(part)] = part
            done, begin = done + len(part), 0
        return out.view(dtype).view(shape)


def _plain(name: str, empty: torch.Tensor, pool: Pool) -> Tensors:
    """Norms are ones."""
    yield name, torch.ones_like(empty, device="cpu") if empty.dim() == 1 else pool.take(empty.shape, torch.bfloat16)


def _fp8(name: str, empty: torch.Tensor, pool: Pool) -> Tensors:
    outputs, inputs = empty.shape
    yield name, pool.take(empty.shape, torch.float8_e4m3fn)
    yield f"{name}_scale_inv", torch.full((-(-outputs // BLOCK), -(-inputs // BLOCK)), SPREAD / FP8_SPREAD)


def _int4(name: str, empty: torch.Tensor, pool: Pool) -> Tensors:
    (outputs, inputs), layer = empty.shape, name.removesuffix(".weight")
    words = outputs // WEIGHTS_A_WORD
    yield f"{layer}.qweight", pool.take((inputs, words), torch.int32)
    yield f"{layer}.qzeros", torch.full((inputs // GROUP, words), -2004318072, dtype=torch.int32)  # each is 8
    yield f"{layer}.scales", torch.full((inputs // GROUP, outputs), SPREAD / INT4_SPREAD, dtype=torch.float16)


_FORMS: Mapping[str, Callable[[str, torch.Tensor, Pool], Tensors]] = {"bf16": _plain, "fp8": _fp8, "int4": _int4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["qwen3-0.6b"], help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--form", nargs="+", default=["bf16"], choices=FORMS)
    options = parser.parse_args()
    for shape in options.shape:
        for form in options.form:
            began = time.perf_counter()
            folder = checkpoint(shape, form)
            size = sum(path.stat().st_size for path in folder.iterdir())
            print(f"{folder}: {size / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
