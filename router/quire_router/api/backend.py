"""What the API needs of the rooms behind it, as protocols: the fleet it asks, and the lifecycle that runs requests."""

from collections.abc import AsyncGenerator
from typing import Protocol

from quire_router.generation import Delta, Generation


class Limits(Protocol):
    """What a model's engines can take."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...


class FleetView(Protocol):
    """What is known of the engines now."""

    def limits(self, model: str) -> Limits | None:
        """The limits of a configured model; None while no engine has told them."""
        ...

    def ready(self, model: str) -> int:
        """Engines that can run the model now."""
        ...


class Runner(Protocol):
    """Runs requests that passed the validator."""

    def run(self, generation: Generation) -> AsyncGenerator[Delta]:
        """The answer, piece by piece; the last of each choice has its finish reason, and the last of all the usage.
        Raises ``QuireError``. Closing or cancelling it cancels the request.
        """
        ...

    def cancel(self, request_id: str) -> bool:
        """Ends what has not ended of a running request with ``FinishReason.ABORT``; False when there is none."""
        ...
