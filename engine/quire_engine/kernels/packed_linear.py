"""Matrix products with a constant weight, packed once for the CPU kernels: in bf16 or fp32 (``PackedWeight``), or in
int8 (``PackedInt8``). Packed weights use huge pages.

A row of a result depends only on its own inputs, bit for bit. In bf16 and fp32 all products of an output are summed in
fp32 in input order, independently of other outputs, and rounded once.

In int8, activations are rounded to int8 in each call (dynamic quantization). A weight has one scale per output channel.
Activations have one per ``GROUP`` numbers of each row, so that an outlier costs precision only in its own group. Sums
within a group are integers and so exact. Groups are added in fp32 in order.
"""

import contextlib
import ctypes
import functools
import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from quire_engine.kernels.bindings import DTYPES, GroupsCall, Int8Call, LinearLayer, library
from quire_engine.kernels.ops import check_ids, silu_mul

GROUP = 128
"""How many activations of a row share a scale."""
SIDE, STEP = 16, 4  # the dimensions of a panel, as in int8.cpp
_LARGEST, _SMALLEST = 127, 1e-35  # a group or channel below _SMALLEST counts as zero
_NUMBERS_AT_ONCE = 1 << 22
_LINE = 64
_MAPPING_BYTES = 64 << 20  # address space; memory is taken as it is written


