"""Settings of KV memory: the blocks on the device, on the host and on disk."""

from typing import Self

from pydantic import Field, model_validator

from quire_engine.config.capabilities import Feature
from quire_engine.config.fields import BlockSize, Frozen, KVCacheMemory, KVDiskSpace, OptionalPath, SwapSpace, chosen


class CacheConfig(Frozen):
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
        """Returns ``swap_space`` in bytes."""
        return int(self.swap_space * (1 << 30))

    @property
    def features(self) -> frozenset[Feature]:
        """See ``Frozen.features``."""
        return super().features | chosen(
            {
                Feature.PREFIX_CACHING: self.enable_prefix_caching,
                Feature.HOST_CACHING: self.enable_host_caching,
                Feature.SWAP_SPACE: self.swap_space,
            }
        )


class KVDiskArgs(Frozen):
    """The disk tier of the prefix cache."""

    kv_disk_space: KVDiskSpace = Field(
        default=0.0,
        description="GiB of disk for KV blocks that were used twice; they are found again after a restart. Needs "
        "--kv-disk-path; off by default.",
    )
    kv_disk_path: OptionalPath = Field(
        default=None,
        description="Folder for these blocks. Each running engine takes a numbered folder in it; engines of different "
        "models need different ones.",
    )

    @model_validator(mode="after")
    def _disk_has_a_folder_and_a_size(self) -> Self:
        if bool(self.kv_disk_space) != (self.kv_disk_path is not None):
            raise ValueError("--kv-disk-space and --kv-disk-path belong together.")
        return self

    @property
    def features(self) -> frozenset[Feature]:
        """See ``Frozen.features``."""
        return super().features | chosen({Feature.KV_DISK: self.kv_disk_path is not None})
