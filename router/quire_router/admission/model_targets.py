"""Names behind which there are several models, the *targets*, such as two versions of one: which of them a request for
the name gets, and whether it is sent once more to a *shadow*, whose answer is compared and thrown away.

The words are those of the Gateway API: targets have a ``weight`` each, and a mirror a ``percent``. The choice is a hash
of what keeps requests together (weighted rendezvous hashing: of all targets the one whose exponential variate with the
rate ``weight`` comes first), so that every router makes the same one, and a weight that is raised moves only requests
to that target, one that is lowered only those from it. Does no I/O.
"""

from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from math import log

_MAX_REMEMBERED = 65_536
_HASHES = 2.0**64


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """A configured ``model``, and its part of all requests for a name: ``weight`` of the sum of all weights."""

    model: str
    weight: int = 1


@dataclass(frozen=True, slots=True)
class ShadowTarget:
    """A configured ``model`` that gets ``percent`` of a name's requests as well."""

    model: str
    percent: float


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """What is behind a name: at least one target, some weight among them, and perhaps a shadow."""

    targets: tuple[ModelTarget, ...]
    shadow: ShadowTarget | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """The models of all targets, with and without a weight."""
        return tuple(target.model for target in self.targets)


class TargetReason(StrEnum):
    """Why a target was chosen: by its weight; because what the request goes on from was there; or because that with the
    next best hash has engines, and the one by weight has none.
    """

    WEIGHT = "weight"
    SESSION = "session"
    FALLBACK = "fallback"


@dataclass(frozen=True, slots=True)
class TargetChoice:
    """The target ``model`` of a request."""

    model: str
    reason: TargetReason


def choose_target(group: TargetGroup, key: str, has_engine: Container[str], before: str = "") -> TargetChoice:
    """Returns the target of a request with this ``key``, the same for every request with it. ``has_engine`` are the
    models that have one. A request that goes on from one at the target ``before`` stays there, whatever its weight is,
    while that has an engine; and while no target has one, if it has a weight.
    """
    weights = {target.model: target.weight for target in group.targets}
    any_has = any(weight and model in has_engine for model, weight in weights.items())
    if before in weights and (before in has_engine or (weights[before] and not any_has)):
        return TargetChoice(before, TargetReason.SESSION)
    weighted = [target for target in group.targets if target.weight]
    by_weight = min(weighted, key=lambda target: _arrival(key, target))
    if by_weight.model in has_engine or not any_has:
        return TargetChoice(by_weight.model, TargetReason.WEIGHT)
    others = [target for target in weighted if target.model in has_engine]
    return TargetChoice(min(others, key=lambda target: _arrival(key, target)).model, TargetReason.FALLBACK)


def is_shadowed(shadow: ShadowTarget, request_id: str) -> bool:
    """Whether a request is one of those that the shadow gets, too; all prompts of a list are, or none."""
    return _fraction("shadow", request_id) * 100 < shadow.percent


def _arrival(key: str, target: ModelTarget) -> float:
    """The exponential variate with the target's weight as its rate that follows from key and model."""
    return -log(_fraction(target.model, key)) / target.weight


def _fraction(kind: str, key: str) -> float:
    """A number above 0 and below 1 that follows from the words."""
    digest = blake2b(f"{kind}\0{key}".encode(), digest_size=8, person=b"quire target").digest()
    return (int.from_bytes(digest, "little") + 0.5) / _HASHES


class ModelTargets(Mapping[str, TargetGroup]):
    """The targets of all names that have some, until ``replace_all``; and which target each session was on last, here.
    Bounded: of more than ``max_remembered`` sessions those that were idle longest are forgotten.
    """

    def __init__(self, groups: Mapping[str, TargetGroup] | None = None, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._groups = dict(groups or {})
        self._max_remembered = max_remembered
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __getitem__(self, name: str) -> TargetGroup:
        return self._groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def models(self) -> frozenset[str]:
        """The models of all targets and shadows."""
        targets = {model for group in self._groups.values() for model in group.models}
        return frozenset(targets | {group.shadow.model for group in self._groups.values() if group.shadow is not None})

    def replace_all(self, groups: Mapping[str, TargetGroup]) -> None:
        """Has these targets, and no others, from now on."""
        self._groups = dict(groups)

    def remembered(self, name: str, session: str) -> str:
        """Returns the target that a session's last request for the name got here; empty if that is not known. May be
        called on any thread.
        """
        return self._sessions.get((name, session), "")

    def remember(self, name: str, session: str, model: str) -> None:
        """Records the target of a session's request."""
        self._sessions[name, session] = model
        self._sessions.move_to_end((name, session))
        if len(self._sessions) > self._max_remembered:
            self._sessions.popitem(last=False)
