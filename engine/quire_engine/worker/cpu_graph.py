"""CPU graphs of steps: captured once, and replayed with any number of tokens.

A step of a small model is hundreds of short kernels, and between two of them the interpreter takes as long as the
kernel. CPU graphs do what CUDA graphs do on a GPU (see ``cuda_graph``). But here a replay sets the number of rows of
each call, so one graph serves all steps, of prompts too, and batches need no padding.
"""

import ctypes
import functools
import logging
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire_engine.attention.base import AttentionBackend, LayerKV
from quire_engine.attention.cpu import CpuAttention
from quire_engine.kernels.bindings import library
from quire_engine.kernels.host_call import HostCall, recorded_host_calls
from quire_engine.models.base import LayeredModel, Model
from quire_engine.worker.input_batch import ModelInput, dummy_decode, scatter_pending

log = logging.getLogger(__name__)

KERNELS: dict[str, int | str | None] = {
    "quire_add": 2,
    "quire_attention": None,
    "quire_cos_sin": 5,
    "quire_embed": 3,
    "quire_experts": "rows",
    "quire_gelu_mul": 3,
    "quire_groups_linear": "rows",
    "quire_int8_linear": "rows",
    "quire_int8_rows": 4,
    "quire_linear": "rows",
    "quire_lora": None,
    "quire_norm_by_sums": 5,
    "quire_rms_norm": 6,
    "quire_rotate": 8,
    "quire_route": "rows",
    "quire_scale": 1,
    "quire_silu_mul": 3,
    "quire_square_sums": 4,
    "quire_sum": "count",
}
"""The kernels that can be captured, as in ``cpu_graph.cpp``, and where a call has its number of rows: in an argument,
in a field of its struct, or only in a plan that the struct points to.
"""

# The torch operations allowed during a capture: they allocate memory or make views.
_ALLOCATIONS = ("empty", "new_empty", "empty_like")
_VIEWS = (
    *("view", "_unsafe_view", "split", "split_with_sizes", "tensor_split", "chunk", "unbind", "slice"),
    *("select", "narrow", "unsqueeze", "squeeze", "transpose", "permute", "expand", "alias", "detach"),
)
# Views of tensors that need no copy. Inference mode dispatches these whole.
_VIEWS_OR_COPIES = ("reshape", "contiguous", "to")
_SLOTS = 17
_ALIGNMENT = 64
_Listener = Callable[[None, object, tuple[object, ...]], None]


class NotCapturableError(RuntimeError):
    """A function does something that a graph cannot repeat. The text says what."""


