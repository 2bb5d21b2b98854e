"""What an admission may have to wait for besides its turn and the memory: a slot for its adapter, blocks that come from
a tier.
"""

from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass

from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.kv_transfer.connector import AsyncKVConnector
from quire_engine.core.lora import LoRARequest, LoRAStats
from quire_engine.core.request import Sequence
from quire_engine.core.request_queue import WaitingQueue


class LoRAGate:
    """The ``AdmissionGate`` of adapters: what is admitted has at most ``max_loras`` of them. What was preempted counts
    too, as it comes back before anything else is admitted.

    Sequences of further adapters are held, and those behind them go first. So that they do not wait for ever, only
    ``max_overtakes`` with an adapter do: then no more are admitted until an adapter that was passed over has had its
    turn, or nobody waits for one any more. They are released when the adapters of what is admitted have changed.

    ``active`` are the adapters of what is admitted, and may be some that were.
    """

    def __init__(
        self,
        max_loras: int,
        max_overtakes: int,
        waiting: WaitingQueue,
        running: Iterable[Sequence],
        preempted: abc.Sequence[Iterable[Sequence]],
    ) -> None:
        self._max_loras = max_loras
        self._max_overtakes = max_overtakes
        self._waiting = waiting
        self._running = running
        self._preempted = preempted
        self._held: dict[int, Sequence] = {}
        self._num_overtakes = 0
        self.active: set[int] = set()
        self._passed_over: set[int] = set()
        self._has_new = False

    def release(self) -> Iterable[Sequence]:
        """All that are held, if the adapters of what is admitted have changed since. O(running)."""
        if not self._waiting.loras:
            self._passed_over.clear()
            self._num_overtakes = 0
            return ()
        active = {lora.lora_int_id for queue in (self._running, *self._preempted) for lora in _loras_of(queue)}
        waiting = {lora.lora_int_id for lora in self._waiting.loras}
        passed_over = (self._passed_over & waiting) - active
        changed = active != self.active or self._has_new or passed_over != self._passed_over
        self.active, self._passed_over, self._has_new = active, passed_over, False
        if not passed_over:
            self._num_overtakes = 0
        released = list(self._held.values()) if changed else []
        if changed:
            self._held.clear()
        return released

    def admits(self, sequence: Sequence) -> bool:
        """Whether its adapter is one of those that are admitted, or there is room for one more."""
        lora = sequence.request.lora
        if lora is None:
            return True
        if lora.lora_int_id in self.active:
            admitted = self._num_overtakes < self._max_overtakes
        else:
            admitted = len(self.active) < self._max_loras
            if not admitted:
                self._passed_over.add(lora.lora_int_id)
        if not admitted:
            self._held[sequence.id] = sequence
        return admitted

    def on_admission(self, sequence: Sequence) -> None:
        """Takes note of its adapter, or that those that were passed over are overtaken once more."""
        lora = sequence.request.lora
        if lora is None:
            return
        if lora.lora_int_id not in self.active:
            self.active.add(lora.lora_int_id)
            self._num_overtakes, self._has_new = 0, True
        elif self._passed_over:
            self._num_overtakes += 1

    def on_abort(self, sequence: Sequence) -> None:
        """Forgets a sequence, which may be held."""
        self._held.pop(sequence.id, None)

    def get_stats(self) -> LoRAStats:
        """The adapters of what waits, runs and was preempted. O(running)."""
        runs = _loras_of(self._running)
        away = set().union(*map(_loras_of, self._preempted))
        used = runs | away
        lacking = sum(count for lora, count in self._waiting.loras.items() if lora not in used)
        return LoRAStats(
            running=_names(runs),
            waiting=_names(away.union(self._waiting.loras)),
            num_used_slots=len(used),
            num_waiting_for_slot=lacking if len(used) >= self._max_loras else 0,
        )


def _loras_of(sequences: Iterable[Sequence]) -> set[LoRARequest]:
    return {lora for sequence in sequences if (lora := sequence.request.lora) is not None}


def _names(loras: Iterable[LoRARequest]) -> tuple[str, ...]:
    return tuple(sorted({lora.lora_name for lora in loras}))


