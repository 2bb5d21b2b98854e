"""Blocks to copy within and between the pools. Plain data, made by the memory and carried out by the executor."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """From block ``source`` of one pool to block ``target`` of the same or the other one."""

    source: int
    target: int


@dataclass(slots=True)
class BlockCopies:
    """What has to be copied before a step computes: from the device to the host, then within the device, then from the
    host to the device, each list in its order.
    """

    blocks_to_swap_out: list[BlockCopy] = field(default_factory=list)
    blocks_to_copy: list[BlockCopy] = field(default_factory=list)
    blocks_to_swap_in: list[BlockCopy] = field(default_factory=list)
