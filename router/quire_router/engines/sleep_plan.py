"""Which engines go to sleep and which wake up: a decision from what is known at one moment, without input or output.

All routers of a fleet decide alike, from about the same: where several engines would do, it is the one whose id comes
first that wakes up, and the last that goes to sleep. Told twice, an engine does it once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

TURN_SECONDS = 10.0
"""How long an engine that has work keeps a device that it shares before another engine's requests end its turn: waking
up takes about a second, so that of ten seconds one is lost.
"""

GIVE_WAY_SECONDS = 1.0
"""How long one without work keeps it: what it woke up for has reached it by then."""


@dataclass(frozen=True, slots=True)
class SleepSettings:
    """``sleep_after``: seconds without a request after which an engine goes to sleep; None: never for that reason.
    ``min_awake``: engines of each model that are left awake then. ``target_load``: requests that each awake engine is
    meant to have; None: sleepers wake up only where requests find no room.
    """

    sleep_after: float | None = None
    min_awake: int = 1
    target_load: int | None = None

    def wanted(self, load: int) -> int:
        """How many engines a model with ``load`` requests asks for, as an autoscaler computes it."""
        return 0 if self.target_load is None else -(-load // self.target_load)


@dataclass(frozen=True, slots=True)
class SleepCandidate:
    """An engine of ``model`` that is ready, or would be if it did not sleep. ``idle_seconds`` is 0 while it has any
    request; ``awake_seconds`` counts from when it woke up. Engines of one ``shared_device``, unless that is empty, are
    awake in turns. One that ``is_changing`` was asked to sleep or to wake up, and has not done it yet; one that
    ``has_refused`` is not asked again for now.
    """

    id: str
    model: str
    is_sleeping: bool
    idle_seconds: float = 0.0
    awake_seconds: float = 0.0
    shared_device: str = ""
    is_changing: bool = False
    has_refused: bool = False

    @property
    def holds_memory(self) -> bool:
        """Whether it has the memory of its device, or is just giving it back or taking it."""
        return self.is_changing or not self.is_sleeping

    @property
    def may_be_asked(self) -> bool:
        """Whether it can be asked to sleep or to wake up."""
        return not (self.is_changing or self.has_refused)

    @property
    def may_give_way(self) -> bool:
        """Whether it can be put to sleep for another engine of its device, perhaps after its requests have ended."""
        return self.may_be_asked and (self.idle_seconds >= GIVE_WAY_SECONDS or self.awake_seconds >= TURN_SECONDS)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the requests of a model ask for. ``is_starved``: some wait, and no awake engine has room. ``load``: those of
    all routers, waiting and running.
    """

    is_starved: bool = False
    load: int = 0


@dataclass(frozen=True, slots=True)
class SleepPlan:
    """The ids of engines to put to sleep, and to wake up. ``drain``: those that are to sleep when their requests have
    ended, while others wait for their device.
    """

    sleep: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    wake_up: tuple[str, ...] = ()


def plan(engines: Sequence[SleepCandidate], demands: Mapping[str, Demand], settings: SleepSettings) -> SleepPlan:
    """What to do now. One engine of each model is woken up at a time: when it is awake, the next plan sees whether that
    was enough.
    """
    by_device: dict[str, list[SleepCandidate]] = {}
    for engine in engines:
        if engine.shared_device:
            by_device.setdefault(engine.shared_device, []).append(engine)
    claimed: set[str] = set()  # devices that somebody is to have
    wake_up: list[str] = []
    drain: list[str] = []
    awake = Counter(each.model for each in engines if not (each.is_sleeping or each.is_changing))
    for model, demand in sorted(demands.items()):
        if not (demand.is_starved or awake[model] < settings.wanted(demand.load)):
            continue
        sleepers = [each for each in engines if each.model == model and each.is_sleeping]
        if any(each.is_changing for each in sleepers):
            continue  # one is waking up
        sleepers = [each for each in sleepers if each.may_be_asked]
        for sleeper in sorted(sleepers, key=lambda each: (len(_holders(each, by_device)), each.id)):
            holders = _holders(sleeper, by_device)
            if sleeper.shared_device in claimed:
                continue
            if not holders:
                wake_up.append(sleeper.id)
            elif demand.is_starved and all(each.may_give_way for each in holders):
                drain += sorted(each.id for each in holders)
            else:
                continue
            claimed.update(filter(None, [sleeper.shared_device]))
            break
    sleep = _idle_too_long(engines, demands, awake, settings, leave=frozenset(drain))
    return SleepPlan(tuple(sleep), tuple(drain), tuple(wake_up))


def _holders(sleeper: SleepCandidate, by_device: Mapping[str, Iterable[SleepCandidate]]) -> list[SleepCandidate]:
    """The engines that have the memory of a sleeper's device."""
    return [each for each in by_device.get(sleeper.shared_device, ()) if each.holds_memory]


def _idle_too_long(
    engines: Sequence[SleepCandidate],
    demands: Mapping[str, Demand],
    awake: Counter[str],
    settings: SleepSettings,
    *,
    leave: frozenset[str],
) -> list[str]:
    if settings.sleep_after is None:
        return []
    left = awake - Counter(each.model for each in engines if each.id in leave)
    found: list[str] = []
    idle = [
        each
        for each in engines
        if not each.is_sleeping
        and each.may_be_asked
        and each.idle_seconds >= settings.sleep_after
        and each.id not in leave
    ]
    for engine in sorted(idle, key=lambda each: each.id, reverse=True):
        demand = demands.get(engine.model, Demand())
        least = max(settings.min_awake, settings.wanted(demand.load))
        if not demand.is_starved and left[engine.model] > least:
            left[engine.model] -= 1
            found.append(engine.id)
    return found
