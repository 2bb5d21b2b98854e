"""LoRA adapters over one base model: read from PEFT's folders, held in slots beside the layers, mixed in one batch."""
