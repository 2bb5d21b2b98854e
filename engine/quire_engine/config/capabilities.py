"""The table of capabilities: which features do not go with which models, devices and other features, and the sentence
that refuses each combination.

Settings are checked for features that exclude or need each other when they are read (``CoreArgs``). An engine is
checked for its model and its device when it starts (``executor/start_checks.py``). docs/configuration.md has the table
as ``python -m tests.support.pages`` writes it. Refusals that depend on numbers, such as heads that ranks cannot divide,
stand where the numbers are known.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum


class Feature(Enum):
    """A feature that settings ask for, by its name in the docs. Several that an engine cannot have are refused in this
    order.
    """

    DATA_PARALLEL = "`--data-parallel-size`"
    TENSOR_PARALLEL = "`--tensor-parallel-size`"
    PIPELINE_PARALLEL = "`--pipeline-parallel-size`"
    EXPERT_PARALLEL = "`--tensor-parallel-size` or `--data-parallel-size`"
    ALL_TO_ALL = "`--all2all-backend alltoall`"
    DUAL_BATCH_OVERLAP = "`--enable-dbo`"
    NODES = "`--nnodes`"
    QUANTIZATION = "`--quantization`"
    KV_CACHE_INT8 = "`--kv-cache-dtype int8`"
    KV_CACHE_FP8 = "`--kv-cache-dtype fp8`"
    WEIGHTS_MEMORY = "`--weights-memory-gb`"
    CPU_OFFLOAD = "`--cpu-offload-gb`"
    DETERMINISTIC = "`--deterministic`"
    LORA = "`--enable-lora`"
    POOLING = "embeddings and scores (`--runner pooling`)"
    SPECULATION = "`--speculative-method`"
    ASYNC_SCHEDULING = "`--async-scheduling`"
    CPU_ATTENTION = "`--attention cpu`"
    FLASHINFER = "`--attention flashinfer`"
    PREFIX_CACHING = "`--enable-prefix-caching`"
    HOST_CACHING = "`--enable-host-caching`"
    SWAP_SPACE = "`--swap-space`"
    MAX_SWAPPED = "`--max-swapped`"
    SWAP_AHEAD = "`--swap-ahead`"
    SWAP_ONLY = "`--preemption-mode swap`"
    RECOMPUTE_ONLY = "`--preemption-mode recompute`"
    KV_DISK = "`--kv-disk-path`"
    RECORDING = "`--record-steps`"


Cells = Mapping[Feature, str]
"""The sentences that refuse features; the others are allowed."""


@dataclass(frozen=True, slots=True)
class CapabilityRow:
    """A kind of models or devices, by its name in the docs, and the features that it refuses. In the sentences,
    settings, ``architecture`` and ``device`` stand in braces.
    """

    name: str
    refused: Cells


_NATIVE_ONLY = "is for models with a native implementation, and {architecture} runs through transformers."
_NO_SHARED_EXPERTS = (
    "--data-parallel-size is for engines that share the experts of a model, and {architecture} has none that can be "
    "shared: start several engines without it."
)
_STATELESS_ONLY = "is for models whose layers keep no state, and this one's do."
_DECODERS_ONLY = "is for decoders, and {architecture} is an encoder, which runs through transformers."

NATIVE = CapabilityRow("native implementation", {})
NO_EXPERTS = CapabilityRow(
    "no experts",
    {
        Feature.DATA_PARALLEL: _NO_SHARED_EXPERTS,
        Feature.ALL_TO_ALL: "--all2all-backend alltoall is for models with experts, and {architecture} has none: leave "
        "it out.",
    },
)
THROUGH_TRANSFORMERS = CapabilityRow(
    "transformers",
    {
        Feature.DATA_PARALLEL: _NO_SHARED_EXPERTS,
        Feature.TENSOR_PARALLEL: "The tensor parallel size is {tensor_parallel_size}, and {architecture} runs through "
        "transformers, where models are not divided.",
        Feature.PIPELINE_PARALLEL: "The pipeline parallel size is {pipeline_parallel_size}, and {architecture} runs "
        "through transformers, where models are not divided.",
        Feature.QUANTIZATION: f"The quantization {{quantization}} {_NATIVE_ONLY}",
        Feature.WEIGHTS_MEMORY: f"--weights-memory-gb {_NATIVE_ONLY}",
        Feature.CPU_OFFLOAD: f"--cpu-offload-gb {_NATIVE_ONLY}",
        Feature.DETERMINISTIC: f"--deterministic {_NATIVE_ONLY}",
        Feature.LORA: f"--enable-lora {_NATIVE_ONLY}",
    },
)
KEEPS_STATE = CapabilityRow(
    "layers with a state",
    {
        Feature.SPECULATION: f"--speculative-method {_STATELESS_ONLY}",
        Feature.ASYNC_SCHEDULING: f"--async-scheduling {_STATELESS_ONLY}",
        Feature.KV_DISK: f"--kv-disk-path {_STATELESS_ONLY} The disk has blocks of one size, and no states.",
    },
)
ENCODER = CapabilityRow(
    "encoder",
    {
        Feature.DATA_PARALLEL: f"--data-parallel-size {_DECODERS_ONLY}",
        Feature.TENSOR_PARALLEL: f"--tensor-parallel-size {_DECODERS_ONLY}",
        Feature.PIPELINE_PARALLEL: f"--pipeline-parallel-size {_DECODERS_ONLY}",
        Feature.QUANTIZATION: f"--quantization {_DECODERS_ONLY}",
        Feature.WEIGHTS_MEMORY: f"--weights-memory-gb {_DECODERS_ONLY}",
        Feature.CPU_OFFLOAD: f"--cpu-offload-gb {_DECODERS_ONLY}",
        Feature.DETERMINISTIC: f"--deterministic {_DECODERS_ONLY}",
        Feature.LORA: f"--enable-lora {_DECODERS_ONLY}",
    },
)
MODELS = (NATIVE, NO_EXPERTS, THROUGH_TRANSFORMERS, KEEPS_STATE, ENCODER)
"""The kinds of models. A model may be of several, as its class says (``Model.capabilities``)."""

CPU = CapabilityRow(
    "CPU",
    {
        Feature.KV_CACHE_FP8: "KV memory in fp8 is for GPUs; on the CPU, --kv-cache-dtype int8 takes the same memory.",
        Feature.CPU_OFFLOAD: "--cpu-offload-gb is for --device cuda: on the CPU, --weights-memory-gb keeps layers on "
        "disk.",
        Feature.FLASHINFER: "The attention backend flashinfer does not run on the CPU.",
    },
)
CUDA = CapabilityRow(
    "CUDA",
    {
        Feature.QUANTIZATION: "The quantization {quantization} is for the CPU, and the device is {device}.",
        Feature.KV_CACHE_INT8: "KV memory in int8 is for the CPU; on a GPU, --kv-cache-dtype fp8 takes the same "
        "memory.",
        Feature.WEIGHTS_MEMORY: "--weights-memory-gb is for --device cpu: on a GPU, --cpu-offload-gb moves layers to "
        "the host.",
        Feature.CPU_ATTENTION: "The attention backend cpu does not run on a GPU.",
    },
)
REFERENCE_ON_CUDA = CapabilityRow(
    "`--attention reference` on CUDA",
    {Feature.DETERMINISTIC: "The attention backend reference is not deterministic on a GPU; use flashinfer."},
)
OTHER_BITS = CapabilityRow(
    "weights stored in other bits",
    {
        Feature.QUANTIZATION: "The weights are quantised already, in {bits} bits, which --quantization {quantization} "
        "is not.",
    },
)
OFFLINE = CapabilityRow(
    "`LLM`, the offline API",
    {Feature.DATA_PARALLEL: "--data-parallel-size is for engines with a server of their own."},
)
DEVICES: Mapping[str, CapabilityRow] = {"cpu": CPU, "cuda": CUDA}
"""The kinds of devices, by torch's names of them."""

