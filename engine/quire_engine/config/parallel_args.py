"""Settings of parallel execution: the processes and the machines that share a model, and how they meet."""

from typing import Self

from pydantic import Field, model_validator
from quire_proto.cli import ListenAddress
from quire_proto.engine_token import TokenFile
from quire_proto.local_hosts import is_loopback
from quire_proto.tls import CaFile, CertificateFile, KeyFile, ServerTls, check_cert_key, server_tls
from quire_proto.units import Seconds

from quire_engine.config.capabilities import Feature
from quire_engine.config.fields import All2AllBackend, Frozen, chosen


class ParallelArgs(Frozen):
    """How a model is divided among processes, and how these exchange what they compute."""

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

    @property
    def num_ranks(self) -> int:
        """Returns the number of processes that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def features(self) -> frozenset[Feature]:
        """See ``Frozen.features``."""
        return super().features | chosen(
            {
                Feature.TENSOR_PARALLEL: self.tensor_parallel_size > 1,
                Feature.PIPELINE_PARALLEL: self.pipeline_parallel_size > 1,
                Feature.DATA_PARALLEL: self.data_parallel_size > 1,
                Feature.EXPERT_PARALLEL: self.tensor_parallel_size > 1 or self.data_parallel_size > 1,
                Feature.ALL_TO_ALL: self.all2all_backend == "alltoall",
                Feature.DUAL_BATCH_OVERLAP: self.enable_dbo,
            }
        )


class NodeArgs(Frozen):
    """The machines (nodes) of one engine, the engine's place in a data-parallel group, and the certificates that nodes,
    engines and the server show. Node 0 has the scheduler and the server; the other nodes only run ranks.
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
    def features(self) -> frozenset[Feature]:
        """See ``Frozen.features``."""
        return super().features | chosen({Feature.NODES: self.nnodes > 1})

    @property
    def tls(self) -> ServerTls | None:
        """Returns the TLS settings of the gRPC port; None for plain text. Raises ``ValueError`` if one is missing."""
        return server_tls(self.tls_cert, self.tls_key, self.tls_client_ca, "--tls")

    @property
    def own_addr(self) -> str | None:
        """Returns the address of this machine for other nodes; None if it is not known."""
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
