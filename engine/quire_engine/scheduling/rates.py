"""How fast this engine computes and copies: what decides between swapping and computing again. Plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured by the executor when it starts: prompt tokens that it computes and bytes that it copies between the
    pools (one way), each a second.
    """

    tokens_per_second: float
    bytes_per_second: float


UNMEASURED = Rates(tokens_per_second=1e3, bytes_per_second=1e9)
"""What is assumed where nothing was measured: a slow CPU."""
