"""The engine's configuration: every flag is also an environment variable ``QUIRE_ENGINE_…``. Names are those of vLLM's
flags.

``EngineArgs`` is all that concerns the engine itself, in parts (``ServedModel``, ``ExecutorConfig``, ``SchedulerArgs``
and ``CacheConfig``); ``EngineConfig`` adds the command line, the server, and the other machines (``NodeArgs``). A
setting stands once, in its part, with its default, range and help: the offline ``LLM`` takes the fields of
``EngineArgs``, and the simulators' settings inherit ``SchedulerArgs`` and ``CacheConfig``. Wherever several settings
are needed, a part or the whole is passed on as it is, and a rank's process gets the whole as JSON.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict
from quire_proto.cli import CliSettings, ListenAddress
from quire_proto.engine_token import TokenFile
from quire_proto.local_hosts import is_loopback
from quire_proto.logs import LogFormat
from quire_proto.tls import CaFile, CertificateFile, KeyFile, ServerTls, check_cert_key, server_tls
from quire_proto.units import Bytes, Gib, Seconds

Policy = Literal["fcfs", "sjf", "priority"]
PreemptionPolicy = Literal["auto", "swap", "recompute"]
Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]
PoolingMode = Literal["auto", "last", "mean", "cls"]
Quantization = Literal["int8", "int4"]
SpeculativeMethod = Literal["none", "ngram", "suffix"]
KVCacheDtype = Literal["auto", "int8", "fp8"]
All2AllBackend = Literal["allgather_reducescatter", "alltoall"]


def _split(value: object) -> object:
    """Comma-separated names, as an environment variable holds them; a repeated flag adds names."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list):
        return parts
    return [name.strip() for part in parts for name in str(part).split(",") if name.strip()]


def _not_empty(value: object) -> object:
    """An empty variable is no path, least of all that of the working directory."""
    if value == "":
        raise ValueError("it is empty")
    return value


def _not_of_checkpoints(value: object) -> object:
    """Refuses vLLM's names for the quantisation of a checkpoint, which is read from its files."""
    if str(value).lower() in ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "fp8", "gguf"):
        raise ValueError("a checkpoint says itself how it is quantised: leave it out; int8 and int4 are made of others")
    return value


PREFIX = "QUIRE_ENGINE_"
OTHER_VARIABLES = ("cpu_kernels",)  # QUIRE_ENGINE_CPU_KERNELS is read by ``kernels``, which may not import this
_SEEN = "tool calls and thoughts are read as the model's chat template writes them"
_AN_ENGINE_EACH = "each engine of a group is a command of its own, with its --data-parallel-rank, behind a router"
_WITHOUT_RAY = "engines of a group meet without Ray"
_SHARED_EXPERTS = "--tensor-parallel-size and --data-parallel-size share experts among ranks"
_SPECULATION = "--speculative-method and --num-speculative-tokens set it; there are no draft models"
# vLLM's short flags for what is a flag here.
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-q": "--quantization",
    "-n": "--nnodes",
    "-r": "--node-rank",
}
_OF_A_REQUEST = "each request says that for itself, as a parameter"
Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]


# Range and help of settings that another command has with a default or a help text of its own.
ModelFolder = Annotated[Path, Field(description="Folder of the model, as Hugging Face lays it out, or a GGUF file.")]
MaxNumSeqs = Annotated[int, Field(ge=1, le=65536, description="Most sequences that run at once.")]
MaxWaiting = Annotated[int, Field(ge=1, description="Requests that may wait; more are refused.")]
BlockSize = Annotated[int, Field(ge=1, le=2048, description="Tokens of one KV block.")]
KVCacheMemory = Annotated[
    Bytes | None,
    Field(ge=1, description="Bytes of the device's KV pool; measured by default."),
]
MAX_GIB = 1 << 20
SwapSpace = Annotated[Gib, Field(ge=0, le=MAX_GIB, description="GiB for the host's KV pool; 0 turns swapping off.")]
KVDiskSpace = Annotated[Gib, Field(ge=0, le=MAX_GIB)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())


