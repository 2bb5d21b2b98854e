"""CPU graphs of decode steps: captured when a batch size first comes, replayed whenever it comes again.

A decode step of a small model is hundreds of short kernels, and between two of them the interpreter takes as long as
they do. They are what CUDA graphs are on a GPU (see ``cuda_graph``); but a capture costs no more than the step itself,
so sizes need no ladder and batches no padding.
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
    *("quire_rms_norm", "quire_silu_mul", "quire_gelu_mul", "quire_rotate", "quire_lora"),
    *("quire_route", "quire_experts", "quire_sum"),
)
"""Those that can be captured, as in ``cpu_graph.cpp``."""

# The torch operations that are allowed during a capture: they allocate memory or make views.
_ALLOCATIONS = ("empty", "new_empty", "empty_like")
_VIEWS = (
    *("view", "_unsafe_view", "reshape", "split", "split_with_sizes", "tensor_split", "chunk", "unbind", "slice"),
    *("select", "narrow", "unsqueeze", "squeeze", "transpose", "permute", "expand", "alias", "detach"),
)
_SLOTS = 16
_ALIGNMENT = 64
_Listener = Callable[[None, object, tuple[object, ...]], None]


class NotCapturableError(RuntimeError):
    """A function does what a graph cannot repeat; the text says what."""


class CpuGraph:
    """The calls of the compiled kernels that a function made, captured once with the memory that they used, and then
    made again in one call, which costs the interpreter nothing, or in one for all that lie between two host calls.
    ``result`` is what the function returned, and where each replay puts it.
    """

    def __init__(self, kernels: ctypes.CDLL, parts: "list[_Part]", kept: list[object], result: torch.Tensor) -> None:
        self._parts = [(_Call * len(part))(*part) if isinstance(part, list) else part for part in parts]
        self._replay = kernels.quire_replay
        self._kept = kept
        self.result = result

    def replay(self) -> None:
        """Makes all calls again, in their order, on the same memory, with what that holds now. Raises what a host call
        raises.
        """
        for part in self._parts:
            if isinstance(part, ctypes.Array):
                self._replay(part, len(part))
            else:
                part()


def capture(work: Callable[[], torch.Tensor]) -> CpuGraph:
    """Runs ``work`` once, and captures its calls of kernels.

    ``work`` may call kernels, make host calls and new tensors, and take views of tensors. Memory that it frees is used
    again within the graph, and nowhere else; what it did not make itself must outlive the graph. Raises
    ``NotCapturableError`` at the first other operation of torch; what came before it has been done.
    """
    kernels = library()
    if kernels is None:
        raise NotCapturableError("the kernels are not compiled")
    active = _Capture()
    with active.listen(kernels), recorded_host_calls(active.parts.append), _CaptureMode(active.allocator):
        result = work()
    return CpuGraph(kernels, active.parts, [active.structs, active.allocator], result)


class _Call(ctypes.Structure):
    """A call of a kernel as numbers: field by field the struct of that name in ``cpu_graph.cpp``."""

    _fields_ = (("play", ctypes.c_void_p), ("slots", ctypes.c_int64 * _SLOTS))


_Part = list[_Call] | HostCall
"""Calls of kernels, or one of the host."""


class _Capture:
    """The calls of kernels that one thread makes inside ``listen``, and what lies between them."""

    # All threads call the same functions, and each of those has one listener, as long as some thread captures. Ranks
    # that are threads capture at the same time, and wait for each other meanwhile.
    _counting = threading.Lock()
    _count = 0
    _of_this_thread = threading.local()

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.structs: list[ctypes.Structure] = []
        self.allocator = _CaptureAllocator()

    @classmethod
    def of_this_thread(cls) -> "_Capture | None":
        """The capture in whose ``listen`` this thread is."""
        return getattr(cls._of_this_thread, "active", None)

    @contextmanager
    def listen(self, kernels: ctypes.CDLL) -> Iterator[None]:
        """Records every call of a kernel that this thread makes inside the context. ctypes passes a finished call to
        its function's ``errcheck``.
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
        """Records a call that ``play`` can make again."""
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
                # Copied, because callers reuse one struct: its contents now are the arguments of this call.
                self.structs.append(type(arguments).from_buffer_copy(arguments))
                return ctypes.addressof(self.structs[-1])
        raise NotCapturableError(f"a kernel was called with {argument!r}")


@functools.cache  # never freed: ctypes holds no reference during a call of another thread, and calls it after that
def _call_listener(play: int) -> _Listener:
    """Returns an ``errcheck`` that records calls which ``play`` can make again."""

    def listen(_result: None, _function: object, arguments: tuple[object, ...]) -> None:
        active = _Capture.of_this_thread()
        if active is not None:
            active.add_call(play, arguments)

    return listen


class _CaptureDispatch:
    """Allocates from the graph's memory. Raises ``NotCapturableError`` for any torch operation that computes.

    Not in the mode's own class: torch wraps what that defines, so that torch.compile passes it over, and imports
    torch.compile for it at the first call. That takes seconds, in the first step of an engine that serves already.
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


class _CaptureMode(_CaptureDispatch, TorchDispatchMode):  # type: ignore[misc] # torch gives it no type
    """The mode in which a thread captures."""


class _CaptureAllocator:
    """The memory of one graph. The memory of a tensor is reused once the tensor is freed."""

    def __init__(self) -> None:
        self._free: dict[int, list[ctypes.Array[ctypes.c_char]]] = {}

    def allocate_like(self, wanted: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape, strides and dtype of ``wanted``. It holds anything."""
        size = max(1, wanted.untyped_storage().nbytes())
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else (ctypes.c_char * (size + _ALIGNMENT))()
        lease = (ctypes.c_char * size).from_buffer(memory, -ctypes.addressof(memory) % _ALIGNMENT)
        weakref.finalize(lease, free.append, memory).atexit = False
        flat = torch.frombuffer(lease, dtype=wanted.dtype)
        return flat.as_strided(wanted.shape, wanted.stride())


# Beyond this the kernels are long enough to hide the interpreter.
LARGEST_BATCH = 256
# A graph takes about as much memory as one layer does while it computes.
MAX_GRAPHS = 64


class _CapturedStep(NamedTuple):
    """A graph, and where it reads what is new in each step."""

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
    """The graphs of one model over one KV memory. Used by one thread, in inference mode."""

    def __init__(self, model: LayeredModel, kv: Sequence[LayerKV], attention: CpuAttention) -> None:
        self._model = model
        self._ranks = model.communicator if model.communicator.size > 1 else None
        self._kv = kv
        self._attention = attention
        self._graphs: OrderedDict[tuple[int, bool], _CapturedStep] = OrderedDict()
        self._not_capturable = False

    def can_run(self, size: int) -> bool:
        """Whether a step of ``size`` tokens, those of sequences that decode and their drafts, may run from a graph. How
        they are shared among sequences makes no difference: the attention's plan is read when a graph is replayed.
        """
        return size <= LARGEST_BATCH and not self._not_capturable

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As ``Model.forward``, for a step that fits and that the attention and adapters are prepared for; which those
        are makes no difference, only whether there are any. The hidden states hold until the next call.
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
            # What was computed so far only wrote what is now written again.
            return self._model.layers(inputs._replace(hidden_states=states), self._kv, self._attention)
        self._graphs[kind] = _CapturedStep(graph, inputs)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph.result
