"""The compiled samplers draw from rows of logits in place, without a copy, and give the same tokens as
``sample_ops.sample`` in torch. On the CPU ``kernels/sample.cpp`` handles bf16 and fp32, and on a GPU
``kernels/gumbel_argmax.py`` any float dtype.
"""

import ctypes
import functools
import importlib
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire_engine.device.accelerator import upload_arrays
from quire_engine.kernels.bindings import DTYPES, SampleCall, library
from quire_engine.sampling.metadata import SamplingMetadata, TokenArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The result of ``sample_rows``: the token of each draw, [D] int64, and for each row of the logits its highest
    value, [R] float32, and whether all its values are finite, [R] bool.
    """

    token_ids: torch.Tensor
    highest: torch.Tensor
    finite: torch.Tensor


def sample_rows(logits: torch.Tensor, rows: TokenArray, metadata: SamplingMetadata | None) -> SampledRows | None:
    """Draws from row ``rows[i]`` [D] of ``logits`` [R, V] with the parameters i of ``metadata``, which is None for
    greedy draws. Does not wait for a GPU.

    Returns None if no kernel supports ``logits``; no GPU kernel supports greedy draws alone. A row with a NaN or +inf,
    or with nothing above -inf, gets any valid id. ``rows`` are not checked.
    """
    if logits.is_cuda:
        if metadata is None or not logits.numel() or (module := _triton_module(logits.device)) is None:
            return None
        return sample_rows_in_triton(module, logits, rows, metadata)
    found = SampledRows(
        token_ids=torch.zeros(len(rows), dtype=torch.int64),
        highest=torch.empty(len(logits)),
        finite=torch.empty(len(logits), dtype=torch.bool),
    )
    outputs = {"token_ids": found.token_ids, "highest": found.highest, "finite": found.finite}
    return found if run_sample_kernel(logits, rows, metadata, **outputs) else None


def sample_rows_in_triton(
    module: Any, logits: torch.Tensor, rows: TokenArray, metadata: SamplingMetadata
) -> SampledRows | None:
    """Like ``sample_rows``, with ``module.gumbel_argmax``."""
    if logits.stride(1) != 1:
        return None
    lowest, highest = torch.aminmax(logits, dim=-1)
    (row_of,), params = upload_arrays((rows,), logits.device), metadata.to(logits.device)
    token_ids, _ = module.gumbel_argmax(
        *(logits, row_of),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        log_min_p=params.log_min_p,
        keys=params.keys,
    )
    return SampledRows(token_ids, highest.float(), lowest.isfinite() & highest.isfinite())


@functools.cache
def _triton_module(device: torch.device) -> Any:
    """Returns the module ``gumbel_argmax`` if it can draw on ``device``, else None: Triton, or the C compiler that it
    needs, may be missing.
    """
    try:
        module = importlib.import_module("quire_engine.kernels.gumbel_argmax")
        module.draw_something(device)
    except Exception as error:  # noqa: BLE001 -- a compiler may raise anything
        logger.warning("Triton's sampler is not available, so torch replaces it and is slower: %s", error)
        return None
    return module


def run_sample_kernel(
    logits: torch.Tensor,
    rows: TokenArray | None = None,
    metadata: SamplingMetadata | None = None,
    *,
    kernels: ctypes.CDLL | None = None,
    **outputs: torch.Tensor | None,
) -> bool:
    """Runs the kernel on ``logits`` [R, V], with draws from ``rows`` or without draws, and writes into ``outputs``,
    named as in ``SampleCall``. ``kernels`` replaces the usual library. Returns False, and writes nothing, if no kernel
    supports ``logits``.
    """
    if not (logits.is_cpu and logits.dtype in DTYPES and logits.numel() and logits.stride(1) == 1):
        return False
    if (kernels := kernels or library()) is None:
        return False
    call = SampleCall(
        logits=logits.data_ptr(),
        stride=logits.stride(0),
        rows=logits.shape[0],
        width=logits.shape[1],
        draws=0 if rows is None else len(rows),
        bf16=logits.dtype is torch.bfloat16,
        threads=torch.get_num_threads(),
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in outputs.items()},
    )
    arrays: dict[str, np.ndarray] = {} if rows is None else {"row_of": rows}
    if metadata is not None:
        arrays |= {"temperature": metadata.temperature, "top_k": metadata.top_k, "top_p": metadata.top_p}
        arrays |= {"log_min_p": metadata.log_min_p, "keys": metadata.keys}
    for name, array in arrays.items():
        assert array.flags.c_contiguous, name
        setattr(call, name, array.ctypes.data)
    kernels.quire_sample(ctypes.byref(call))
    return True
