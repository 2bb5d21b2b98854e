"""``EngineArgs``: all settings of an engine, with or without a server."""

from typing import Literal, Self

from pydantic import Field, model_validator

from quire_engine.config.cache_args import KVDiskArgs
from quire_engine.config.capabilities import Feature
from quire_engine.config.fields import Frozen, chosen
from quire_engine.config.model_args import LoRAArgs, ModelArgs, ServedModel
from quire_engine.config.parallel_args import ParallelArgs
from quire_engine.config.scheduler_args import CoreArgs


class ExecutionArgs(Frozen):
    """How steps are computed, and the memory that this takes in all."""

    enforce_eager: bool = Field(default=False, description="Do not capture decode steps as CUDA graphs or CPU graphs.")
    async_scheduling: bool | None = Field(
        default=None,
        description="Plan a step while the previous one runs. On by default on a GPU, unless the host waits for each "
        "layer, as with --all2all-backend alltoall.",
    )
    deterministic: bool = Field(
        default=False,
        description="Compute every sequence in the same way, bit for bit, in any batch; free on CPUs "
        "with AVX2, slower elsewhere.",
    )
    attention: Literal["auto", "cpu", "flashinfer", "reference"] = Field(
        default="auto", description="Attention backend; auto takes the fastest that works here."
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Fraction of the memory that the engine may take: of the GPU or of the container's limit (0.9 by "
        "default), else of the machine (by default KV pools take a quarter of what is free, at most 4 GiB).",
    )

    @property
    def features(self) -> frozenset[Feature]:
        """See ``Frozen.features``."""
        return super().features | chosen(
            {
                Feature.ASYNC_SCHEDULING: self.async_scheduling,
                Feature.DETERMINISTIC: self.deterministic,
                Feature.CPU_ATTENTION: self.attention == "cpu",
                Feature.FLASHINFER: self.attention == "flashinfer",
            }
        )


class ExecutorConfig(ExecutionArgs, KVDiskArgs, LoRAArgs, ParallelArgs, ModelArgs):
    """Where and how the model is loaded and run."""


class EngineArgs(CoreArgs, ExecutorConfig, ServedModel):
    """All settings of an engine, with or without a server. ``quire-engine --help`` lists the fields of the bases from
    the last to the first.
    """

    @property
    def num_loras_held(self) -> int:
        """Returns ``max_cpu_loras``, or its default."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @model_validator(mode="after")
    def _loras_of_a_step_are_held(self) -> Self:
        if self.num_loras_held < self.max_loras:
            raise ValueError("--max-cpu-loras is below --max-loras.")
        if self.lora_folders and not self.enable_lora:
            raise ValueError("--lora-modules needs --enable-lora.")
        if not self.enable_lora:
            limits = ("max_loras", "max_lora_rank", "max_cpu_loras")
            fields = type(self).model_fields
            idle = [f"--{name.replace('_', '-')}" for name in limits if getattr(self, name) != fields[name].default]
            if idle:
                raise ValueError(f"{' and '.join(idle)} would have no effect: add --enable-lora.")
        return self
