"""``LoRAManager``: the adapters that one rank holds, in host memory and in slots."""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from quire_engine.core.lora import DUMMY_LORA, LoRARequest
from quire_engine.errors import LoRAError
from quire_engine.lora.adapter import LoRAAdapter
from quire_engine.lora.layers import LoRALayers, ShardedAdapter


class LoRAManager:
    """Adapters by id. All ranks get the same calls, so they hold the same adapters in the same slots. Rank 0 sees from
    its own manager which adapters to add or remove, and all ranks do so. Use it from one thread, in inference mode.
    Adapters may change ``targets``, layers [out, in] by name.
    """

    def __init__(self, targets: Mapping[str, tuple[int, int]], layers: LoRALayers) -> None:
        self._targets = targets
        self._layers = layers
        # Both are in order of last use, with the latest at the end.
        self._held: OrderedDict[int, ShardedAdapter] = OrderedDict()
        self._slots: OrderedDict[int, int] = OrderedDict()

    def check(self, lora: LoRARequest) -> LoRARequest:
        """Reads the adapter's folder. Returns the adapter with its digest and the absolute path of the folder.
        Thread-safe. Raises ``LoRAError`` if it is not an adapter of this model.
        """
        return replace(lora, lora_path=Path(lora.lora_path).absolute(), digest=self._read(lora).digest)

    @property
    def held(self) -> Collection[int]:
        """The ids of the adapters in host memory, least recently used first."""
        return self._held.keys()

    def add(self, lora: LoRARequest) -> None:
        """Reads an adapter into host memory. Raises ``LoRAError`` if its folder has changed since it was first
        loaded.
        """
        if lora == DUMMY_LORA:
            self._held[lora.lora_int_id] = self._layers.shard({})
            return
        adapter = self._read(lora)
        if adapter.digest != lora.digest:
            raise LoRAError(f"{lora.lora_path} has changed since the adapter {lora.lora_name} was loaded.")
        self._held[lora.lora_int_id] = self._layers.shard(adapter.weights)

    def remove(self, lora_id: int) -> None:
        """Frees an adapter's memory and slot, if it has them."""
        self._held.pop(lora_id, None)
        self._slots.pop(lora_id, None)

    def prepare(self, lora_ids: torch.Tensor) -> None:
        """Prepares a forward pass of tokens with these adapters: [T] int64, 0 for none, or empty if no token has one.
        Adapters without a slot take the least recently used slots.
        """
        if not len(lora_ids):
            self._layers.set_batch(lora_ids)
            return
        found, indices = lora_ids.unique(return_inverse=True)
        wanted = [lora_id for lora_id in found.tolist() if lora_id]
        for lora_id in wanted:
            self._held.move_to_end(lora_id)
            if lora_id in self._slots:
                self._slots.move_to_end(lora_id)
        for lora_id in wanted:
            if lora_id not in self._slots:
                self._slots[lora_id] = self._free_slot()
                self._layers.set_slot(self._slots[lora_id], self._held[lora_id])
        slot_of = {**self._slots, 0: -1}
        slots = torch.tensor([slot_of[lora_id] for lora_id in found.tolist()])
        self._layers.set_batch(slots[indices])

    def _read(self, lora: LoRARequest) -> LoRAAdapter:
        return LoRAAdapter.read(Path(lora.lora_path).absolute(), self._targets, self._layers.max_rank)

    def _free_slot(self) -> int:
        if len(self._slots) < self._layers.num_slots:
            taken = set(self._slots.values())
            return next(slot for slot in range(self._layers.num_slots) if slot not in taken)
        return self._slots.popitem(last=False)[1]
