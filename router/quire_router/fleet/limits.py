"""What a model's engines can take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModelLimits:
    """What a model's engines have in common: the smallest length and vocabulary among them, in tokens."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
