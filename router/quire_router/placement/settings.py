"""How placement is set up. Plain data; the command line's flags of the same names fill it in."""

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["cost", "round_robin", "least_load", "prefix_only", "power_of_two", "llm_d", "sglang"]


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """``policy`` chooses. ``max_affinity_wait`` is how many seconds longer than necessary a request may wait for the
    sake of what is cached, and ``session_seconds`` what keeping a session on its engine is worth, both for ``cost``.
    ``max_sessions`` are remembered. ``seed`` is for policies that draw.
    """

    policy: PolicyName = "cost"
    max_affinity_wait: float = 20.0
    session_seconds: float = 0.5
    max_sessions: int = 65_536
    seed: int = 0
