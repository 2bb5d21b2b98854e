"""Kinds of processors that kernels are compiled for ahead of time, best first: an image is built on one and runs on
others. It knows what compilers and Linux call them, and nothing of the kernels.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CpuLevel:
    """``flags`` are the compiler's; ``needs`` is what ``/proc/cpuinfo`` must list."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]

    def runs_on(self, features: Set[str]) -> bool:
        """Whether a processor with these features can run it."""
        return self.needs <= features


def _level(name: str, flags: str, needs: str = "") -> CpuLevel:
    return CpuLevel(name, tuple(flags.split()), frozenset(needs.split()))


_AVX2 = "abm avx2 bmi1 bmi2 f16c fma movbe"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
_BF16 = f"{_AVX512} avx512_vnni avx512_bf16"
_V4 = "-march=x86-64-v4"

X86: tuple[CpuLevel, ...] = (
    # With matrix registers torch's products are the faster ones, and the kernels leave them to it.
    _level("amx", f"{_V4} -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16", f"{_BF16} amx_tile amx_bf16"),
    _level("avx512-bf16", f"{_V4} -mavx512vnni -mavx512bf16", _BF16),
    _level("avx512-vnni", f"{_V4} -mavx512vnni", f"{_AVX512} avx512_vnni"),
    _level("avx512", _V4, _AVX512),
    _level("avx2", "-march=x86-64-v3", _AVX2),
    _level("x86-64", "-march=x86-64"),
)
OTHER: tuple[CpuLevel, ...] = (_level("generic", ""),)


def levels_of(machine: str) -> Sequence[CpuLevel]:
    """Those of an architecture, as ``platform.machine`` calls it; the last one runs on all of its processors."""
    return X86 if machine.lower() in ("x86_64", "amd64") else OTHER
