"""The one place where a request for a name with several targets gets one of them (``admission.model_targets``),
whichever API it came by: ``TargetSelector`` for a router, ``TargetSelection`` for one request.
"""

from collections.abc import Callable, Container
from contextlib import suppress

from quire_proto.errors import QuireError

from quire_router.admission.model_targets import (
    ModelTargets,
    TargetChoice,
    TargetReason,
    choose_target,
)
from quire_router.api.auth import Identity
from quire_router.api.prepared_request import EnginePoolView, RequestOptions, Runner
from quire_router.core import metrics
from quire_router.core.generation import GenerationRequest
from quire_router.core.tenant_ids import owns


class TargetSelection:
    """The target of one request. It is chosen where the request is validated, which may be another thread's work, from
    what was known of the engines before; ``record`` is to be called on the event loop then.
    """

    def __init__(
        self,
        targets: ModelTargets,
        has_engine: Container[str],
        request_id: str,
        tenant: str,
        *,
        before: str = "",
        known: GenerationRequest | None = None,
    ) -> None:
        """``before`` is the target that the request's conversation was on, and ``known`` what it was when it came first
        under its idempotency key.
        """
        self._targets = targets
        self._has_engine = has_engine
        self._request_id = request_id
        self._tenant = tenant
        self._before = before
        self._known = known
        self._session = ""
        self._choice: TargetChoice | None = None
        self._name = ""

    def target(self, name: str, session: str = "") -> str:
        """Returns the model of a request for ``name`` within a tenant's ``session``; empty if there is but one."""
        group = self._targets.get(name)
        if group is None:
            return ""
        if self._known is not None and self._known.served_name == name and self._known.model in group.models:
            return self._known.model
        self._name, self._session = name, f"{self._tenant}\0{session}" if session else ""
        before = self._before or (self._targets.remembered(name, self._session) if session else "")
        self._choice = choose_target(group, self._session or self._request_id, self._has_engine, before)
        return self._choice.model

    def record(self) -> None:
        """Counts the choice, and remembers it for the session."""
        choice = self._choice
        if choice is None:
            return
        metrics.TARGET_CHOICES.labels(self._name, choice.model, choice.reason).inc()
        if self._session and choice.reason is not TargetReason.FALLBACK:
            self._targets.remember(self._name, self._session, choice.model)


class TargetSelector:
    """Makes the ``TargetSelection`` of requests. ``runner`` knows the records of earlier ones."""

    def __init__(self, targets: ModelTargets, pool: EnginePoolView, runner: Runner) -> None:
        self._targets = targets
        self._pool = pool
        self._runner = runner

    async def select(self, request_id: str, caller: Identity, options: RequestOptions) -> TargetSelection:
        """Returns the selection of one request, which may have come before under its idempotency key."""
        known = await self._known(request_id, caller) if options.key else None
        has_engine = frozenset(filter(has_engine_of(self._pool), self._targets.models))
        return TargetSelection(self._targets, has_engine, request_id, caller.tenant, before=options.target, known=known)

    async def _known(self, request_id: str, caller: Identity) -> GenerationRequest | None:
        """Returns the request that came first with this id; None if there is none, or the journal is away."""
        with suppress(QuireError):
            (record,) = await self._runner.statuses([request_id], confirm_missing=False)
            if record is not None and owns(caller.tenant, record.generation.tenant):
                return record.generation
        return None


def has_engine_of(pool: EnginePoolView) -> Callable[[str], bool]:
    """Returns what says whether a model has an engine, be it one that sleeps."""
    return lambda model: bool(pool.ready(model) or pool.num_sleeping(model))
