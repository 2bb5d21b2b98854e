"""The compiled kernels as typed ctypes calls. ``library`` loads them once per process, and logs once if it cannot."""

import ctypes
import functools
import logging
import threading

import torch

from quire_engine.kernels.build import OFF, ON, SWITCH, BuildError, read_switch, shared_object

DTYPES = (torch.bfloat16, torch.float32)
"""The element types that the kernels support."""

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64

logger = logging.getLogger(__name__)


class AttentionPlan(ctypes.Structure):
    """The ragged batch of an ``AttentionCall``. The fields match the struct in ``attention.cpp``."""

    _fields_ = (
        *((name, _POINTER) for name in ("query_indptr", "page_indptr", "page_ids", "context_lens")),
        ("chunks", _INTEGER),
    )


class AttentionCall(ctypes.Structure):
    """The argument of ``quire_attention``. The fields match the struct of that name in ``attention.cpp``."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "key", "value", "kv", "out")),
        *((name, _INTEGER) for name in ("query_token", "query_head", "key_token", "key_head")),
        *((name, _INTEGER) for name in ("value_token", "value_head", "kv_page", "kv_plane", "kv_head")),
        ("plan", _POINTER),
        *((name, _INTEGER) for name in ("heads", "kv_heads", "head_dim", "block_size")),
        *((name, _INTEGER) for name in ("window", "bf16", "int8", "threads")),
        ("scale", ctypes.c_double),
        ("soft_cap", ctypes.c_double),
        ("sinks", _POINTER),
    )


class Int8Call(ctypes.Structure):
    """The argument of ``quire_int8_linear``. The fields match the struct of that name in ``products.h``."""

    _fields_ = (
        *((name, _POINTER) for name in ("panels", "scales", "bias", "x", "out")),
        *((name, _INTEGER) for name in ("inputs", "outputs", "stride", "rows", "gated", "bf16", "threads")),
    )


class GroupsCall(ctypes.Structure):
    """The argument of ``quire_groups_linear``. The fields match the struct of that name in ``products.h``."""

    _fields_ = (
        *((name, _POINTER) for name in ("panels", "scales", "bias", "x", "out")),
        *((name, _INTEGER) for name in ("inputs", "outputs", "bits", "group")),
        *((name, _INTEGER) for name in ("stride", "rows", "gated", "bf16", "threads")),
    )


class LoraPlan(ctypes.Structure):
    """Which rows use which adapter. The fields match the struct of that name in ``lora.cpp``."""

    _fields_ = (("rows", _POINTER), ("tiles", _POINTER), ("count", _INTEGER))


class LoraCall(ctypes.Structure):
    """The argument of ``quire_lora``. The fields match the struct of that name in ``lora.cpp``."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "a", "b", "out", "ranks", "columns", "plan")),
        *((name, _INTEGER) for name in ("x_stride", "out_stride", "inputs", "outputs")),
        *((name, _INTEGER) for name in ("parts", "max_rank", "bf16", "threads")),
    )


class RouteCall(ctypes.Structure):
    """The argument of ``quire_route``. The fields match the struct of that name in ``experts.cpp``."""

    _fields_ = (
        *((name, _POINTER) for name in ("logits", "weights", "chosen")),
        *((name, _INTEGER) for name in ("rows", "experts", "top", "normalise", "round", "bf16", "threads")),
    )


class ExpertsCall(ctypes.Structure):
    """The argument of ``quire_experts``. The fields match the struct of that name in ``experts.cpp``."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "weights", "chosen", "out", "sorted", "between", "gate_up", "down")),
        *((name, _INTEGER) for name in ("gate_up_kind", "down_kind", "rows", "stride", "hidden", "width", "paired")),
        *((name, _INTEGER) for name in ("top", "first", "count", "round", "bf16", "threads")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    )


class SumRanks(ctypes.Structure):
    """One rank's view of the memory for sums. The fields match the struct of that name in ``sums.cpp``."""

    _fields_ = (
        ("memory", _POINTER),
        *((name, _INTEGER) for name in ("rank", "size", "slot_bytes", "spins", "sequence", "sums", "failed")),
    )


class SumCall(ctypes.Structure):
    """The argument of ``quire_sum``. The fields match the struct of that name in ``sums.cpp``."""

    _fields_ = (("x", _POINTER), ("count", _INTEGER), ("bf16", _INTEGER), ("ranks", _POINTER))


class SampleCall(ctypes.Structure):
    """The argument of ``quire_sample``. The fields match the struct of that name in ``sample.cpp``."""

    _fields_ = (
        *((name, _POINTER) for name in ("logits", "row_of", "temperature", "top_k", "top_p", "log_min_p", "keys")),
        *((name, _POINTER) for name in ("token_ids", "noisy", "lowest_kept", "places", "highest", "finite")),
        *((name, _INTEGER) for name in ("stride", "rows", "width", "draws", "bf16", "threads")),
    )


