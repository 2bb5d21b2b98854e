"""Changes of what the prefix cache holds, for the routers' index."""

from dataclasses import dataclass
from enum import Enum


class Tier(Enum):
    """Where a block lies."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Block ``block_hash`` can now be hit in ``tier``."""

    block_hash: bytes
    tier: Tier


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Block ``block_hash`` can no longer be hit in ``tier``."""

    block_hash: bytes
    tier: Tier


KVCacheEvent = BlockStored | BlockRemoved
