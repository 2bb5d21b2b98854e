"""CPU graphs of decode steps: captured when a batch size first occurs, and replayed whenever it occurs again.

A decode step of a small model is hundreds of short kernels, and between two of them the interpreter takes as long as
the kernel. CPU graphs do what CUDA graphs do on a GPU (see ``cuda_graph``). But a capture costs only as much as the
step itself, so every size gets its own graph, and batches need no padding.
"""

import ctypes
import functools
import logging
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire_engine.attention.base import AttentionBackend, LayerKV
from quire_engine.attention.cpu import CpuAttention
from quire_engine.kernels.bindings import library
from quire_engine.kernels.host_call import HostCall, recorded_host_calls
from quire_engine.models.base import LayeredModel, LayerInputs, Model

log = logging.getLogger(__name__)

KERNELS = (
    *("quire_attention", "quire_linear", "quire_int8_linear", "quire_groups_linear"),
    *("quire_rms_norm", "quire_add", "quire_silu_mul", "quire_gelu_mul", "quire_rotate", "quire_lora"),
    *("quire_route", "quire_experts", "quire_sum", "quire_square_sums", "quire_norm_by_sums"),
)
"""The kernels that can be captured, as in ``cpu_graph.cpp``."""

# The torch operations allowed during a capture: they allocate memory or make views.
_ALLOCATIONS = ("empty", "new_empty", "empty_like")
_VIEWS = (
    *("view", "_unsafe_view", "reshape", "split", "split_with_sizes", "tensor_split", "chunk", "unbind", "slice"),
    *("select", "narrow", "unsqueeze", "squeeze", "transpose", "permute", "expand", "alias", "detach"),
)
_SLOTS = 16
_ALIGNMENT = 64
_Listener = Callable[[None, object, tuple[object, ...]], None]


class NotCapturableError(RuntimeError):
    """A function does something that a graph cannot repeat. The text says what."""


class CpuGraph:
    """The kernel calls of a function, captured once together with their memory. A replay makes them all in one native
    call, or one native call for each run of kernels between two host calls. ``result`` is what the function returned;
    each replay writes its result there.
    """

    def __init__(self, kernels: ctypes.CDLL, parts: "list[_Part]", kept: list[object], result: torch.Tensor) -> None:
        self._parts = [(_Call * len(part))(*part) if isinstance(part, list) else part for part in parts]
        self._replay = kernels.quire_replay
        self._kept = kept
        self.result = result

    def replay(self) -> None:
        """Repeats all calls in order, on the same memory with its present contents. Raises what a host call raises."""
        for part in self._parts:
            if isinstance(part, ctypes.Array):
                self._replay(part, len(part))
            else:
                part()


def capture(work: Callable[[], torch.Tensor]) -> CpuGraph:
    """Runs ``work`` once and captures its kernel calls.

    ``work`` may call kernels, make host calls, allocate tensors and take views. The graph reuses memory that ``work``
    frees; memory that ``work`` did not allocate must outlive the graph. Raises ``NotCapturableError`` at the first
    other torch operation; the work before it has been done.
    """
    kernels = library()
    if kernels is None:
        raise NotCapturableError("the kernels are not compiled")
    active = _Capture()
    with active.listen(kernels), recorded_host_calls(active.parts.append), _CaptureMode(active.allocator):
        result = work()
    return CpuGraph(kernels, active.parts, [active.structs, active.allocator], result)


class _Call(ctypes.Structure):
    """A kernel call as numbers. The fields match the struct of that name in ``cpu_graph.cpp``."""

    _fields_ = (("play", ctypes.c_void_p), ("slots", ctypes.c_int64 * _SLOTS))


_Part = list[_Call] | HostCall
"""A run of kernel calls, or one host call."""


class _Capture:
    """The kernel calls and host calls that one thread makes inside ``listen``."""

    # All threads call the same functions, and a function has one listener while any thread captures. Ranks that run as
    # threads capture at the same time and wait for each other meanwhile.
    _counting = threading.Lock()
    _count = 0
    _of_this_thread = threading.local()

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.structs: list[ctypes.Structure] = []
        self.allocator = _CaptureAllocator()

    @classmethod
    def of_this_thread(cls) -> "_Capture | None":
        """Returns the capture whose ``listen`` this thread is in."""
        return getattr(cls._of_this_thread, "active", None)

    @contextmanager
    def listen(self, kernels: ctypes.CDLL) -> Iterator[None]:
        """Records every kernel call that this thread makes inside the context. ctypes passes each finished call to the
        function's ``errcheck``.
        """
        functions = [getattr(kernels, name) for name in KERNELS]
        with self._counting:
            if _Capture._count == 0:
                for name, function in zip(KERNELS, functions, strict=True):
                    function.errcheck = _call_listener(kernels.quire_player(name.encode()))
            _Capture._count += 1
        self._of_this_thread.active = self
        try:
            yield
        finally:
            del self._of_this_thread.active
            with self._counting:
                _Capture._count -= 1
                if _Capture._count == 0:
                    for function in functions:
                        del function.errcheck

    def add_call(self, play: int, arguments: tuple[object, ...]) -> None:
        """Records a call that ``play`` can repeat."""
        call = _Call(play, (ctypes.c_int64 * _SLOTS)(*map(self._slot, arguments)))
        if self.parts and isinstance(last := self.parts[-1], list):
            last.append(call)
        else:
            self.parts.append([call])

    def _slot(self, argument: object) -> int:
        match getattr(argument, "contents", argument):
            case None:
                return 0
            case int() as number:
                return number
            case float() as number:
                return int.from_bytes(struct.pack("<f", number), "little")
            case ctypes.Structure() as arguments:
                # Copied because callers reuse one struct: its present contents are the arguments of this call.
                self.structs.append(type(arguments).from_buffer_copy(arguments))
                return ctypes.addressof(self.structs[-1])
        raise NotCapturableError(f"a kernel was called with {argument!r}")


