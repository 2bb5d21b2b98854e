"""LoRA adapters for one base model: read from PEFT folders, held in slots of the layers, and mixed in one batch."""
