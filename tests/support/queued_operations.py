"""torch's operations on a simulated device: queued on the current stream, and done when the device comes to them."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.fake_streams import FakeDevice


class QueuedOperations(TorchDispatchMode):
    """Operations inside are done twice: at once, on whatever there is, for the memory of their results; and by
    ``device``, into that memory. What is read before the device was there is not what it makes.
    """

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        self._device.launch(lambda: self._do(func, args, kwargs, made))
        return made

    @staticmethod
    def _do(func: Any, args: Any, kwargs: Any, recorded: Any) -> None:
        made = func(*args, **kwargs)
        for old, new in zip(tree_leaves(recorded), tree_leaves(made), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)
