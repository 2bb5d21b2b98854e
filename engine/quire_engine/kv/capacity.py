"""How many blocks there are. Plain data, decided by the executor that owns the memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Blocks that there is memory for. Device block 0 is the null page, never given to a sequence. ``block_bytes`` is
    what one block takes, in either pool.
    """

    block_size: int
    device_blocks: int
    host_blocks: int
    block_bytes: int = 1

    @property
    def usable_tokens(self) -> int:
        """Tokens that one sequence can hold when it is alone."""
        return (self.device_blocks - 1) * self.block_size
