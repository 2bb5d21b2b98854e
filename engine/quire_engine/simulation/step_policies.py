"""How engines batched before continuous batching: step policies to compare it with."""

from collections.abc import Mapping
from typing import Literal

from quire_engine.core.batch_scheduler import BatchScheduler, StepPolicy, continuous_batching
from quire_engine.core.request import Sequence
from quire_engine.core.step import SchedulerOutput
from quire_engine.core.step_time_model import StepBudget

Batching = Literal["continuous", "static", "phased"]


def static_batching(batch: BatchScheduler, scheduler_output: SchedulerOutput, budget: StepBudget) -> None:
    """Makes a batch of all waiting sequences that fit, and admits nothing until its last sequence has ended. From its
    first step on, the batch has memory for all its prompts, however many steps they take; not if layers have windows.
    """
    batch.schedule_running(batch.running_of_step(), scheduler_output, budget)
    batch.schedule_preempted(scheduler_output, budget)
    if batch.running or not batch.admission.waiting.sequences or batch.next_preempted() is not None:
        return
    memory = batch.kv_cache_manager
    reserves = all(group.window is None for group in memory.capacity.groups)
    batch.admission.release_held()
    while batch.admission.waiting.has_ready:
        sequence = batch.admission.waiting.next()
        if not batch.admission.passes_gates(sequence):
            continue
        if not batch.admission.admit(sequence, scheduler_output):
            break
        if reserves:
            memory.allocate_slots(sequence.block_table, sequence.num_scheduled_tokens, sequence.num_tokens)
        batch.schedule_next_chunk(sequence, scheduler_output, budget)


def phased_batching(batch: BatchScheduler, scheduler_output: SchedulerOutput, budget: StepBudget) -> None:
    """Computes only prompts while any fit into memory, otherwise one token of each sequence."""
    prefills = [each for each in batch.running_of_step() if _is_prefill(each)]
    batch.schedule_running(prefills, scheduler_output, budget)
    batch.schedule_preempted(scheduler_output, budget, _is_prefill)
    if batch.admission.waiting.sequences and batch.next_preempted() is None:
        batch.admission.release_held()
        batch.schedule_waiting(scheduler_output, budget)
    if not scheduler_output.rows:
        decodes = [each for each in batch.running_of_step() if _is_decode(each)]
        batch.schedule_running(decodes, scheduler_output, budget)
        batch.schedule_preempted(scheduler_output, budget, _is_decode)


def _is_prefill(sequence: Sequence) -> bool:
    return sequence.num_unscheduled_tokens > 1


def _is_decode(sequence: Sequence) -> bool:
    return not _is_prefill(sequence)


STEP_POLICIES: Mapping[str, StepPolicy] = {
    "continuous": continuous_batching,
    "static": static_batching,
    "phased": phased_batching,
}
