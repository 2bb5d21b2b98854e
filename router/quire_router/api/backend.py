"""What the API needs of the rooms behind it, as protocols: the fleet it asks, and the lifecycle that runs requests."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from quire_router.generation import Delta, GenerationRequest
from quire_router.journal.base import RequestRecord
from quire_router.mark import StreamCursor
from quire_router.siblings import PromptGroup


class ModelLimitsView(Protocol):
    """What a model's engines can take."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...


class EnginePoolView(Protocol):
    """What is known of the engines now."""

    def limits(self, model: str) -> ModelLimitsView | None:
        """The limits of a configured model; None while no engine has told them."""
        ...

    def ready(self, model: str) -> int:
        """Engines that can run the model now."""
        ...


class Runner(Protocol):
    """Runs requests that passed the validator."""

    def run(self, generation: GenerationRequest) -> AsyncGenerator[Delta]:
        """The answer, piece by piece; the last of each choice has its finish reason, and the last of all the usage.
        Raises ``QuireError``. Closing or cancelling it cancels the request.
        """
        ...

    async def run_once(
        self, generation: GenerationRequest, siblings: PromptGroup | None = None
    ) -> AsyncGenerator[Delta] | None:
        """As ``run``, but None when there is a record of this id already: it is to be resumed. For requests whose id
        follows from an idempotency key, and for one of several prompts, of which ``siblings`` are the others. Raises
        ``QuireError``.
        """
        ...

    async def start(self, generation: GenerationRequest) -> bool:
        """Runs a background request to its end without a listener; returns once its record is begun, False when there
        is one of this id already. Raises ``QuireError``.
        """
        ...

    async def record(self, request_id: str) -> RequestRecord | None:
        """What is remembered of a request, running anywhere or ended; None when nothing is. Raises ``QuireError``."""
        ...

    async def statuses(self, request_ids: Sequence[str], *, surely: bool = True) -> list[RequestRecord | None]:
        """How it is with each of several requests, without prompts and pieces; see ``Journal.statuses``. One that runs
        in the background under no lease is taken over. Raises ``QuireError``.
        """
        ...

    def resume(self, record: RequestRecord, mark: StreamCursor, deadline: float | None = None) -> AsyncGenerator[Delta]:
        """The answer to an earlier request, from its first piece on; what is before ``mark`` comes as ``told``. Follows
        a router that is still at it, and takes a request up that nobody is at. Raises ``QuireError``, DEADLINE among
        others at ``deadline``, in seconds since 1970. Closing it, as that error, only ends the request if it was taken
        up here, and leaves it to be resumed again.
        """
        ...

    async def delete(self, request_id: str) -> bool:
        """Forgets a request that has ended, and one that has not soon after the end that it is given, as by ``cancel``;
        False when nothing is remembered of it. Raises ``QuireError``.
        """
        ...

    async def cancel(self, request_id: str) -> bool:
        """Ends what has not ended of a request with ``FinishReason.ABORT``, wherever it runs; False when there is none
        that has not ended. Raises ``QuireError``.
        """
        ...
