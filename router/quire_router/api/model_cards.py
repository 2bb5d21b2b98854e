"""What requests can name as their model, as ``/v1/models`` shows it: configured models, what has several of them as its
targets, and adapters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import time

from quire_proto.pooling import Task

from quire_router.admission.model_targets import TargetGroup
from quire_router.api.prepared_request import EnginePoolView
from quire_router.api.validation import Validator


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One configured model, an adapter of the model ``parent``, or a name with targets, whose engines are those of all
    of these. ``max_model_len`` is 0 while it is unknown, and ``supported_tasks`` are empty.
    """

    name: str
    created: int
    ready_engines: int
    max_model_len: int
    parent: str = ""
    supported_tasks: tuple[Task, ...] = ()


class ModelCards:
    """The cards of all ``models``, ``targets`` and the adapters of the ``pool``."""

    def __init__(
        self, models: tuple[str, ...], targets: Mapping[str, TargetGroup], pool: EnginePoolView, validator: Validator
    ) -> None:
        self._models = models
        self._targets = targets
        self._pool = pool
        self._validator = validator
        self._created = int(time())

    def names(self) -> list[str]:
        """Returns all names: models, in order, then those with targets, and then adapters."""
        loras = (name for name in self._pool.loras() if name not in self._targets)
        return [*self._models, *self._targets, *loras]

    def card(self, name: str) -> ModelCard:
        """Returns the card of what requests name so. Raises ``QuireError`` NOT_FOUND."""
        if (group := self._targets.get(name)) is not None:
            return self._of_targets(name, group)
        model, lora = self._validator.resolve(name)
        limits, ready = self._pool.limits(model), self._pool.ready(model, lora)
        return ModelCard(
            name,
            self._created,
            ready,
            limits.max_model_len if limits else 0,
            "" if lora is None else model,
            (limits.supported_tasks or ()) if limits else (),
        )

    def _of_targets(self, name: str, group: TargetGroup) -> ModelCard:
        cards = [self.card(model) for model in group.models]
        length = min((card.max_model_len for card in cards if card.max_model_len), default=0)
        return replace(
            cards[0], name=name, ready_engines=sum(card.ready_engines for card in cards), max_model_len=length
        )