EXCLUDES: Mapping[Feature, Cells] = {
    Feature.SPECULATION: {
        Feature.ASYNC_SCHEDULING: "--async-scheduling and --speculative-method exclude each other.",
        Feature.PIPELINE_PARALLEL: "--speculative-method and --pipeline-parallel-size exclude each other.",
    },
    Feature.ASYNC_SCHEDULING: {
        Feature.PIPELINE_PARALLEL: "--async-scheduling and --pipeline-parallel-size exclude each other.",
    },
    Feature.DATA_PARALLEL: {
        Feature.PIPELINE_PARALLEL: "--data-parallel-size and --pipeline-parallel-size exclude each other: stages would "
        "wait for each other's experts.",
        Feature.NODES: "--data-parallel-size and --nnodes exclude each other: each engine of a group is on one "
        "machine.",
    },
    Feature.DUAL_BATCH_OVERLAP: {
        Feature.ALL_TO_ALL: "--enable-dbo and --all2all-backend alltoall exclude each other.",
        Feature.DATA_PARALLEL: "--enable-dbo and --data-parallel-size exclude each other: tokens are sent.",
    },
    Feature.WEIGHTS_MEMORY: {
        Feature.CPU_OFFLOAD: "--weights-memory-gb and --cpu-offload-gb exclude each other: the former is for the CPU, "
        "whose layers go to disk, and the latter for GPUs, whose layers go to the host's memory.",
    },
    Feature.DETERMINISTIC: {
        Feature.LORA: "--deterministic and --enable-lora exclude each other: adapters' products are grouped.",
    },
    Feature.RECOMPUTE_ONLY: {
        Feature.SWAP_AHEAD: "--preemption-mode recompute and --swap-ahead exclude each other.",
    },
    Feature.KV_DISK: {
        Feature.NODES: "--kv-disk-path and --nnodes exclude each other: all ranks have to see one folder.",
        Feature.RECORDING: "--record-steps is for engines without --kv-disk-path: what the disk had is not recorded.",
    },
}
"""The features that each feature excludes."""

