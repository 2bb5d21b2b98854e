"""LoRA adapters as the core knows them: which one a request is for."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter, as a request names it: ``lora_name``, a number above 0 that is this adapter's alone in the life
    of an engine, and the folder that PEFT has written. ``digest`` is the hash of what the folder holds, which names the
    adapter in the hashes of KV blocks; an engine fills it in when it reads the folder.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path
    digest: bytes = b""


DUMMY_LORA = LoRARequest("dummy", -1, "")
"""An adapter without weights and folder, for the step that memory is measured with, as vLLM's dummy LoRAs are. No
request can have its number.
"""


@dataclass(frozen=True, slots=True)
class LoRAStats:
    """The adapters of an engine's requests at one moment, for metrics. ``running`` names those with sequences that
    run, and ``waiting`` those with sequences that wait or were preempted, in alphabetical order. ``num_used_slots``
    counts the adapters of what is admitted, and ``num_waiting_for_slot`` the sequences that wait for one of the slots,
    all of which are used by other adapters than theirs.
    """

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    num_used_slots: int = 0
    num_waiting_for_slot: int = 0
