"""A block to copy between the pools. Plain data, made by the memory and carried out by the executor."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """From block ``source`` of one pool to block ``target`` of the other."""

    source: int
    target: int