class PackedWeight:
    """A weight [out, in] and an optional bias [out] in the layout of the compiled kernel, ``linear.cpp``.

    Args: ``weight`` and ``bias`` of one of ``DTYPES``, on the CPU. The weight is copied, the bias is referenced.

    Calls take ``x`` [T, in] of the same dtype, on the CPU, with any row stride, and raise ``ValueError`` for anything
    else. Call it from one thread at a time. ``call`` is the argument of the latest call and describes the packed
    weight.
    """

    __slots__ = ("_buffers", "_dtype", "_inputs", "_outputs", "_pointer", "_run", "call")

    def __init__(self, kernels: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._outputs, self._inputs = weight.shape
        self._dtype = weight.dtype
        self.call = _describe(kernels, weight.dtype, self._outputs, self._inputs)
        self._pointer, self._run = ctypes.pointer(self.call), kernels.quire_linear
        memory = empty_on_huge_pages(self.call.bytes)
        self.call.weight = memory.data_ptr()
        plain = weight.detach().contiguous()
        kernels.quire_linear_pack(self._pointer, plain.data_ptr(), torch.get_num_threads())
        added = None if bias is None else bias.detach().to(weight.dtype).expand(self._outputs).contiguous()
        self.call.bias = None if added is None else added.data_ptr()
        self._buffers = (memory, added)

    @property
    def nbytes(self) -> int:
        """Memory of the packed weight in bytes."""
        return int(self.call.bytes)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``x`` to [T, out]."""
        return self._call_kernel(x, self._outputs, 0)

    def matmul_silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``silu_mul(matmul(x))`` [T, out / 2] in one pass, with the same rounding."""
        if not self.call.paired:
            return silu_mul(self.matmul(x))
        return self._call_kernel(x, self._outputs // 2, 1)

    def _call_kernel(self, x: torch.Tensor, width: int, gated: int) -> torch.Tensor:
        _check(x, self._dtype, self._inputs)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, call = x.shape[0], self.call  # one reused struct: ctypes takes a microsecond for seven arguments
        out = torch.empty((rows, width), dtype=self._dtype)
        call.x, call.stride, call.rows = x.data_ptr(), x.stride(0), rows
        call.out, call.gated, call.threads = out.data_ptr(), gated, torch.get_num_threads()
        self._run(self._pointer)
        return out


def is_fast(dtype: torch.dtype) -> bool:
    """Whether the kernel for weights of ``dtype`` uses the best instructions of this processor."""
    kernels = library() if dtype in DTYPES else None
    if kernels is None:
        return False
    return bool(_describe(kernels, dtype, 1, 1).fast)


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight | None:
    """Packs the weight. Returns None if no kernel supports it."""
    if weight.dtype not in DTYPES or not weight.is_cpu or weight.numel() == 0:
        return None
    kernels = library()
    return None if kernels is None else PackedWeight(kernels, weight, bias)


def _describe(kernels: ctypes.CDLL, dtype: torch.dtype, outputs: int, inputs: int) -> LinearLayer:
    layer = LinearLayer(inputs=inputs, outputs=outputs, bf16=int(dtype is torch.bfloat16))
    kernels.quire_linear_describe(ctypes.byref(layer))
    return layer


def _check(x: torch.Tensor, dtype: torch.dtype, inputs: int) -> None:
    if x.dtype is not dtype or x.dim() != 2 or x.shape[1] != inputs or not x.is_cpu:
        raise ValueError(f"{x.dtype} {tuple(x.shape)} on {x.device.type} is not {dtype} [T, {inputs}] on the CPU")


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``weight`` [out, in] to symmetric int8 [out, in] with fp32 scales [out], so that ``int8 * scale`` is
    near ``weight``. A channel with a non-finite number gets a non-finite scale.
    """
    rounded = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), dtype=torch.float32)
    rows = max(1, _NUMBERS_AT_ONCE // max(1, weight.shape[1]))
    for part, target, scale in zip(weight.split(rows), rounded.split(rows), scales.split(rows), strict=True):
        values, scale[:] = round_rows(part.float())
        target.copy_(values)
    return rounded, scales


class PackedProduct:
    """A quantized weight in the layout of a compiled kernel, and the kernel's ``call``, which points to ``buffers``.
    Use it from one thread at a time.
    """

    __slots__ = ("_buffers", "_pointer", "_run", "call")

    def __init__(
        self,
        run: Callable[[Any], None],
        buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        call: Int8Call | GroupsCall,
    ) -> None:
        self._buffers = tuple(map(on_huge_pages, buffers))
        call.panels, call.scales, call.bias = (tensor.data_ptr() for tensor in self._buffers)
        self.call, self._pointer, self._run = call, ctypes.pointer(call), run

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(tensor.nbytes for tensor in self._buffers)

    def matmul(self, x: torch.Tensor, *, gated: bool) -> torch.Tensor:
        """Maps ``x`` [T, in] with contiguous rows to [T, out], or to ``silu(gate) * up`` [T, out / 2] if ``gated``."""
        call, rows = self.call, x.shape[0]
        out = x.new_empty(rows, call.outputs // 2 if gated else call.outputs)
        call.x, call.stride, call.out = x.data_ptr(), x.stride(0), out.data_ptr()
        call.rows, call.gated, call.threads = rows, gated, torch.get_num_threads()
        self._run(self._pointer)
        return out


class PackedInt8(PackedProduct):
    """An int8 weight with a scale per output, in the layout of ``int8.cpp``.

    Args: ``weight`` int8 [out, in] and ``scales`` fp32 [out] from ``quantize``, ``bias`` [out] or None. All are copied.
    ``dtype`` is the dtype of activations, bf16 or fp32.
    """

    __slots__ = ()

    def __init__(
        self,
        kernels: ctypes.CDLL,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        outputs, inputs = weight.shape
        bias = torch.zeros_like(scales) if bias is None else bias.float()
        call = Int8Call(inputs=inputs, outputs=outputs, bf16=int(dtype == torch.bfloat16))
        super().__init__(kernels.quire_int8_linear, (pack_int8(weight), by_panel(scales), by_panel(bias)), call)

    def rows(self, channels: torch.Tensor) -> torch.Tensor:
        """Returns the dequantized weight rows of ``channels`` [N] int64, [N, in] in the dtype of activations. Raises
        ``IndexError`` for a channel beyond the weight.
        """
        call, kernels = self.call, library()
        assert kernels is not None, "the weight is packed"
        check_ids(channels, call.outputs)
        out = torch.empty(len(channels), call.inputs, dtype=torch.bfloat16 if call.bf16 else torch.float32)
        kernels.quire_int8_rows(
            *(call.panels, call.scales, channels.data_ptr(), out.data_ptr()),
            *(len(channels), call.inputs, call.outputs, call.bf16),
        )
        return out


class PlainInt8:
    """``PackedInt8`` in torch, equal up to the last rounding. Used without kernels, and as the kernel's reference."""

    __slots__ = ("_bias", "_scales", "_weight")

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._scales = weight, scales
        self._bias = None if bias is None else bias.float()

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(tensor.nbytes for tensor in (self._weight, self._scales, self._bias) if tensor is not None)

    def matmul(self, x: torch.Tensor, *, gated: bool) -> torch.Tensor:
        """See ``PackedInt8.matmul``."""
        total = torch.zeros(len(x), len(self._weight))
        for inputs, weight in zip(x.float().split(GROUP, dim=1), self._weight.split(GROUP, dim=1), strict=True):
            rounded, scales = round_rows(inputs)
            total += _exact_matmul(rounded, weight) * scales[:, None]
        total *= self._scales
        if self._bias is not None:
            total += self._bias
        if gated:
            gate, up = total.chunk(2, dim=1)
            total = F.silu(gate) * up
        return total.to(x.dtype)

    def rows(self, channels: torch.Tensor) -> torch.Tensor:
        """See ``PackedInt8.rows``."""
        check_ids(channels, len(self._weight))
        return self._weight[channels].float() * self._scales[channels, None]


def make_product(
    weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> PackedInt8 | PlainInt8:
    """Returns ``PackedInt8`` if there are kernels for activations of ``dtype``, else ``PlainInt8``."""
    kernels = library() if dtype in DTYPES else None
    return PlainInt8(weight, scales, bias) if kernels is None else PackedInt8(kernels, weight, scales, bias, dtype)


def pack_int8(weight: torch.Tensor) -> torch.Tensor:
    """Packs int8 [out, in] to uint8 [panels, ceil(in / STEP), 2, SIDE, STEP], with 128 added to each."""
    return pack_bytes(weight, -(-weight.shape[1] // STEP) * STEP).bitwise_xor_(128)


def pack_bytes(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """Packs [out, in] of one byte each, padded with zeros to ``width`` inputs, to uint8 [panels, width / STEP, 2, SIDE,
    STEP].
    """
    side = panels_of(len(numbers)) * SIDE
    padded = numbers.new_zeros(2, side, width)
    for half, part in zip(padded, halves_of(numbers), strict=True):
        half[: len(part), : numbers.shape[1]] = part
    words = padded.view(torch.int32).view(2, -1, SIDE, width // STEP).permute(1, 3, 0, 2).contiguous()
    return words.view(torch.uint8).view(*words.shape, STEP)


def by_panel(numbers: torch.Tensor) -> torch.Tensor:
    """Arranges [out] as [panels, 2, SIDE], in the channel order of ``pack_int8``, and [out, groups] as [panels, groups,
    2, SIDE]. Padding channels are 0.
    """
    rest = numbers.shape[1:]
    padded = numbers.new_zeros(2, panels_of(len(numbers)) * SIDE, *rest)
    for half, part in zip(padded, halves_of(numbers), strict=True):
        half[: len(part)] = part
    by_side = padded.view(2, -1, SIDE, *rest)
    return (by_side.permute(1, 3, 0, 2) if rest else by_side.transpose(0, 1)).contiguous()


def halves_of(channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the channels of the two sides of all panels."""
    middle = (len(channels) + 1) // 2
    return channels[:middle], channels[middle:]


def panels_of(outputs: int) -> int:
    """Returns the number of panels."""
    return -(-((outputs + 1) // 2) // SIDE)


def _exact_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies ``x`` [T, N], integers in fp32, by int8 ``weight`` [out, N] without rounding -> [T, out].

    torch's integer product is private, and wrong for N = 1 (torch 2.13). The alternative is exact too: fp32 adds
    integers below 2^24, such as the sums of a group, exactly in any order.
    """
    multiply = getattr(torch, "_int_mm", None)
    if multiply is None or not len(x) or x.shape[1] == 1:
        return F.linear(x, weight.float())
    product: torch.Tensor = multiply(x.to(torch.int8), weight.t())
    return product


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds fp32 [R, N] to integers in fp32 of at most 127, and returns them with the scales [R]."""
    most = rows.abs().amax(1)
    vanishes = most < _SMALLEST
    inverse = torch.where(vanishes, 0, _LARGEST / most)
    values = (rows * inverse[:, None]).round_().nan_to_num_(0, 0, 0)
    return values, torch.where(vanishes, 0, most / _LARGEST)


def empty_on_huge_pages(nbytes: int) -> torch.Tensor:
    """Allocates uint8 [nbytes], ``nbytes`` at least 1, that begins at a cache line. Inside ``packed_into`` it comes
    from that arena. It is freed with the last tensor of its mapping.
    """
    arena: Allocator = getattr(_chosen, "arena", None) or _huge_pages()
    return arena.allocate(nbytes)


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy of a CPU tensor, on huge pages."""
    if tensor.nbytes == 0:
        return tensor
    return empty_on_huge_pages(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def in_arena(weight: torch.Tensor) -> torch.Tensor:
    """Returns an unpacked, contiguous weight for use: inside ``packed_into`` a copy in that arena, otherwise ``weight``
    itself.
    """
    arena: Allocator | None = getattr(_chosen, "arena", None)
    if arena is None:
        return weight
    return arena.allocate(weight.nbytes).view(weight.dtype).view(weight.shape).copy_(weight)


class Allocator(Protocol):
    """Allocates memory for weights."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns separate memory for a weight, uint8 [nbytes], aligned for any kernel."""
        ...


class Arena:
    """Memory for weights, in mappings from ``make_mapping``, which is called if ``mapping`` is None or full. It
    references only the latest mapping; older ones live as long as the tensors in them. ``allocated`` counts the bytes
    given out.
    """

    def __init__(self, make_mapping: Callable[[int], mmap.mmap], mapping: mmap.mmap | None = None) -> None:
        self._make_mapping, self._mapping = make_mapping, mapping
        self._used = self.allocated = 0
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See ``Allocator.allocate``."""
        with self._lock:
            if self._mapping is None or self._used + nbytes > len(self._mapping):
                self._mapping, self._used = self._make_mapping(max(nbytes, _MAPPING_BYTES)), 0
            piece = torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=self._used)
            size = -(-nbytes // _LINE) * _LINE
            self._used += size
            self.allocated += size
        return piece


_chosen = threading.local()


@contextlib.contextmanager
def packed_into(arena: Allocator) -> Iterator[None]:
    """Places the weights that this thread packs inside the context into ``arena``."""
    _chosen.arena = arena
    try:
        yield
    finally:
        del _chosen.arena


@functools.cache
def _huge_pages() -> Arena:
    return Arena(map_huge_pages)


def map_huge_pages(nbytes: int) -> mmap.mmap:
    """Maps memory on huge pages for weights, which are read from end to end in every step.

    A product with one row is as fast as the weight can be read, and on pages of 4 KiB a good part of that time is
    address translation. Huge pages (Linux's transparent ones, if the system's setting allows requesting them) are 2
    MiB, larger than most weights, so weights share a mapping.
    """
    # Private, because Linux has another setting for huge pages of shared memory.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
