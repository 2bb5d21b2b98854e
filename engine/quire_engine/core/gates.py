"""The gates that an admission may have to pass: a slot for its adapter, and blocks that a tier loads."""

from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass

from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.kv_transfer.connector import AsyncKVConnector
from quire_engine.core.lora import LoRARequest, LoRAStats
from quire_engine.core.request import Sequence
from quire_engine.core.request_queue import WaitingQueue


class LoRAGate:
    """The ``AdmissionGate`` of adapters: admitted sequences use at most ``max_loras`` adapters. Preempted sequences
    count too, because they resume before anything else is admitted.

    Sequences of further adapters are held, and those after them go first. To prevent starvation, at most
    ``max_overtakes`` sequences with an adapter go first. Then no more are admitted until a passed-over adapter has had
    its turn, or until no sequence waits for one. Held sequences are released when the set of admitted adapters changes.

    ``active`` are the adapters of admitted sequences. It may still contain some whose sequences have ended.
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
        """Returns all held sequences if the set of admitted adapters has changed. O(running)."""
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
        """Whether the sequence's adapter is already admitted, or there is room for one more."""
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
        """Adds the sequence's adapter to the active ones, or counts that passed-over adapters were overtaken once
        more.
        """
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
        """Returns statistics of the adapters of waiting, running and preempted sequences. O(running)."""
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
    """The ``AdmissionGate`` of an asynchronous tier. Holds a sequence while ``tier`` loads blocks of its prefix, if
    that is faster than computing them at ``rate`` tokens per second. The blocks are looked up once, when the sequence
    could be next; it is admitted with those that could be loaded.

    A held sequence is released when the last of its loading blocks has arrived. A sequence for whose loads there is no
    room is released when there is room. To prevent starvation, at most ``max_overtakes`` others start to load before
    the oldest sequence that lacks room. After that no other load starts until that one has started, or is not needed
    any more.
    """

    def __init__(
        self, tier: AsyncKVConnector, kv_cache_manager: KVCacheManager, rate: float, max_overtakes: int
    ) -> None:
        self._tier = tier
        self._kv_cache_manager = kv_cache_manager
        self._rate = rate
        self._max_overtakes = max_overtakes
        # The blocks that are being loaded for a sequence, by its id, after they were looked up.
        self._awaited: dict[int, list[bytes]] = {}
        # Sequences by id: those held by the block that each waits for, and those that lack room, oldest first. The
        # latter keep their places while they are checked again.
        self._waiting_for: dict[bytes, dict[int, Sequence]] = {}
        self._lacking_room: dict[int, _LackingRoom] = {}
        self._num_overtakes = 0  # by other sequences, of the oldest one that lacks room
        self._has_new_oldest = False

    def release(self) -> Iterable[Sequence]:
        """Returns the sequences whose block has arrived or for which there is room now; all if the tier is off."""
        is_on = self._tier.is_on
        ended = self._tier.take_ended_loads() if is_on else list(self._waiting_for)
        released = [sequence for each in ended for sequence in self._waiting_for.pop(each, {}).values()]
        if ended or self._has_new_oldest or not is_on:
            self._has_new_oldest = False
            for each in self._lacking_room.values():
                # Other sequences may have loaded some of the oldest one's blocks.
                has_room = self._is_reserved_for(each.sequence) or self._tier.has_room_for(each.num_blocks)
                if each.is_held and (has_room or not is_on):
                    each.is_held = False
                    released.append(each.sequence)
                if is_on and self._is_reserved:
                    break
        return released

    def admits(self, sequence: Sequence) -> bool:
        """Whether none of the sequence's blocks is being loaded. The first call for a sequence starts its loads."""
        if sequence.group.needs_prompt_logprobs:
            return True
        awaited = self._awaited.get(sequence.id)
        if awaited is None:
            awaited, num_lacking = self._kv_cache_manager.begin_load(
                self._tier,
                sequence.block_table,
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
        """Forgets the blocks that were loaded for the sequence."""
        self._awaited.pop(sequence.id, None)

    def on_abort(self, sequence: Sequence) -> None:
        """Forgets the sequence. Blocks that are being loaded still arrive in the host pool."""
        self._forget_lack(sequence)
        awaited = self._awaited.pop(sequence.id, None)
        if awaited:
            waiting = self._waiting_for.get(awaited[-1], {})
            waiting.pop(sequence.id, None)
            if not waiting:
                self._waiting_for.pop(awaited[-1], None)

    @property
    def _is_reserved(self) -> bool:
        """Whether only the oldest sequence that lacks room may start to load."""
        return bool(self._lacking_room) and self._num_overtakes >= self._max_overtakes

    def _is_reserved_for(self, sequence: Sequence) -> bool:
        return self._is_reserved and self._is_oldest(sequence)

    def _is_oldest(self, sequence: Sequence) -> bool:
        return next(iter(self._lacking_room), None) == sequence.id

    def _forget_lack(self, sequence: Sequence) -> None:
        """Removes a sequence from those that lack room. If it was the oldest, the next one becomes the oldest."""
        if self._is_oldest(sequence):
            self._num_overtakes, self._has_new_oldest = 0, True
        self._lacking_room.pop(sequence.id, None)


@dataclass(slots=True)
class _LackingRoom:
    """A sequence whose load of ``num_blocks`` blocks lacks room. It is held until it is to be checked again."""

    sequence: Sequence
    num_blocks: int
    is_held: bool = True
