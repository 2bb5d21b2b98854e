"""Memory: how much of it is available here, and how much a model's weights will take."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from quire_engine.device.host import ROOT, read_cgroup, read_text

GIB = 1 << 30
PROCESS_BYTES = 600 << 20  # that an engine takes beside its weights, at the least
MAX_HEADER = 100 << 20  # bytes of a safetensors file's header, as the format has it
# Bytes of an element of each type that the format knows.
ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
# Bytes of a weight, scales included, that linear layers hold with --quantization; and of --dtype.
QUANTIZED_BYTES = {"int8": 1.03, "int4": 0.57}
DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def available_memory(root: Path = ROOT) -> int:
    """Bytes that new processes can take: of the machine, or of the cgroups' limits if these are lower."""
    return max(0, min([_meminfo(root, "MemAvailable"), *_cgroup_rooms(root)]))


def total_memory(root: Path = ROOT) -> int:
    """Bytes of the machine's memory, or of the tightest cgroup's limit."""
    return min([_meminfo(root, "MemTotal"), *(limit for limit, _, _ in _cgroups(root))])


def weight_bytes(model: Path, dtype: str = "auto", quantization: str | None = None) -> int:
    """About how many bytes the weights of a folder's safetensors files, or of a GGUF file, will take when they are
    loaded. A file that cannot be read counts by its size: the engine will say what is wrong with it.
    """
    if model.is_file():
        return model.stat().st_size
    total = 0.0
    for file in model.glob("*.safetensors"):
        try:
            elements = _elements(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            total += file.stat().st_size
            continue
        total += loaded_bytes(elements, dtype, quantization)
    return int(total)


def loaded_bytes(elements: Mapping[str, int], dtype: str = "auto", quantization: str | None = None) -> int:
    """Estimates the bytes that elements, counted by safetensors type, take once loaded."""
    return int(sum(count * _loaded_bytes(kind, dtype, quantization) for kind, count in elements.items()))


def memory_shortage(name: str, weights: int, engines: int = 1, quantization: str | None = None) -> str | None:
    """One sentence that says what to do if engines with these bytes of ``weights`` do not fit into the memory that is
    available; else None.
    """
    needed, available = engines * (weights + PROCESS_BYTES), available_memory()
    if needed <= available:
        return None
    ways = ["--engines 1"] if engines > 1 else []
    ways += ["--quantization int8"] if quantization is None else []
    ways += ["--quantization int4"] if quantization != "int4" else []
    what = f"{engines} engines with {name} need" if engines > 1 else f"{name} needs"
    return (
        f"{what} about {needed / GIB:.1f} GiB of memory, and {available / GIB:.1f} GiB are available: try "
        f"{' or '.join([*ways, 'a smaller model'])}."
    )


def _loaded_bytes(kind: str, dtype: str, quantization: str | None) -> float:
    stored = float(ELEMENT_BYTES.get(kind, 1))
    if kind not in ("F32", "F16", "BF16"):  # of a checkpoint that is quantised already
        return stored
    return min(QUANTIZED_BYTES.get(quantization or "", 8.0), DTYPE_BYTES.get(dtype, stored))


def _elements(file: Path) -> Counter[str]:
    """How many elements of each type a safetensors file has."""
    with file.open("rb") as reading:
        length = int.from_bytes(reading.read(8), "little")
        if length > MAX_HEADER:
            raise ValueError(f"{file} has a header of {length} bytes")
        header = json.loads(reading.read(length))
    found: Counter[str] = Counter()
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            found[tensor["dtype"]] += (end - begin) // ELEMENT_BYTES.get(tensor["dtype"], 1)
    return found


def _meminfo(root: Path, name: str) -> int:
    for line in read_text(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return 1 << 62  # unknown, so no bound


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Returns the rest of each cgroup's limit; cached files count as free."""
    for limit, used, cached in _cgroups(root):
        yield limit - used + cached


def _cgroups(root: Path) -> Iterator[tuple[int, int, int]]:
    """Limit, use and cached files in bytes, of each of the process's cgroups that has a limit."""
    limits = read_cgroup(root, "memory", "memory.max", "memory.limit_in_bytes")
    uses = read_cgroup(root, "memory", "memory.current", "memory.usage_in_bytes")
    statistics = read_cgroup(root, "memory", "memory.stat", "memory.stat")
    for (limit,), (used,), (fields,) in zip(limits, uses, statistics, strict=True):
        if limit.isdecimal() and int(limit) > 0:
            cached = dict(line.partition(" ")[::2] for line in fields.splitlines()).get("inactive_file", "0")
            yield int(limit), int(used or 0), int(cached)
