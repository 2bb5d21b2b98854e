"""``EngineConfig``: the command line of ``quire-engine``, and the settings of its server."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict
from quire_proto.cli import CliSettings, ListenAddress
from quire_proto.local_hosts import is_loopback
from quire_proto.logs import LogFormat
from quire_proto.units import Gib, Seconds

from quire_engine.config.capabilities import Feature
from quire_engine.config.engine_args import EngineArgs
from quire_engine.config.fields import OptionalPath, chosen
from quire_engine.config.foreign_flags import FOREIGN_FLAGS
from quire_engine.config.parallel_args import NodeArgs

PREFIX = "QUIRE_ENGINE_"
OTHER_VARIABLES = ("cpu_kernels",)  # QUIRE_ENGINE_CPU_KERNELS is read by ``kernels``, which may not import this


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
    foreign_flags: ClassVar[Mapping[str, str]] = FOREIGN_FLAGS

    host: ListenAddress = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=9000, ge=0, le=65535, description="gRPC port.")
    metrics_port: int = Field(default=9002, ge=0, le=65535, description="HTTP port of metrics and probes.")
    insecure: bool = Field(
        default=False,
        description="Let anyone who reaches the gRPC port use the engine, on addresses other than loopback, without "
        "--engine-token-file and --tls-client-ca.",
    )
    lora_root: OptionalPath = Field(
        default=None,
        description="Folder that must contain the adapters that are loaded while the engine serves; by default they "
        "may be anywhere.",
    )
    tls_optional: bool = Field(
        default=False,
        description="Accept plain text as well as TLS, while routers change from one to the other; see docs/tls.md.",
    )
    engine_core_process: bool = Field(
        default=False,
        description="Run the scheduler and the model in a process of their own, so that they need not share Python's "
        "lock with connections and streams; see docs/operations.md.",
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

    @property
    def features(self) -> frozenset[Feature]:
        """See ``Frozen.features``."""
        return super().features | chosen({Feature.RECORDING: self.record_steps is not None})

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
    def _engines_of_a_group_know_each_other(self) -> Self:
        if self.data_parallel_rank >= self.data_parallel_size:
            raise ValueError("--data-parallel-rank is not below --data-parallel-size.")
        if self.data_parallel_size == 1:
            return self
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
