"""LoRA adapters as the core knows them: which one a request is for, and who waits as a step has too many of them."""

from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_engine.core.request import Sequence
    from quire_engine.core.request_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter, as a request names it: ``lora_name``, a number above 0 that is this adapter's alone in the life
    of an engine, and the folder that PEFT has written. ``digest`` is the hash of what the folder holds, which names the
    adapter in the hashes of KV blocks; an engine fills it in when it reads the folder.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path
    digest: bytes = b""


DUMMY_LORA = LoRARequest("dummy", -1, "")
"""An adapter without weights and folder, for the step that memory is measured with, as vLLM's dummy LoRAs are. No
request can have its number.
"""


@dataclass(frozen=True, slots=True)
class LoRAStats:
    """The adapters of an engine's requests at one moment, for metrics. ``running`` names those with sequences that
    run, and ``waiting`` those with sequences that wait or were preempted, in alphabetical order. ``num_used_slots``
    counts the adapters of what is admitted, and ``num_waiting_for_slot`` the sequences that wait for one of the slots,
    all of which are used by other adapters than theirs.
    """

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    num_used_slots: int = 0
    num_waiting_for_slot: int = 0


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
        waiting: "WaitingQueue",
        running: "Iterable[Sequence]",
        preempted: "abc.Sequence[Iterable[Sequence]]",
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

    def release(self) -> "Iterable[Sequence]":
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

    def admits(self, sequence: "Sequence") -> bool:
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

    def on_admission(self, sequence: "Sequence") -> None:
        """Takes note of its adapter, or that those that were passed over are overtaken once more."""
        lora = sequence.request.lora
        if lora is None:
            return
        if lora.lora_int_id not in self.active:
            self.active.add(lora.lora_int_id)
            self._num_overtakes, self._has_new = 0, True
        elif self._passed_over:
            self._num_overtakes += 1

    def on_abort(self, sequence: "Sequence") -> None:
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


def _loras_of(sequences: "Iterable[Sequence]") -> set[LoRARequest]:
    return {lora for sequence in sequences if (lora := sequence.request.lora) is not None}


def _names(loras: Iterable[LoRARequest]) -> tuple[str, ...]:
    return tuple(sorted({lora.lora_name for lora in loras}))
