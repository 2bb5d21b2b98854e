"""Types of fields: names of choices, and ranges and help that more than one command shows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_settings import NoDecode
from quire_proto.units import Bytes, Gib

from quire_engine.config.capabilities import Feature

Policy = Literal["fcfs", "sjf", "priority"]
PreemptionPolicy = Literal["auto", "swap", "recompute"]
Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]
PoolingMode = Literal["auto", "last", "mean", "cls"]
Quantization = Literal["int8", "int4"]
SpeculativeMethod = Literal["none", "ngram", "suffix"]
KVCacheDtype = Literal["auto", "int8", "fp8"]
All2AllBackend = Literal["allgather_reducescatter", "alltoall"]


def split_names(value: object) -> object:
    """Splits names at commas, as an environment variable holds them; a repeated flag adds names."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list):
        return parts
    return [name.strip() for part in parts for name in str(part).split(",") if name.strip()]


def not_empty(value: object) -> object:
    """Raises ``ValueError`` for an empty value, which pydantic would read as the working directory."""
    if value == "":
        raise ValueError("it is empty")
    return value


Names = Annotated[list[str], NoDecode, BeforeValidator(split_names)]
OptionalPath = Annotated[Path | None, BeforeValidator(not_empty)]
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


class Frozen(BaseModel):
    """Settings of one subject, which never change."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    @property
    def features(self) -> frozenset[Feature]:
        """Returns the features that these settings ask for."""
        return frozenset()


def chosen(features: Mapping[Feature, object]) -> frozenset[Feature]:
    """Returns the features whose value is true."""
    return frozenset(feature for feature, is_asked in features.items() if is_asked)
