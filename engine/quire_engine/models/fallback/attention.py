"""The two functions through which transformers calls attention here, both registered under names of their own: one
that stores and attends in paged memory, and one that only finds out what a model asks for. Knows no model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from quire_engine.attention.base import AttentionBackend
from quire_engine.models.errors import ModelError
from quire_engine.models.fallback.config import max_sequence_length

PAGED_ATTENTION, PROBE_ATTENTION = "quire-paged", "quire-probe"
# What a model may hand to its attention without asking for more than a causal one: places, and what is off anyway.
IGNORED_ARGUMENTS = {
    "dropout",
    "scaling",
    "sliding_window",
    "position_ids",
    "use_cache",
    "output_attentions",
    "cache_position",
}
AttentionOutput = tuple[torch.Tensor, None]


@dataclass(slots=True)
class PagedAttentionContext:
    """The memory of one step, handed through the model's keyword arguments. ``windows`` has one entry a layer."""

    kv: torch.Tensor
    attention: AttentionBackend
    sliding_windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class AttentionRequirements:
    """What one layer asks of its attention. ``window`` is as in ``AttentionBackend.forward``."""

    layer: int
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None


@dataclass(slots=True)
class AttentionProbe:
    """Collects what the layers ask for, in the order in which they ask."""

    requirements: list[AttentionRequirements] = field(default_factory=list)


def register_attention() -> None:
    """Makes both functions known to transformers, under names that nobody else uses."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED_ATTENTION, paged_attention)
    AttentionInterface.register(PROBE_ATTENTION, probe_attention)
    AttentionMaskInterface.register(PROBE_ATTENTION, _probe_mask)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: object,
    quire_step: PagedAttentionContext,
    **__: object,
) -> AttentionOutput:
    """``query`` [1, heads, T, head_dim], ``key`` and ``value`` [1, kv_heads, T, head_dim] -> [1, T, heads, head_dim].

    No mask is made for a name that is not among the masks, and none is needed: the backend knows the sequences.
    """
    layer = module.layer_idx
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    mixed = quire_step.attention.forward(query, key, value, quire_step.kv[:, layer], quire_step.sliding_windows[layer])
    return mixed[None], None


def probe_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    quire_probe: AttentionProbe | None = None,
    scaling: float | None = None,
    **others: Any,
) -> AttentionOutput:
    """Notes what the layer asks for, and returns zeros. Raises ``ModelError`` for what no backend can do."""
    if quire_probe is None:
        raise ModelError("Its layers do not hand on what their attention is called with.")
    _check_extra_arguments(others)
    if value.shape != key.shape:
        raise ModelError("Its keys and values are of different sizes, which KV blocks cannot hold.")
    if not query.dtype == key.dtype == value.dtype:
        raise ModelError("Its queries, keys and values are of different types.")
    _, heads, tokens, size = query.shape
    needs = AttentionRequirements(
        layer=module.layer_idx,
        dtype=key.dtype,
        num_heads=heads,
        num_kv_heads=key.shape[1],
        head_dim=size,
        scale=size**-0.5 if scaling is None else float(scaling),
        window=sliding_window_of(attention_mask),
    )
    quire_probe.requirements.append(needs)
    return query.new_zeros(1, tokens, heads, size), None


def _check_extra_arguments(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None and name not in IGNORED_ARGUMENTS and not (name == "is_causal" and value):
            raise ModelError(f"Its attention asks for {name}, which the attention backends cannot do.")


def _probe_mask(*, mask_function: Callable[..., torch.Tensor], config: Any, **_: object) -> torch.Tensor:
    """The mask of a few positions over all keys, [1, 1, rows, keys]: ``sliding_window_of`` reads it again."""
    keys = max_sequence_length(config)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    mask = mask_function(zero, zero, probed_positions(keys)[:, None], torch.arange(keys))
    return torch.as_tensor(mask).expand(1, 1, len(probed_positions(keys)), keys)


def sliding_window_of(mask: torch.Tensor | None) -> int | None:
    """How many of the latest tokens a layer sees, itself included; None for all. Raises ``ModelError`` for a mask that
    is neither.
    """
    if mask is None or not _is_probe_mask(mask):
        raise ModelError("Its attention has a mask of its own making, which the attention backends do not know.")
    keys, seen = torch.arange(mask.shape[-1]), mask[0, 0]
    window = int(seen[-1].sum())
    distance = probed_positions(len(keys))[:, None] - keys
    if not torch.equal(seen, (distance >= 0) & (distance < window)):
        raise ModelError("Its attention is neither causal nor causal within a window of the latest tokens.")
    return None if window == len(keys) else window


def _is_probe_mask(mask: torch.Tensor) -> bool:
    """Whether it is still the mask that ``_probed_mask`` made."""
    return bool(mask.dtype == torch.bool and mask.dim() == 4 and len(probed_positions(mask.shape[3])) == mask.shape[2])


def probed_positions(keys: int) -> torch.Tensor:
    """Positions at the beginning, in the middle and at the end of so many. No other mask looks like a window from all
    of them: chunks, for one, end somewhere, and the last two positions are not both as far from where theirs began.
    """
    return torch.tensor(sorted({0, min(1, keys - 1), keys // 3, keys // 2, max(0, keys - 2), keys - 1}))
