"""The simulator's settings: the settings of the engine's scheduler and KV blocks, and presets of the latency and memory
of a device with a model. The sources of the presets are in ``docs/benchmarks.md``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import SettingsConfigDict
from quire_proto import units
from quire_proto.cli import CliSettings

from quire_engine.config import (
    PREFIX,
    CoreArgs,
    KVCacheMemory,
    KVDiskSpace,
    MaxNumSeqs,
    MaxWaiting,
    Names,
    Policy,
    SwapSpace,
)
from quire_engine.config.capabilities import Feature
from quire_engine.config.fields import chosen
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.simulation.reservation import Memory
from quire_engine.simulation.simulated_executor import VOCAB_SIZE, LatencyModel
from quire_engine.simulation.step_policies import Batching

POLICIES: tuple[Policy, ...] = get_args(Policy)
BATCHINGS: tuple[Batching, ...] = get_args(Batching)
MEMORIES: tuple[Memory, ...] = get_args(Memory)
PresetName = Literal["cpu", "a100-8b", "h100-8b"]
MAX_BLOCKS = 1 << 24
"""Of a pool: the simulator needs about 200 bytes per block."""
# Bounds beyond which the clock, in nanoseconds, would overflow.
Seconds = Annotated[units.Seconds | None, Field(ge=0, le=1e6)]
PerSecond = Annotated[float | None, Field(ge=1e-6, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Preset:
    """A device with a model on it. ``token_bytes``: keys and values of one token in all layers. ``kv_bytes``: the
    device's memory for the KV cache. ``max_model_len``: tokens of one sequence.
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
            disk_bytes_per_second=0.7e9,
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


class SimulatedEngineConfig(CliSettings, CoreArgs):
    """The settings of a simulated engine: its limits and its memory, as in a real engine, and the latency of its
    steps.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX)
    metavars: ClassVar[Mapping[str, str]] = {
        "--kv-cache-memory": "BYTES",
        "--swap-space": "GIB",
        "--kv-disk-space": "GIB",
        "--trace": "FILE",
        "--plot": "FILE",
    }

    max_num_seqs: MaxNumSeqs = 256
    max_waiting: MaxWaiting = 1 << 20
    kv_cache_memory: KVCacheMemory = Field(default=None, description="Bytes of the device's KV pool.")
    num_gpu_blocks_override: int | None = Field(default=None, ge=1, description="Blocks of the device's KV pool.")
    swap_space: SwapSpace = 4.0
    kv_disk_space: KVDiskSpace = Field(
        default=0.0, description="GiB of disk for KV blocks used twice, which is empty at the start; 0 is none."
    )

    batching: Batching = Field(
        default="continuous",
        description="What to compare with: static admits nothing until the whole batch has ended; phased never mixes "
        "prompts and decoding in a step, and runs prompts first.",
    )
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="Decides all that is made up; equal seeds, equal runs.")
    preset: PresetName = Field(default="a100-8b", description="Device and model whose speed and memory are assumed.")
    tokens_per_second: PerSecond = Field(default=None, description="Tokens that full steps compute a second.")
    weights_seconds: Seconds = Field(default=None, description="Least time of a step that computes.")
    context_seconds: Seconds = Field(default=None, description="Reading one token of context.")
    pair_seconds: Seconds = Field(default=None, description="Attention of one token to one of its context.")
    draw_seconds: Seconds = Field(default=None, description="Logits and draw of one token.")
    overhead_seconds: Seconds = Field(default=None, description="What every step costs besides.")
    bytes_per_second: PerSecond = Field(default=None, description="Block copies to or from the host.")
    jitter: float | None = Field(default=None, ge=0, lt=1, description="Part by which a step may be longer or shorter.")
    disk_bytes_per_second: PerSecond = Field(default=None, description="Reading or writing blocks on disk, in all.")

    @model_validator(mode="after")
    def _check(self) -> "SimulatedEngineConfig":
        if self.kv_cache_config.usable_tokens < 1:
            raise ValueError(f"The KV pool must hold a block, which has {self.kv_cache_config.block_bytes} bytes.")
        pools = self.kv_cache_config.device_blocks, self.kv_cache_config.host_blocks, self.num_disk_blocks
        if max(pools) > MAX_BLOCKS:
            raise ValueError(f"A pool has {max(pools)} blocks, and at most {MAX_BLOCKS} are simulated.")
        _ = self.latency
        return self

    @model_validator(mode="after")
    def _disk_has_a_host_pool(self) -> "SimulatedEngineConfig":
        if not self.kv_disk_space:
            return self
        if not (self.enable_prefix_caching and self.enable_host_caching and self.kv_cache_config.host_blocks):
            raise ValueError(
                "--kv-disk-space needs --enable-prefix-caching, --enable-host-caching and --swap-space: blocks are "
                "found by their hashes, and pass through the host's pool."
            )
        if not self.num_disk_blocks:
            raise ValueError(f"--kv-disk-space must hold a block, which has {self.kv_cache_config.block_bytes} bytes.")
        return self

    @property
    def latency(self) -> LatencyModel:
        """The preset's latency model with the fields that are set."""
        given = {field.name: getattr(self, field.name) for field in fields(LatencyModel)}
        return replace(self._preset.latency, **{name: value for name, value in given.items() if value is not None})

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The pools. The device has the null block in addition to the requested blocks."""
        block_bytes = self._preset.token_bytes * self.block_size
        kv_bytes = self.num_stages * (self.kv_cache_memory or self._preset.kv_bytes)
        blocks = self.num_gpu_blocks_override or kv_bytes // block_bytes
        return KVCacheConfig(self.block_size, 1 + blocks, self.swap_bytes // block_bytes, block_bytes)

    @property
    def num_disk_blocks(self) -> int:
        """Blocks that the disk holds."""
        return int(self.kv_disk_space * (1 << 30)) // self.kv_cache_config.block_bytes

    def scheduler_config(self, policy: Policy) -> SchedulerConfig:
        """Returns the scheduler's limits under ``policy``."""
        return SchedulerConfig.of(
            self,
            scheduling_policy=policy,
            max_model_len=min(self.max_model_len or self._preset.max_model_len, self.kv_cache_config.usable_tokens),
            vocab_size=VOCAB_SIZE,
            num_stages=self.num_stages,
        )

    @property
    def num_stages(self) -> int:
        """The stages of a pipeline, each on its own device."""
        return 1

    @property
    def _preset(self) -> Preset:
        return PRESETS[self.preset]