class ServedModel(_Frozen):
    """Which model is run, and what it is called."""

    model: ModelFolder
    served_model_name: Names = Field(
        default=[], description="Names under which clients may ask for the model; by default the folder's name."
    )

    lora_modules: Names = Field(
        default=[],
        description="Adapters to load at the start, as NAME=FOLDER, separated by commas; needs --enable-lora.",
    )

    @property
    def lora_folders(self) -> dict[str, Path]:
        """The folders of ``lora_modules`` by their names. Raises ``ValueError``."""
        pairs = [module.partition("=") for module in self.lora_modules]
        if not all(name and folder for name, _, folder in pairs):
            raise ValueError("--lora-modules takes NAME=FOLDER, or several with commas between them.")
        folders = {name: Path(folder) for name, _, folder in pairs}
        if len(folders) < len(pairs):
            raise ValueError("--lora-modules has two adapters of one name.")
        return folders

    @property
    def names(self) -> list[str]:
        """The names under which the model is served, the preferred one first."""
        return self.served_model_name or [self.model.resolve().name]


class ExecutorConfig(_Frozen):
    """Where and how the model is loaded and run, and the memory that this takes in all."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device that runs the model; auto takes a GPU if there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Element type of weights, and of KV memory by default; auto takes the checkpoint's."
    )
    runner: Runner = Field(
        default="auto",
        description="Whether the model continues prompts (generate), or pools them into embeddings or scores "
        "(pooling). auto takes what the model was made for, and pooling for a folder of sentence-transformers.",
    )
    convert: Convert = Field(
        default="auto",
        description="What to use a model for that was made for something else: embed or classify. none lets it "
        "continue prompts, even from a folder of sentence-transformers.",
    )
    pooling_type: PoolingMode = Field(
        default="auto",
        description="Which hidden states of a prompt are pooled: the last, the mean of all, or the first (cls). auto "
        "takes what the folder says, else the last for a decoder and the first for an encoder.",
    )
    kv_cache_dtype: KVCacheDtype = Field(
        default="auto",
        description="Element type of KV memory, if not --dtype: int8 on a CPU, with a scale for each token and KV "
        "head, or fp8 (e4m3) on a GPU. Both hold about twice as many tokens.",
    )
    quantization: Annotated[Quantization | None, BeforeValidator(_not_of_checkpoints)] = Field(
        default=None, description="Format in which the weights of linear layers are held on a CPU."
    )
    weights_memory_gb: Gib | None = Field(
        default=None,
        gt=0,
        le=MAX_GIB,
        description="GiB of memory for the weights of the model's layers on a CPU, for all ranks of a machine "
        "together. Other layers stay packed on disk, and each step reads them ahead of use.",
    )
    cpu_offload_gb: Gib = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="GiB of weights per GPU to keep in host memory, as whole layers that each step copies ahead of "
        "use; 0 keeps all on the GPU.",
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, le=64, description="Processes (on CUDA: GPUs) that share the model's layers."
    )
    pipeline_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Stages to divide the model's layers into, each with --tensor-parallel-size processes (on CUDA: "
        "GPUs). As many steps run at once.",
    )
    data_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Engines that share a model's experts among all their ranks, and step together. Each has its own "
        "requests and other layers, and runs this command with its own --data-parallel-rank.",
    )
    all2all_backend: All2AllBackend = Field(
        default="allgather_reducescatter",
        description="How tokens reach the ranks that hold their experts: every rank gets all tokens and results are "
        "summed, or with alltoall each token goes to the ranks of its experts only. --data-parallel-size always does "
        "the latter.",
    )
    enable_dbo: bool = Field(
        default=False,
        description="Dual batch overlap: compute large steps in two halves, so that one half's communication between "
        "ranks overlaps the other half's computation.",
    )
    dbo_prefill_token_threshold: int = Field(
        default=512,
        ge=1,
        description="Tokens above which a step is computed in two halves with --enable-dbo; at least 512 on a GPU.",
    )
    enable_lora: bool = Field(
        default=False, description="Serve LoRA adapters of the model, which requests name as their model."
    )
    max_lora_rank: int = Field(default=16, ge=1, le=512, description="Largest rank of an adapter.")
    max_cpu_loras: int | None = Field(
        default=None,
        ge=1,
        description="Adapters to hold in host memory, at least --max-loras, which is the default. Others are read "
        "again when they are requested.",
    )
    kv_disk_space: KVDiskSpace = Field(
        default=0.0,
        description="GiB of disk for KV blocks that were used twice; they are found again after a restart. Needs "
        "--kv-disk-path; off by default.",
    )
    kv_disk_path: Annotated[Path | None, BeforeValidator(_not_empty)] = Field(
        default=None,
        description="Folder for these blocks. Each running engine takes a numbered folder in it; engines of different "
        "models need different ones.",
    )
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

    @model_validator(mode="after")
    def _weights_leave_one_device(self) -> Self:
        if self.weights_memory_gb is not None and self.cpu_offload_gb:
            raise ValueError(
                "--weights-memory-gb and --cpu-offload-gb exclude each other: the former is for the CPU, whose layers "
                "go to disk, and the latter for GPUs, whose layers go to the host's memory."
            )
        return self


class SchedulerArgs(_Frozen):
    """The limits and the order that a scheduler keeps.

    ``max_num_seqs``: sequences that hold device blocks. ``max_swapped``: a victim beyond is computed again.
    ``max_overtakes``: how often a waiting request can be overtaken by a later one, under ``sjf`` by a shorter one, by
    one with an adapter that is in use where its own is not, and by one that has room to load blocks from disk.
    """

    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of prompt and output together; by default what model and KV memory allow.",
    )
    max_num_seqs: MaxNumSeqs = 64
    max_num_batched_tokens: int = Field(
        default=2048, ge=1, le=1 << 20, description="Most tokens that one step computes."
    )
    max_step_seconds: Seconds | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that a step may take while sequences decode; prompts get as many of its tokens as fit. 0 "
        "removes the bound; the default is a multiple of what decoding alone takes.",
    )
    max_waiting: MaxWaiting = 16384
    max_overtakes: int = Field(
        default=64,
        ge=1,
        description="How often later requests may overtake one: shorter ones with --scheduling-policy sjf, those for "
        "adapters that are in use, and those with room to load blocks from disk.",
    )
    max_swapped: int = Field(default=64, ge=0, description="Sequences that may be swapped out at once.")
    preemption_mode: PreemptionPolicy = Field(
        default="auto",
        description="How a sequence is preempted when KV memory runs out: swapped to the host if that has room, or "
        "recomputed; auto takes the cheaper way for each.",
    )
    swap_ahead: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Fraction of KV blocks in use above which the blocks of the next victims are copied to the host "
        "ahead of need, while steps compute; 0 turns this off.",
    )
    max_loras: int = Field(
        default=1, ge=1, le=1024, description="Different adapters in one step; requests for others wait."
    )
    scheduling_policy: Policy = Field(
        default="fcfs",
        description="Which request is admitted next: the first to come, the shortest job, or by priority.",
    )
    speculative_method: SpeculativeMethod = Field(
        default="none",
        description="Guess next tokens where text repeats, as long as it pays: ngram from the last place with the "
        "same tokens, suffix from all of them. Steps do not overlap then.",
    )
    num_speculative_tokens: int = Field(
        default=10, ge=1, le=64, description="Most tokens to guess for a sequence in one step."
    )
    prompt_lookup_min: int = Field(
        default=3,
        ge=1,
        le=64,
        description="Fewest last tokens that must occur earlier, for --speculative-method ngram.",
    )
    prompt_lookup_max: int = Field(
        default=16, ge=1, le=64, description="Most last tokens that are compared, for --speculative-method ngram."
    )

    @model_validator(mode="after")
    def _lookup_is_a_range(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("--prompt-lookup-min is above --prompt-lookup-max.")
        return self


class CacheConfig(_Frozen):
    """The KV blocks: their size, their memory and what is shared among requests."""

    block_size: BlockSize = 16
    kv_cache_memory: KVCacheMemory = None
    swap_space: SwapSpace = 0.5
    enable_prefix_caching: bool = Field(default=True, description="Share KV blocks between equal prefixes.")
    enable_host_caching: bool = Field(
        default=True,
        description="Keep blocks that were used twice in the host's pool when they leave the device's, and take them "
        "back.",
    )

    @property
    def swap_bytes(self) -> int:
        """``swap_space`` in bytes."""
        return int(self.swap_space * (1 << 30))


class CoreArgs(CacheConfig, SchedulerArgs):
    """The settings of an engine's core, whatever it is that executes its steps."""

    @model_validator(mode="after")
    def _blocks_swapped_ahead_have_names(self) -> Self:
        if self.swap_ahead and not self.enable_prefix_caching:
            raise ValueError("--swap-ahead needs --enable-prefix-caching: what is on the host is found by its hash.")
        return self

    @model_validator(mode="after")
    def _swaps_are_possible(self) -> Self:
        if self.preemption_mode == "swap" and not (self.swap_space and self.max_swapped):
            raise ValueError("--preemption-mode swap needs --swap-space and --max-swapped.")
        if self.preemption_mode == "recompute" and self.swap_ahead:
            raise ValueError("--preemption-mode recompute and --swap-ahead exclude each other.")
        return self


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
        pools = self.runner == "pooling" or self.convert in ("embed", "classify")
        if self.runner == "generate" and self.convert in ("embed", "classify"):
            raise ValueError(f"--runner generate and --convert {self.convert} exclude each other.")
        if self.runner == "pooling" and self.convert == "none":
            raise ValueError("--runner pooling and --convert none exclude each other.")
        if self.pipeline_parallel_size > 1 and pools:
            raise ValueError(
                "--pipeline-parallel-size is for models that continue prompts: hidden states are pooled where the "
                "layers end."
            )
        return self

    @model_validator(mode="after")
    def _disk_has_a_host_pool(self) -> Self:
        if bool(self.kv_disk_space) != (self.kv_disk_path is not None):
            raise ValueError("--kv-disk-space and --kv-disk-path belong together.")
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
    def num_ranks(self) -> int:
        """The processes that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

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


class NodeArgs(_Frozen):
    """The machines that run one engine together, the place of an engine among those that share experts, and the
    certificates by which either know each other, which are also the server's. Of the nodes of an engine, node 0 has the
    scheduler and the server, and the others run ranks alone.
    """

    nnodes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Machines to divide the ranks among evenly; each runs this command with its own --node-rank.",
    )
    node_rank: int = Field(
        default=0, ge=0, le=63, description="Number of this machine. Number 0 serves; the others run ranks only."
    )
    headless: bool = Field(default=False, description="Run ranks only, as each --node-rank above 0 does.")
    master_addr: ListenAddress = Field(default="127.0.0.1", description="Address of node 0, the same on all nodes.")
    master_port: int = Field(
        default=29501, ge=1, le=65535, description="Port of node 0 where the others join, the same on all nodes."
    )
    node_addr: ListenAddress | None = Field(
        default=None,
        description="Address of this machine for other nodes, or engines of a group; by default the one that routes "
        "to --master-addr or --data-parallel-address.",
    )
    dist_timeout: Seconds = Field(
        default=600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds in which all nodes, or all engines of a group, must join.",
    )
    data_parallel_rank: int = Field(
        default=0, ge=0, le=63, description="This engine's number, below --data-parallel-size."
    )
    data_parallel_address: ListenAddress = Field(
        default="127.0.0.1", description="Address of engine 0 of a group, the same for all of them."
    )
    data_parallel_rpc_port: int = Field(
        default=29550,
        ge=1,
        le=65535,
        description="Port of engine 0 where the other engines of a group join, the same for all of them.",
    )
    tls_cert: CertificateFile | None = Field(
        default=None,
        description="PEM file of the certificate of the gRPC port, also shown to other nodes and engines of a group; "
        "without it, connections are plain text.",
    )
    tls_key: KeyFile | None = Field(default=None, description="PEM file of its key.")
    tls_client_ca: CaFile | None = Field(
        default=None,
        description="PEM file of the authorities that sign certificates of routers, other nodes and engines; without "
        "it, any client may connect.",
    )

    engine_token_file: TokenFile | None = Field(
        default=None,
        description="File with the tokens that the gRPC port accepts, one per line; node or engine 0 of a group asks "
        "the others for it too. Read again when it changes. See docs/tls.md.",
    )

    @property
    def tls(self) -> ServerTls | None:
        """What the gRPC port does with TLS; None for plain text. Raises ``ValueError`` where half of it is missing."""
        return server_tls(self.tls_cert, self.tls_key, self.tls_client_ca, "--tls")

    @property
    def own_addr(self) -> str | None:
        """The address of this machine for the other nodes, where it is known."""
        return self.node_addr or (self.master_addr if self.node_rank == 0 else None)

    @model_validator(mode="after")
    def _tls_can_be_used(self) -> Self:
        if self.tls is not None:
            check_cert_key(self.tls.identity, "--tls")
        return self

    @model_validator(mode="after")
    def _nodes_know_each_other(self) -> Self:
        if self.node_rank >= self.nnodes:
            raise ValueError("--node-rank is not below --nnodes.")
        if self.headless and self.node_rank == 0:
            raise ValueError("--headless needs a --node-rank above 0: node 0 has the server.")
        on_one_machine = all(map(is_loopback, filter(None, (self.master_addr, self.node_addr))))
        if self.nnodes > 1 and not on_one_machine and self.tls_client_ca is None:
            raise ValueError(
                "--nnodes needs --tls-cert, --tls-key and --tls-client-ca where an address is not loopback."
            )
        return self


class EngineConfig(CliSettings, NodeArgs, EngineArgs):
    """Serves one model. Every flag is also an environment variable QUIRE_ENGINE_..., such as QUIRE_ENGINE_MAX_NUM_SEQS.

    quire-engine simulate --help is about trying a trace of requests without a model, and quire-engine bench --help
    about measuring the engine beside others.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, cli_prog_name="quire-engine")
    metavars: ClassVar[Mapping[str, str]] = {
        "--model": "FOLDER",
        "--served-model-name": "NAME",
        "--lora-modules": "NAME=FOLDER",
        "--lora-root": "FOLDER",
        "--shared-device": "NAME",
        "--host": "ADDRESS",
        "--port": "PORT",
        "--metrics-port": "PORT",
        "--master-addr": "ADDRESS",
        "--master-port": "PORT",
        "--node-addr": "ADDRESS",
        "--data-parallel-address": "ADDRESS",
        "--data-parallel-rpc-port": "PORT",
        "--tls-cert": "FILE",
        "--tls-key": "FILE",
        "--tls-client-ca": "FILE",
        "--engine-token-file": "FILE",
        "--kv-disk-path": "FOLDER",
    }
    foreign_flags: ClassVar[Mapping[str, str]] = {
        **{short: f"use {flag}" for short, flag in _SHORT.items()},
        **dict.fromkeys(("-dpl", "-dpr", "-dpe", "-dph"), _AN_ENGINE_EACH),
        "-dpb": _WITHOUT_RAY,
        "-ep": _SHARED_EXPERTS,
        "-sc": _SPECULATION,
        "--api-key": "keys are the router's, which has this flag",
        "--chat-template": "a template is part of the model's folder, as chat_template.jinja",
        "--tokenizer": "the tokenizer is part of the model's folder",
        "--trust-remote-code": "no code of a model's folder is run",
        "--enable-auto-tool-choice": _SEEN,
        "--tool-call-parser": _SEEN,
        "--reasoning-parser": _SEEN,
        "--enable-chunked-prefill": "prompts are always computed in chunks, of --max-num-batched-tokens",
        **dict.fromkeys(("--data-parallel-size-local", "--data-parallel-start-rank"), _AN_ENGINE_EACH),
        **dict.fromkeys(("--data-parallel-external-lb", "--data-parallel-hybrid-lb"), _AN_ENGINE_EACH),
        "--data-parallel-backend": _WITHOUT_RAY,
        "--dp-size": "use --data-parallel-size",
        "--enable-dp-attention": "--data-parallel-size does it",
        "--dist-init-addr": "--master-addr and --master-port are the two parts of it",
        "--tp-size": "use --tensor-parallel-size",
        "--mem-fraction-static": "use --gpu-memory-utilization",
        "--context-length": "use --max-model-len",
        "--kv-cache-memory-bytes": "use --kv-cache-memory",
        "--num-gpu-blocks-override": "--kv-cache-memory sets the memory of KV blocks",
        "--task": "--runner and --convert say it",
        "--pooler-config": "--pooling-type sets it; requests choose use_activation and dimensions",
        "--override-pooler-config": "--pooling-type sets it; requests choose use_activation and dimensions",
        "--is-embedding": "use --convert embed",
        "--speculative-config": _SPECULATION,
        "--dbo-decode-token-threshold": "--dbo-prefill-token-threshold is for all steps",
        "--enable-two-batch-overlap": "use --enable-dbo",
        "--enable-expert-parallel": _SHARED_EXPERTS,
        "--limit-mm-per-prompt": "models are served for text only",
        "--kv-transfer-config": "prefill and decode are not separated",
        "--batching": "engines batch continuously; static and phased batching are in quire-engine simulate, to compare "
        "with",
        "--guided-decoding-backend": "there is one way to structured output, which needs no choice",
        "--structured-outputs-config": "there is one way to structured output, which needs no choice",
        "--load-format": "the files of the model say what they are",
        "--revision": "quire serve MODEL@REVISION names it",
        "--download-dir": "the variable HF_HOME names the folder of downloads",
        "--disable-log-requests": "requests are not logged",
        "--enable-log-requests": "requests are not logged; their traces go to OTEL_EXPORTER_OTLP_ENDPOINT",
        **dict.fromkeys(("--max-tokens", "--temperature", "--top-p", "--top-k"), _OF_A_REQUEST),
    }

    host: ListenAddress = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=9000, ge=0, le=65535, description="gRPC port.")
    metrics_port: int = Field(default=9002, ge=0, le=65535, description="HTTP port of metrics and probes.")
    insecure: bool = Field(
        default=False,
        description="Let anyone who reaches the gRPC port use the engine, on addresses other than loopback, without "
        "--engine-token-file and --tls-client-ca.",
    )
    lora_root: Annotated[Path | None, BeforeValidator(_not_empty)] = Field(
        default=None,
        description="Folder that must contain the adapters that are loaded while the engine serves; by default they "
        "may be anywhere.",
    )
    tls_optional: bool = Field(
        default=False,
        description="Accept plain text as well as TLS, while routers change from one to the other; see docs/tls.md.",
    )
    session_grace: Seconds = Field(
        default=10.0, ge=0, description="Seconds that a router's requests continue after its stream broke."
    )
    shared_device: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="Name of the GPU or other memory that engines of the same name use in turns, while the others "
        "sleep; by default the engine has its own.",
    )
    shutdown_delay: Seconds = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after SIGTERM in which new requests are still accepted, while /ready already fails.",
    )
    shutdown_timeout: Seconds = Field(
        default=30.0, ge=0, description="Seconds that running requests get to end after SIGTERM."
    )
    stall_timeout: Seconds = Field(
        default=60.0, gt=0, description="Seconds without a step, while work is pending, after which /live fails."
    )
    trace_step_interval: int = Field(
        default=1000,
        ge=1,
        description="Trace one step in this many, and each slow, swapping or failed one; 1 traces every step, without "
        "the limit of 20 a second.",
    )
    record_steps: Path | None = Field(
        default=None,
        description="New file for all steps, with prompts and outputs, which quire-engine replay runs again; only its "
        "owner may read it.",
    )
    record_steps_gib: Gib = Field(
        default=1.0, gt=0, description="GiB of that file after which no more steps are recorded."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged."
    )
    log_format: LogFormat = Field(default="text", description="Format of log lines: text for people, or JSON.")

    @model_validator(mode="after")
    def _strangers_are_kept_out(self) -> Self:
        if self.tls_optional and self.tls_cert is None:
            raise ValueError("--tls-optional needs --tls-cert and --tls-key.")
        asks_certificate = self.tls_client_ca is not None and not self.tls_optional
        is_authenticated = self.engine_token_file is not None or asks_certificate
        if self.insecure and is_authenticated:
            raise ValueError("--insecure excludes --engine-token-file and --tls-client-ca: they ask who a caller is.")
        is_served = self.node_rank == 0  # the other nodes have no such port
        if is_served and not (is_authenticated or self.insecure or is_loopback(self.host)):
            raise ValueError(
                f"--host {self.host} would let anyone use the engine who reaches port {self.port}: give it and its "
                "routers an --engine-token-file, or certificates (--tls-cert, --tls-key and --tls-client-ca); "
                "--insecure does without."
            )
        return self

    @model_validator(mode="after")
    def _root_of_adapters_has_adapters(self) -> Self:
        if self.lora_root is not None and not self.enable_lora:
            raise ValueError("--lora-root would have no effect: add --enable-lora.")
        return self

    @model_validator(mode="after")
    def _disk_is_of_one_machine(self) -> Self:
        if self.record_steps is not None and self.kv_disk_path is not None:
            raise ValueError("--record-steps is for engines without --kv-disk-path: what the disk had is not recorded.")
        if self.nnodes > 1 and self.kv_disk_path is not None:
            raise ValueError("--kv-disk-path and --nnodes exclude each other: all ranks have to see one folder.")
        return self

    @model_validator(mode="after")
    def _engines_of_a_group_know_each_other(self) -> Self:
        if self.data_parallel_rank >= self.data_parallel_size:
            raise ValueError("--data-parallel-rank is not below --data-parallel-size.")
        if self.data_parallel_size == 1:
            return self
        if self.nnodes > 1:
            raise ValueError(
                "--data-parallel-size and --nnodes exclude each other: each engine of a group is on one machine."
            )
        on_one_machine = all(map(is_loopback, filter(None, (self.data_parallel_address, self.node_addr))))
        if not on_one_machine and self.tls_client_ca is None:
            raise ValueError(
                "--data-parallel-size needs --tls-cert, --tls-key and --tls-client-ca where an address is not loopback."
            )
        return self

    @model_validator(mode="after")
    def _ranks_are_divided_evenly(self) -> Self:
        if self.num_ranks % self.nnodes:
            raise ValueError(
                f"--nnodes {self.nnodes} does not divide the ranks: --tensor-parallel-size times "
                f"--pipeline-parallel-size is {self.num_ranks}."
            )
        return self
