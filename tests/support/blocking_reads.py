"""Raises where the host would wait for a device: CPU tensors stand for those whose numbers are not to be read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

READING = (
    "_local_scalar_dense", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select", "equal", "allclose", "unique_dim",
    "_unique", "_unique2", "unique_consecutive", "unique_dim_consecutive", "repeat_interleave", "bincount", "histc",
)  # fmt: skip
INDEXING = ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put")
# What turns a tensor into something of the host's, or something of the host's into a tensor by a copy that waits.
CROSSING = {"numpy", "tolist", "item", "cpu", "cuda", "__array__", "pin_memory", "tensor", "as_tensor", "data_ptr"}


class WaitedError(Exception):
    """The host would have had to wait for the device."""


class _Arithmetic(TorchDispatchMode):
    """Sees what is computed."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = [one for one in args[1] if one is not None] if name in INDEXING else []
        by_mask = any(one.dtype in (torch.bool, torch.uint8) for one in indices)
        if name in READING or by_mask:
            raise WaitedError(str(func))
        return func(*args, **(kwargs or {}))


class _Crossings(TorchFunctionMode):
    """Sees what is asked for in Python, of which some never comes to be computed where everything is on the CPU."""

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        name = (resolve_name(func) or func.__name__).rpartition(".")[2]
        moves = name == "to" and any(isinstance(one, torch.device | str) for one in (*args, *(kwargs or {}).values()))
        if moves or name in CROSSING:
            raise WaitedError(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, ``WaitedError`` is raised where a device would have to be waited for."""
    with _Crossings(), _Arithmetic():
        yield