class CpuGraph:
    """The kernel calls of a function, captured once together with their memory, with room for ``capacity`` tokens. A
    replay makes them all in one native call, or one native call for each run of kernels between two host calls.
    """

    def __init__(
        self, kernels: ctypes.CDLL, captured: "_Capture", inputs: Sequence[torch.Tensor], result: torch.Tensor
    ) -> None:
        self._parts = [
            (ctypes.POINTER(_Call) * len(part))(*map(ctypes.pointer, part)) if isinstance(part, list) else part
            for part in captured.parts
        ]
        self._replay = kernels.quire_replay
        self._captured = captured
        self._inputs = inputs
        self.capacity = len(inputs[0])
        self._result = result.as_strided((self.capacity, *result.shape[1:]), result.stride())

    def replay(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Computes ``inputs`` [T, ...]. Returns the result [T, ...], which the next replay overwrites. Raises what a
        host call raises.
        """
        tokens = len(inputs[0])
        assert tokens <= self.capacity
        for captured, new in zip(self._inputs, inputs, strict=True):
            captured[:tokens] = new
        for part in self._parts:
            if isinstance(part, ctypes.Array):
                self._replay(part, len(part), tokens)
            else:
                part()
        return self._result[:tokens]


def capture(work: Callable[..., torch.Tensor], *inputs: torch.Tensor, tokens: int) -> CpuGraph:
    """Runs ``work`` once, on the first ``tokens`` rows of ``inputs`` [capacity, ...], and captures its kernel calls.
    The graph keeps ``inputs``.

    ``work`` may call kernels, make host calls, allocate tensors and take views. Its tensors have one row per token, or
    the same number for each. The graph reuses memory that ``work`` frees; other memory that ``work`` did not allocate
    must outlive the graph. Raises ``NotCapturableError`` at the first other torch operation; the work before it has
    been done.
    """
    kernels = library()
    if kernels is None:
        raise NotCapturableError("the kernels are not compiled")
    active, first = _Capture(_CaptureAllocator(tokens, len(inputs[0]))), [each[:tokens] for each in inputs]
    with active.listen(kernels), recorded_host_calls(active.parts.append), _CaptureMode(active.allocator):
        result = work(*first)
    return CpuGraph(kernels, active, inputs, result)


class _Call(ctypes.Structure):
    """A kernel call as numbers. The fields match the struct of that name in ``cpu_graph.cpp``."""

    _fields_ = (
        ("play", ctypes.c_void_p),
        ("slots", ctypes.c_int64 * _SLOTS),
        ("rows", ctypes.c_void_p),
        ("per_token", ctypes.c_int64),
    )


_Part = list[_Call] | HostCall
"""A run of kernel calls, or one host call."""


class _Capture:
    """The kernel calls and host calls that one thread makes inside ``listen``."""

    # All threads call the same functions, and a function has one listener while any thread captures. Ranks that run as
    # threads capture at the same time and wait for each other meanwhile.
    _counting = threading.Lock()
    _count = 0
    _of_this_thread = threading.local()

    def __init__(self, allocator: "_CaptureAllocator") -> None:
        self.parts: list[_Part] = []
        self.allocator = allocator
        self._structs: list[ctypes.Structure] = []

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
                for (name, rows), function in zip(KERNELS.items(), functions, strict=True):
                    function.errcheck = _call_listener(kernels.quire_player(name.encode()), rows)
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

    def add_call(self, play: int, rows: int | str | None, arguments: tuple[object, ...]) -> None:
        """Records a call that ``play`` can repeat. Its number of rows is at ``rows`` (see ``KERNELS``)."""
        call = _Call(play, (ctypes.c_int64 * _SLOTS)(*map(self._slot, arguments)))
        match rows:
            case int():
                self._set_rows(call, ctypes.addressof(call) + _Call.slots.offset + rows * ctypes.sizeof(ctypes.c_int64))
            case str():
                struct = self._structs[-1]
                self._set_rows(call, ctypes.addressof(struct) + getattr(type(struct), rows).offset)
        if self.parts and isinstance(last := self.parts[-1], list):
            last.append(call)
        else:
            self.parts.append([call])

    def _set_rows(self, call: _Call, address: int) -> None:
        """Lets replays set the number of rows at ``address``, which is a multiple of the number of tokens."""
        call.rows = address
        call.per_token, rest = divmod(ctypes.c_int64.from_address(address).value, self.allocator.tokens)
        if rest:
            raise NotCapturableError("a kernel was called with some rows of the tokens")

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
                self._structs.append(type(arguments).from_buffer_copy(arguments))
                return ctypes.addressof(self._structs[-1])
        raise NotCapturableError(f"a kernel was called with {argument!r}")


@functools.cache  # never freed: a thread may be in a call when ``errcheck`` is deleted, and ctypes holds no reference
def _call_listener(play: int, rows: int | str | None) -> _Listener:
    """Returns an ``errcheck`` that records calls (see ``_Capture.add_call``)."""

    def listen(_result: None, _function: object, arguments: tuple[object, ...]) -> None:
        active = _Capture.of_this_thread()
        if active is not None:
            active.add_call(play, rows, arguments)

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
        if name in _VIEWS_OR_COPIES and (view := func(*args, **options)).data_ptr() == args[0].data_ptr():
            return view
        if name in _ALLOCATIONS:
            return self._allocator.allocate_like(func(*args, **{**options, "device": "meta"}))
        raise NotCapturableError(f"{name} is not one of the compiled kernels")


class _CaptureMode(_CaptureDispatch, TorchDispatchMode):  # type: ignore[misc] # torch does not type it
    """The torch mode that is active while a thread captures."""


class _CaptureAllocator:
    """The memory of one graph, which is captured with ``tokens`` tokens and has room for ``capacity``. It reuses the
    memory of a tensor after the tensor is freed.
    """

    def __init__(self, tokens: int, capacity: int) -> None:
        self.tokens, self.capacity = tokens, capacity
        self._free: dict[int, list[ctypes.Array[ctypes.c_char]]] = {}

    def allocate_like(self, wanted: torch.Tensor) -> torch.Tensor:
        """Returns an uninitialized tensor with the shape, strides and dtype of ``wanted``, in memory for ``capacity``
        tokens.
        """
        size = max(1, -(-wanted.untyped_storage().nbytes() * self.capacity // self.tokens))
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else (ctypes.c_char * (size + _ALIGNMENT))()
        lease = (ctypes.c_char * size).from_buffer(memory, -ctypes.addressof(memory) % _ALIGNMENT)
        weakref.finalize(lease, free.append, memory).atexit = False
        flat = torch.frombuffer(lease, dtype=wanted.dtype)
        return flat.as_strided(wanted.shape, wanted.stride())


# In larger steps the kernels are long enough to hide the interpreter.
LARGEST_STEP = 1024
# A graph takes about as much memory as one layer does while it computes so many tokens more.
ROOM = 64
# A single token would hide which tensors have gaps between their rows.
_CAPTURED_TOKENS = 2


class GraphKind(Enum):
    """What a graph computes. For a step with adapters it matters whether there are any, not which."""

    LAYERS = "layers"
    LAYERS_WITH_ADAPTERS = "layers with adapters"
    HEAD = "head"


def make_cpu_graphs(model: Model, kv: Sequence[LayerKV], attention: AttentionBackend) -> "CpuGraphRunner | None":
    """Returns the graphs of ``model`` over ``kv``; None if it computes with more than the compiled kernels.

    The ranks of a model have graphs together or not at all, because a capture adds up over the ranks in a pass of its
    own. A rank that holds no experts, for example, cannot be captured, although the others could.
    """
    layered, communicator = model.layered, model.communicator
    can_capture = layered is not None and model.capturable and getattr(attention, "is_compiled", False)
    if not (communicator.is_capturable and communicator.all_agree(can_capture)):
        return None
    assert layered is not None
    return CpuGraphRunner(layered, kv, cast(CpuAttention, attention))


class CpuGraphRunner:
    """The graphs of one model over one KV memory. Use it from one thread, in inference mode.

    A graph is captured when it is first needed, and again when a step has more tokens than any before. Where a method
    returns None, the model must compute without a graph.
    """

    def __init__(self, model: LayeredModel, kv: Sequence[LayerKV], attention: CpuAttention) -> None:
        self._model = model
        self._kv = kv
        self._attention = attention
        self._is_alone = model.communicator.size == 1
        self._receives_states = model.receives_states
        # None for a kind that cannot be captured. Ranks gather their logits through sockets.
        self._graphs: dict[GraphKind, CpuGraph | None] = {} if self._is_alone else {GraphKind.HEAD: None}

    def forward(self, batch: ModelInput, pending: torch.Tensor | None) -> torch.Tensor | None:
        """Does ``ModelRunner.forward``. The attention and the adapters must be prepared."""
        model, token_ids = self._model, batch.token_ids
        has_adapters = model.loras is not None and model.loras.is_active
        kind = GraphKind.LAYERS_WITH_ADAPTERS if has_adapters else GraphKind.LAYERS
        graph = self._graphs.get(kind)
        if graph is None or graph.capacity < len(token_ids):
            graph = self._larger_graph(kind, len(token_ids))
        if graph is None:
            return None
        if self._attention.last_page >= len(self._kv[0].pages):
            raise ValueError(f"the KV memory has no page {self._attention.last_page}")
        if pending is not None:
            scatter_pending(token_ids, batch.pending_rows, pending)
        hidden = graph.replay(model.embed(token_ids) if self._receives_states else token_ids, batch.positions)
        if not self._is_alone:
            model.communicator.raise_if_lost()
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Does ``Model.logits``. The logits are valid until the next call."""
        graph = self._graphs.get(GraphKind.HEAD)
        if graph is None or graph.capacity < len(hidden):
            graph = self._larger_graph(GraphKind.HEAD, len(hidden))
        return None if graph is None else graph.replay(hidden)

    def _larger_graph(self, kind: GraphKind, tokens: int) -> CpuGraph | None:
        """Captures the graph for ``tokens`` tokens, or rows of the head. Returns None if there can be none."""
        if tokens > LARGEST_STEP or self._graphs.get(kind, True) is None:
            return None
        capacity, graph = -(-tokens // ROOM) * ROOM, None
        try:
            graph = self._capture_head(capacity) if kind is GraphKind.HEAD else self._capture_layers(capacity)
        except NotCapturableError as error:
            log.info("steps run without a CPU graph of their %s: %s", kind.value, error)
        self._graphs[kind] = graph
        return graph

    def _capture_head(self, capacity: int) -> CpuGraph:
        hidden = torch.zeros(capacity, self._model.hidden_size, dtype=self._model.dtype)
        return capture(self._model.logits, hidden, tokens=_CAPTURED_TOKENS)

    def _capture_layers(self, capacity: int) -> CpuGraph:
        """Captures a step of pads (see ``dummy_decode``), and prepares the attention for its own step again."""
        model, step = self._model, self._attention.batches
        if self._receives_states:
            inputs = torch.zeros(capacity, model.hidden_size, dtype=model.dtype)
        else:
            inputs = torch.zeros(capacity, dtype=torch.int64)

        def work(inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            states = inputs if self._receives_states else model.embed(inputs)
            return model.layers(states, positions, self._kv, self._attention)

        self._attention.prepare(*[dummy_decode(_CAPTURED_TOKENS)] * len(step))
        try:
            return capture(work, inputs, torch.zeros(capacity, dtype=torch.int32), tokens=_CAPTURED_TOKENS)
        finally:
            self._attention.prepare(*step)