@functools.cache  # never freed: a thread may be in a call when ``errcheck`` is deleted, and ctypes holds no reference
def _call_listener(play: int) -> _Listener:
    """Returns an ``errcheck`` that records calls that ``play`` can repeat."""

    def listen(_result: None, _function: object, arguments: tuple[object, ...]) -> None:
        active = _Capture.of_this_thread()
        if active is not None:
            active.add_call(play, arguments)

    return listen


class _CaptureDispatch:
    """Allocates from the graph's memory. Raises ``NotCapturableError`` for any torch operation that computes.

    This is not in the mode's own class, because torch wraps what a mode class defines to hide it from torch.compile,
    and imports torch.compile at the first call. That would add seconds to a step of a running engine.
    """

    def __init__(self, allocator: "_CaptureAllocator") -> None:
        super().__init__()
        self._allocator = allocator

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        name, options = func.overloadpacket.__name__, kwargs or {}
        if name in _VIEWS:
            return func(*args, **options)
        if name in _ALLOCATIONS:
            return self._allocator.allocate_like(func(*args, **{**options, "device": "meta"}))
        raise NotCapturableError(f"{name} is not one of the compiled kernels")


class _CaptureMode(_CaptureDispatch, TorchDispatchMode):  # type: ignore[misc] # torch does not type it
    """The torch mode that is active while a thread captures."""


class _CaptureAllocator:
    """The memory of one graph. It reuses the memory of a tensor after the tensor is freed."""

    def __init__(self) -> None:
        self._free: dict[int, list[ctypes.Array[ctypes.c_char]]] = {}

    def allocate_like(self, wanted: torch.Tensor) -> torch.Tensor:
        """Returns an uninitialized tensor with the shape, strides and dtype of ``wanted``."""
        size = max(1, wanted.untyped_storage().nbytes())
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else (ctypes.c_char * (size + _ALIGNMENT))()
        lease = (ctypes.c_char * size).from_buffer(memory, -ctypes.addressof(memory) % _ALIGNMENT)
        weakref.finalize(lease, free.append, memory).atexit = False
        flat = torch.frombuffer(lease, dtype=wanted.dtype)
        return flat.as_strided(wanted.shape, wanted.stride())


# In larger batches the kernels are long enough to hide the interpreter.
LARGEST_BATCH = 256
# A graph takes about as much memory as one layer does while it computes.
MAX_GRAPHS = 64


class _CapturedStep(NamedTuple):
    """A graph and the inputs that it reads, which change in each step."""

    graph: CpuGraph
    inputs: LayerInputs


def make_cpu_graphs(model: Model, kv: Sequence[LayerKV], attention: AttentionBackend) -> "CpuGraphRunner | None":
    """The graphs of ``model`` over ``kv``; None where it computes with more than the compiled kernels."""
    layered = model.layered
    if layered is None or not (model.capturable and model.communicator.is_capturable):
        return None
    if not getattr(attention, "is_compiled", False):
        return None
    return CpuGraphRunner(layered, kv, cast(CpuAttention, attention))


class CpuGraphRunner:
    """The graphs of one model over one KV memory. Use it from one thread, in inference mode."""

    def __init__(self, model: LayeredModel, kv: Sequence[LayerKV], attention: CpuAttention) -> None:
        self._model = model
        self._ranks = model.communicator if model.communicator.size > 1 else None
        self._kv = kv
        self._attention = attention
        self._graphs: OrderedDict[tuple[int, bool], _CapturedStep] = OrderedDict()
        self._not_capturable = False

    def can_run(self, size: int) -> bool:
        """Whether a step of ``size`` tokens may run from a graph. The tokens must be decode tokens and their drafts.
        How sequences share them makes no difference: a replay reads the attention's current plan.
        """
        return size <= LARGEST_BATCH and not self._not_capturable

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Does ``Model.forward`` for a step that ``can_run``. The attention and the adapters must be prepared. It
        matters whether there are adapters, not which. The hidden states are valid until the next call.
        """
        fresh = self._model.inputs(token_ids, positions)
        kind = len(token_ids), self._model.loras is not None and self._model.loras.is_active
        known = self._graphs.get(kind)
        if known is None:
            return self._capture(fresh, kind)
        self._graphs.move_to_end(kind)
        for captured, new in zip(known.inputs, fresh, strict=True):
            captured.copy_(new)
        self._attention.check_pages(self._kv[0].pages)
        known.graph.replay()
        if self._ranks is not None:
            self._ranks.raise_if_lost()
        return known.graph.result

    def _capture(self, inputs: LayerInputs, kind: tuple[int, bool]) -> torch.Tensor:
        states = inputs.hidden_states.clone()
        try:
            graph = capture(lambda: self._model.layers(inputs, self._kv, self._attention))
        except NotCapturableError as error:
            log.info("decode steps are not captured: %s", error)
            self._not_capturable = True
            # The work so far only wrote what is now written again.
            return self._model.layers(inputs._replace(hidden_states=states), self._kv, self._attention)
        self._graphs[kind] = _CapturedStep(graph, inputs)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph.result
