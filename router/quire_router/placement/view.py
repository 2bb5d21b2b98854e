"""What placement knows of an engine at the moment of a decision. Plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine that is ready to run a model.

    ``in_flight`` and ``in_flight_tokens`` are counted by the router at dispatch and released with the stream, so they
    are never stale: requests, and their prompt tokens plus the most output they may make. ``running``, ``waiting``,
    ``swapped`` and ``blocks_free`` are what the engine said after its last step.
    """

    engine_id: str
    in_flight: int
    in_flight_tokens: int
    running: int = 0
    waiting: int = 0
    swapped: int = 0
    blocks_free: int = 0