class Variant(NamedTuple):
    """How a run differs from other runs of the same trace."""

    policy: Policy
    batching: Batching
    memory: Memory


class SimulationConfig(SimulatedEngineConfig):
    """Runs a trace of requests through the engine's own scheduler and memory, in virtual time. A formula says how long
    a step takes, so no model is needed.

    If --compare, --batching or --memory has several names, each policy runs with each batching and each memory.
    """

    model_config = SettingsConfigDict(cli_prog_name="quire-engine simulate")
    metavars: ClassVar[Mapping[str, str]] = {
        **SimulatedEngineConfig.metavars,
        **dict.fromkeys(("--compare", "--batching", "--memory"), "NAMES"),
    }

    trace: Path = Field(description="Requests: an Azure CSV or a Mooncake JSONL file.")
    start: int = Field(default=0, ge=0, description="First row of the trace that is used.")
    limit: int | None = Field(default=None, ge=1, description="Rows that are used; all by default.")
    rate: float = Field(
        default=1.0, ge=1e-6, allow_inf_nan=False, description="How many times faster than traced requests arrive."
    )
    compare: Names = Field(
        default=[], description="Policies to run side by side, with commas between; instead of --scheduling-policy."
    )
    batching: Names = Field(  # type: ignore[assignment]  # several, where a fleet has one
        default=["continuous"],
        description=f"{', '.join(BATCHINGS)}, or several of them: static takes nothing in until a whole batch has "
        "ended, and phased has no step with both prompts and decoding.",
    )
    memory: Names = Field(
        default=["paged"],
        description=f"{', '.join(MEMORIES)}, or several of them: blocks where they are needed, or contiguous slots "
        "reserved for the longest sequence, for the next power of two of the output, or for the output.",
    )
    pipeline_parallel_size: int = Field(
        default=1, ge=1, le=64, description="Stages that the model is divided into, each on a device of its own."
    )
    as_json: bool = Field(default=False, alias="json", description="Print JSON instead of a table.")
    plot: Path | None = Field(default=None, description="Picture to write (needs the extra 'plot').")

    @field_validator("compare", "batching", "memory")
    @classmethod
    def _are_known(cls, names: list[str], info: ValidationInfo) -> list[str]:
        known = {"compare": POLICIES, "batching": BATCHINGS, "memory": MEMORIES}[str(info.field_name)]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"{unknown[0]} is not one of {', '.join(known)}.")
        if not names and info.field_name != "compare":
            raise ValueError(f"It needs one of {', '.join(known)}.")
        return list(dict.fromkeys(names))

    @model_validator(mode="after")
    def _what_is_reserved_has_no_room_for_drafts(self) -> "SimulationConfig":
        if self.memory != ["paged"] and self.speculative_method != "none":
            raise ValueError("--speculative-method needs --memory paged.")
        return self

    @model_validator(mode="after")
    def _what_is_reserved_has_no_disk(self) -> "SimulationConfig":
        if self.memory != ["paged"] and self.kv_disk_space:
            raise ValueError("--kv-disk-space needs --memory paged.")
        return self

    @property
    def features(self) -> frozenset[Feature]:
        """See ``CoreArgs.features``."""
        return super().features | chosen({Feature.PIPELINE_PARALLEL: self.pipeline_parallel_size > 1})

    @property
    def num_stages(self) -> int:
        """See ``SimulatedEngineConfig.num_stages``."""
        return self.pipeline_parallel_size

    @property
    def variants(self) -> dict[str, Variant]:
        """The runs to simulate, in order. A name has the parts in which the runs differ, or else the policy."""
        choices = (self.compare or [self.scheduling_policy], self.batching, self.memory)
        varied = [index for index, names in enumerate(choices) if len(names) > 1] or [0]
        runs = [Variant(*names) for names in product(*choices)]  # type: ignore[arg-type]  # the names were checked
        return {" ".join(run[index] for index in varied): run for run in runs}