class LinearLayer(ctypes.Structure):
    """A packed weight and a call with it. The fields match the struct of that name in ``products.h``."""

    _fields_ = (
        *((name, _POINTER) for name in ("weight", "bias")),
        *((name, _INTEGER) for name in ("inputs", "outputs", "bf16", "bytes", "paired", "fast")),
        *((name, _POINTER) for name in ("x", "out")),
        *((name, _INTEGER) for name in ("stride", "rows", "gated", "threads")),
    )


_SIGNATURES = {
    "quire_attention": (ctypes.POINTER(AttentionCall),),
    "quire_rms_norm": (
        *(_POINTER, _INTEGER, _INTEGER, _POINTER, _POINTER, _POINTER),
        *(_INTEGER, _INTEGER, _INTEGER, ctypes.c_float, ctypes.c_float, _INTEGER, _INTEGER),
    ),
    "quire_square_sums": (_POINTER, _INTEGER, _POINTER, _INTEGER, *(_INTEGER,) * 4),
    "quire_norm_by_sums": (
        *(_POINTER, _INTEGER, _POINTER, _INTEGER, _POINTER),
        *(_INTEGER, _INTEGER, _INTEGER, ctypes.c_float, _INTEGER, _INTEGER),
    ),
    "quire_add": (_POINTER, _POINTER, _INTEGER, _INTEGER, _INTEGER),
    "quire_route": (ctypes.POINTER(RouteCall),),
    "quire_experts": (ctypes.POINTER(ExpertsCall),),
    "quire_embed": (*(_POINTER,) * 3, _INTEGER, _INTEGER),
    "quire_scale": (_POINTER, _INTEGER, _INTEGER, ctypes.c_float, _INTEGER),
    "quire_cos_sin": (*(_POINTER,) * 5, _INTEGER, _INTEGER),
    "quire_silu_mul": (_POINTER, _INTEGER, _POINTER, _INTEGER, _INTEGER, _INTEGER, _INTEGER),
    "quire_gelu_mul": (_POINTER, _INTEGER, _POINTER, _INTEGER, _INTEGER, _INTEGER, _INTEGER),
    "quire_groups_linear": (ctypes.POINTER(GroupsCall),),
    "quire_int4_search": (*(_POINTER,) * 4, *(_INTEGER,) * 3),
    "quire_int8_linear": (ctypes.POINTER(Int8Call),),
    "quire_int8_rows": (*(_POINTER,) * 4, *(_INTEGER,) * 4),
    "quire_linear_describe": (ctypes.POINTER(LinearLayer),),
    "quire_linear_pack": (ctypes.POINTER(LinearLayer), _POINTER, _INTEGER),
    "quire_linear": (ctypes.POINTER(LinearLayer),),
    "quire_lora": (ctypes.POINTER(LoraCall),),
    "quire_rotate": (
        *(_POINTER, _INTEGER, _INTEGER, _POINTER, _POINTER, _INTEGER, _POINTER, _POINTER),
        *(*(_INTEGER,) * 5, ctypes.c_float, ctypes.c_float, _INTEGER, _INTEGER),
    ),
    "quire_sum": (ctypes.POINTER(SumCall),),
    "quire_end_sums": (ctypes.POINTER(SumRanks),),
    "quire_sample": (ctypes.POINTER(SampleCall),),
    "quire_replay": (_POINTER, _INTEGER, _INTEGER),
}


_loading = threading.Lock()


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the kernels, or None if they cannot be built or ``QUIRE_ENGINE_CPU_KERNELS=off`` disables them.

    They run on the threads of torch's own OpenMP runtime, which is loaded first. Calls release the interpreter lock.
    """
    switch = read_switch()
    if switch not in (*ON, *OFF):
        logger.warning("%s is %r, which is not on or off, and counts as on", SWITCH, switch)
    with _loading:  # a CPU graph would not see calls to a second copy
        return None if switch in OFF else _load()


@functools.cache
def _load() -> ctypes.CDLL | None:
    try:
        loaded = ctypes.CDLL(str(shared_object()))
    except (BuildError, OSError) as error:
        logger.warning("the CPU kernels are not available, so torch replaces them and is slower: %s", error)
        return None
    declare(loaded)
    loaded.quire_player.argtypes, loaded.quire_player.restype = (ctypes.c_char_p,), _POINTER
    return loaded


def declare(loaded: ctypes.CDLL) -> None:
    """Declares the argument types of the kernels that ``loaded`` has."""
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name, None)
        if function is not None:
            function.argtypes, function.restype = arguments, None