class TransferGate:
    """The ``AdmissionGate`` of an asynchronous tier: a sequence is held while what ``tier`` has of its prefix is
    loaded, if that is faster than computing it at ``rate`` tokens a second. These blocks are looked for once, when the
    sequence could be next, and it is admitted with what has come of them.

    A held sequence waits for the last of its blocks that is on its way, and is looked at again when that has come; one
    that others leave no room to load for is when they have left it. So that what needs much room does not wait for
    ever, only ``max_overtakes`` others begin to load before the oldest of those that lack room: then nobody else does
    until that has begun, or is to be computed.
    """

    def __init__(
        self, tier: AsyncKVConnector, kv_cache_manager: KVCacheManager, rate: float, max_overtakes: int
    ) -> None:
        self._tier = tier
        self._kv_cache_manager = kv_cache_manager
        self._rate = rate
        self._max_overtakes = max_overtakes
        # What is being loaded for a sequence, by its id, once that was looked for.
        self._awaited: dict[int, list[bytes]] = {}
        # By their ids: those that are held by the block that each waits for, and those that lack room, the oldest
        # first, which keep their places here while they are looked at again.
        self._waiting_for: dict[bytes, dict[int, Sequence]] = {}
        self._lacking_room: dict[int, _LackingRoom] = {}
        self._num_overtakes = 0  # of the oldest of them
        self._has_new_oldest = False

    def release(self) -> Iterable[Sequence]:
        """Those that wait for a block that has come, or for room that there is now; all if the tier is off."""
        is_on = self._tier.is_on
        ended = self._tier.take_ended_loads() if is_on else list(self._waiting_for)
        released = [sequence for each in ended for sequence in self._waiting_for.pop(each, {}).values()]
        if ended or self._has_new_oldest or not is_on:
            self._has_new_oldest = False
            for each in self._lacking_room.values():
                # Of the oldest's blocks, others may have loaded some.
                has_room = self._is_reserved_for(each.sequence) or self._tier.has_room_for(each.num_blocks)
                if each.is_held and (has_room or not is_on):
                    each.is_held = False
                    released.append(each.sequence)
                if is_on and self._is_reserved:
                    break
        return released

    def admits(self, sequence: Sequence) -> bool:
        """Whether none of its blocks is on its way from the tier. Begins to load them when it is first asked for."""
        if sequence.group.needs_prompt_logprobs:
            return True
        awaited = self._awaited.get(sequence.id)
        if awaited is None:
            awaited, num_lacking = self._kv_cache_manager.begin_load(
                self._tier,
                sequence.table,
                sequence.token_ids,
                self._rate,
                may_begin=not self._is_reserved or self._is_reserved_for(sequence),
            )
            if num_lacking:
                self._lacking_room[sequence.id] = _LackingRoom(sequence, num_lacking)
                return False
            self._awaited[sequence.id] = awaited
            if awaited and self._lacking_room and not self._is_oldest(sequence):
                self._num_overtakes += 1
            self._forget_lack(sequence)
        if not self._tier.is_loading(awaited):
            return True
        self._waiting_for.setdefault(awaited[-1], {})[sequence.id] = sequence
        return False

    def on_admission(self, sequence: Sequence) -> None:
        """Forgets what came for it."""
        self._awaited.pop(sequence.id, None)

    def on_abort(self, sequence: Sequence) -> None:
        """Forgets it; what is on its way still comes to the host pool."""
        self._forget_lack(sequence)
        awaited = self._awaited.pop(sequence.id, None)
        if awaited:
            waiting = self._waiting_for.get(awaited[-1], {})
            waiting.pop(sequence.id, None)
            if not waiting:
                self._waiting_for.pop(awaited[-1], None)

    @property
    def _is_reserved(self) -> bool:
        """Whether the oldest of those that lack room alone may begin to load."""
        return bool(self._lacking_room) and self._num_overtakes >= self._max_overtakes

    def _is_reserved_for(self, sequence: Sequence) -> bool:
        return self._is_reserved and self._is_oldest(sequence)

    def _is_oldest(self, sequence: Sequence) -> bool:
        return next(iter(self._lacking_room), None) == sequence.id

    def _forget_lack(self, sequence: Sequence) -> None:
        """It lacks room no more. If it was the oldest, the next one is from now on."""
        if self._is_oldest(sequence):
            self._num_overtakes, self._has_new_oldest = 0, True
        self._lacking_room.pop(sequence.id, None)


@dataclass(slots=True)
class _LackingRoom:
    """A sequence that so many blocks lack room for. It is held until it is to be looked at again."""

    sequence: Sequence
    num_blocks: int
    is_held: bool = True
