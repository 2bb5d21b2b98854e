"""Latency models with a name, and the memory that goes with them; ``docs/simulator.md`` says where they are from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quire_engine.executor.latency import LatencyModel

PresetName = Literal["cpu", "a100-8b", "h100-8b"]


@dataclass(frozen=True, slots=True)
class Preset:
    """A device with a model on it. ``token_bytes``: keys and values of one token in all layers. ``kv_bytes``: what the
    device has left for them. ``max_model_len``: tokens of one sequence.
    """

    latency: LatencyModel
    token_bytes: int
    kv_bytes: int
    max_model_len: int


PRESETS: Mapping[PresetName, Preset] = {
    "cpu": Preset(
        LatencyModel(
            tokens_per_second=3_300,
            weights_seconds=6.3e-3,
            context_seconds=0.5e-6,
            pair_seconds=0.1e-6,
            draw_seconds=0.11e-3,
            overhead_seconds=0.5e-3,
            bytes_per_second=5e9,
        ),
        token_bytes=23_040,
        kv_bytes=1 << 29,
        max_model_len=2_048,
    ),
    "a100-8b": Preset(
        LatencyModel(
            tokens_per_second=10_400,
            weights_seconds=9.6e-3,
            context_seconds=83e-9,
            pair_seconds=3.4e-9,
            draw_seconds=5e-6,
            overhead_seconds=1e-3,
            bytes_per_second=20e9,
        ),
        token_bytes=131_072,
        kv_bytes=52_000_000_000,
        max_model_len=131_072,
    ),
    "h100-8b": Preset(
        LatencyModel(
            tokens_per_second=29_700,
            weights_seconds=5.8e-3,
            context_seconds=51e-9,
            pair_seconds=1.2e-9,
            draw_seconds=5e-6,
            overhead_seconds=1e-3,
            bytes_per_second=50e9,
        ),
        token_bytes=131_072,
        kv_bytes=52_000_000_000,
        max_model_len=131_072,
    ),
}
