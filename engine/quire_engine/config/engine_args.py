"""``EngineArgs``: all settings of an engine, with or without a server."""

from typing import Literal, Self

from pydantic import Field, model_validator

from quire_engine.config.cache_args import KVDiskArgs
from quire_engine.config.fields import Frozen
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


class ExecutorConfig(ExecutionArgs, KVDiskArgs, LoRAArgs, ParallelArgs, ModelArgs):
    """Where and how the model is loaded and run."""


class EngineArgs(CoreArgs, ExecutorConfig, ServedModel):
    """All settings of an engine, with or without a server. ``quire-engine --help`` lists the fields of the bases from
    the last to the first.
    """

    @model_validator(mode="after")
    def _speculation_is_not_overlapped(self) -> Self:
        if self.async_scheduling and self.speculative_method != "none":
            raise ValueError("--async-scheduling and --speculative-method exclude each other.")
        return self

    @model_validator(mode="after")
    def _pipeline_knows_its_tokens(self) -> Self:
        if self.pipeline_parallel_size > 1 and self.async_scheduling:
            raise ValueError("--async-scheduling and --pipeline-parallel-size exclude each other.")
        if self.pipeline_parallel_size > 1 and self.speculative_method != "none":
            raise ValueError("--speculative-method and --pipeline-parallel-size exclude each other.")
        return self

    @model_validator(mode="after")
    def _pools_in_one_piece(self) -> Self:
        if self.pipeline_parallel_size > 1 and self.asks_for_pooling:
            raise ValueError(
                "--pipeline-parallel-size is for models that continue prompts: hidden states are pooled where the "
                "layers end."
            )
        return self

    @model_validator(mode="after")
    def _disk_has_a_host_pool(self) -> Self:
        if self.kv_disk_path is None:
            return self
        if not (self.enable_prefix_caching and self.enable_host_caching and self.swap_space):
            raise ValueError(
                "--kv-disk-path needs --enable-prefix-caching, --enable-host-caching and --swap-space: blocks are "
                "found by their hashes, and pass through the host's pool."
            )
        return self

    @model_validator(mode="after")
    def _tokens_have_other_ranks_to_go_to(self) -> Self:
        if self.all2all_backend == "alltoall" and self.tensor_parallel_size == self.data_parallel_size == 1:
            raise ValueError(
                "--all2all-backend alltoall needs a --tensor-parallel-size or a --data-parallel-size above 1: it is "
                "for experts that several ranks share."
            )
        return self

    @model_validator(mode="after")
    def _engines_of_a_group_have_no_stages(self) -> Self:
        if self.data_parallel_size > 1 and self.pipeline_parallel_size > 1:
            raise ValueError(
                "--data-parallel-size and --pipeline-parallel-size exclude each other: stages would wait for each "
                "other's experts."
            )
        return self

    @model_validator(mode="after")
    def _halves_have_sums_to_overlap(self) -> Self:
        if self.enable_dbo and self.tensor_parallel_size == 1:
            raise ValueError(
                "--enable-dbo needs a --tensor-parallel-size above 1: it hides the sums of ranks that share layers."
            )
        if self.enable_dbo and self.all2all_backend == "alltoall":
            raise ValueError("--enable-dbo and --all2all-backend alltoall exclude each other.")
        if self.enable_dbo and self.data_parallel_size > 1:
            raise ValueError("--enable-dbo and --data-parallel-size exclude each other: tokens are sent.")
        return self

    @property
    def num_loras_held(self) -> int:
        """``max_cpu_loras``, or its default."""
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
