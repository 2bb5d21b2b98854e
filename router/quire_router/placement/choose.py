"""The choice of an engine. The cost model will grow behind this one function."""

from collections.abc import Sequence

from quire_router.generation import Generation
from quire_router.placement.view import EngineView


def choose(generation: Generation, engines: Sequence[EngineView]) -> EngineView | None:
    """The engine with the least work in flight; the earliest in ``engines`` among equals; None when there are none.

    Work is counted in tokens, so that one long request weighs as much as many short ones.
    """
    del generation  # every request costs an engine the same until the prefix index tells them apart
    return min(engines, key=lambda engine: (engine.in_flight_tokens, engine.in_flight), default=None)