_DISK_NEEDS = (
    "--kv-disk-path needs --enable-prefix-caching, --enable-host-caching and --swap-space: blocks are found by their "
    "hashes, and pass through the host's pool."
)
_SWAP_NEEDS = "--preemption-mode swap needs --swap-space and --max-swapped."
NEEDS: Mapping[Feature, Cells] = {
    Feature.ALL_TO_ALL: {
        Feature.EXPERT_PARALLEL: "--all2all-backend alltoall needs a --tensor-parallel-size or a --data-parallel-size "
        "above 1: it is for experts that several ranks share.",
    },
    Feature.DUAL_BATCH_OVERLAP: {
        Feature.TENSOR_PARALLEL: "--enable-dbo needs a --tensor-parallel-size above 1: it hides the sums of ranks that "
        "share layers.",
    },
    Feature.SWAP_AHEAD: {
        Feature.PREFIX_CACHING: "--swap-ahead needs --enable-prefix-caching: what is on the host is found by its hash.",
    },
    Feature.SWAP_ONLY: {Feature.SWAP_SPACE: _SWAP_NEEDS, Feature.MAX_SWAPPED: _SWAP_NEEDS},
    Feature.KV_DISK: {
        Feature.PREFIX_CACHING: _DISK_NEEDS,
        Feature.HOST_CACHING: _DISK_NEEDS,
        Feature.SWAP_SPACE: _DISK_NEEDS,
    },
}
"""The features that each feature needs."""


def find_conflict(asked: Set[Feature]) -> str | None:
    """Returns the sentence that refuses settings which ask for the features ``asked``; None if these go together."""
    return next(_conflicts(asked), None)


def _conflicts(asked: Set[Feature]) -> Iterator[str]:
    for feature in Feature:
        if feature in asked:
            yield from (sentence for other, sentence in NEEDS.get(feature, {}).items() if other not in asked)
            yield from (sentence for other, sentence in EXCLUDES.get(feature, {}).items() if other in asked)


def find_refusal(rows: Iterable[CapabilityRow], asked: Set[Feature], facts: Mapping[str, object]) -> str | None:
    """Returns the sentence with which one of ``rows`` refuses one of the features ``asked``; None if all are allowed.
    ``facts`` are the values that stand in the sentences.
    """
    refusing = (
        row.refused[feature] for feature in Feature if feature in asked for row in rows if feature in row.refused
    )
    sentence = next(refusing, None)
    return None if sentence is None else sentence.format_map(facts)
