"""Where an engine has a block. Plain data."""

from enum import IntEnum


class Tier(IntEnum):
    """In device memory, ready to be used, or in the host pool, from where it is copied back."""

    DEVICE = 0
    HOST = 1
