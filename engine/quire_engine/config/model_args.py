"""Settings of the model: which one is served, how it is loaded, and its adapters."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from quire_proto.units import Gib

from quire_engine.config.capabilities import Feature
from quire_engine.config.fields import (
    MAX_GIB,
    Convert,
    Frozen,
    KVCacheDtype,
    ModelFolder,
    Names,
    PoolingMode,
    Quantization,
    Runner,
    chosen,
)


class ServedModel(Frozen):
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
        """Returns the folders of ``lora_modules`` by name. Raises ``ValueError``."""
        pairs = [module.partition("=") for module in self.lora_modules]
        if not all(name and folder for name, _, folder in pairs):
            raise ValueError("--lora-modules takes NAME=FOLDER, or several with commas between them.")
        folders = {name: Path(folder) for name, _, folder in pairs}
        if len(folders) < len(pairs):
            raise ValueError("--lora-modules has two adapters of one name.")
        return folders

    @property
    def names(self) -> list[str]:
        """Returns the names under which the model is served, the preferred one first."""
        return self.served_model_name or [self.model.resolve().name]


def _not_of_checkpoints(value: object) -> object:
    """Raises ``ValueError`` for vLLM's names of stored quantisation schemes, which the checkpoint's files name."""
    if str(value).lower() in ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "fp8", "gguf"):
        raise ValueError("a checkpoint says itself how it is quantised: leave it out; int8 and int4 are made of others")
    return value


class ModelArgs(Frozen):
    """The device of the model, what it is used for, and how its weights and KV memory are held."""

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

    @model_validator(mode="after")
    def _is_used_in_one_way(self) -> Self:
        if self.runner == "generate" and self.convert in ("embed", "classify"):
            raise ValueError(f"--runner generate and --convert {self.convert} exclude each other.")
        if self.runner == "pooling" and self.convert == "none":
            raise ValueError("--runner pooling and --convert none exclude each other.")
        return self

    @property
    def features(self) -> frozenset[Feature]:
        """See ``Frozen.features``."""
        return super().features | chosen(
            {
                Feature.POOLING: self.runner == "pooling" or self.convert in ("embed", "classify"),
                Feature.KV_CACHE_INT8: self.kv_cache_dtype == "int8",
                Feature.KV_CACHE_FP8: self.kv_cache_dtype == "fp8",
                Feature.QUANTIZATION: self.quantization,
                Feature.WEIGHTS_MEMORY: self.weights_memory_gb is not None,
                Feature.CPU_OFFLOAD: self.cpu_offload_gb,
            }
        )


class LoRAArgs(Frozen):
    """Whether adapters are served, and how large and how many they are."""

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

    @property
    def features(self) -> frozenset[Feature]:
        """See ``Frozen.features``."""
        return super().features | chosen({Feature.LORA: self.enable_lora})
