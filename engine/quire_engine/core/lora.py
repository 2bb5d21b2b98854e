"""LoRA adapters as the core knows them: which one a request uses."""

from dataclasses import dataclass
from pathlib import Path

from quire_engine.errors import LoRAError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter, as a request names it. ``lora_int_id`` is above 0 and unique for the lifetime of an engine.
    ``lora_path`` is a folder written by PEFT. ``digest`` is the hash of the folder's contents, which names the adapter
    in the hashes of KV blocks; the engine sets it when it reads the folder.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path
    digest: bytes = b""


DUMMY_LORA = LoRARequest("dummy", -1, "")
"""An adapter without weights and folder, for the step that measures memory, like vLLM's dummy LoRAs. No request can
have its id.
"""


@dataclass(frozen=True, slots=True)
class LoRAStats:
    """The adapters of an engine's requests at one moment, for metrics. ``running`` names the adapters of running
    sequences, and ``waiting`` the adapters of waiting or preempted ones, in alphabetical order. ``num_used_slots``
    counts the adapters of admitted sequences. ``num_waiting_for_slot`` counts the sequences that wait for a slot
    because other adapters use all of them.
    """

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    num_used_slots: int = 0
    num_waiting_for_slot: int = 0


def no_loras(lora: LoRARequest) -> LoRARequest:
    """The ``check`` of an engine that serves no adapters."""
    raise LoRAError(f"The adapter {lora.lora_name} cannot be loaded: this engine serves none.")
