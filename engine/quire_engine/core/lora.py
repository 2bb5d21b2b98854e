"""``LoRARequest``: which adapter a request is for."""

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


PROFILE_LORA = LoRARequest("", -1, "")
"""An adapter that changes nothing, for the step that memory is measured with."""


def lora_int_id(lora: LoRARequest | None) -> int:
    """The adapter's number; 0 stands for none."""
    return 0 if lora is None else lora.lora_int_id
