"""Executes the core's scheduler outputs on blocks of embeddings: the ``Executor`` protocol without tokens or attention.

A chunk's tokens all are the number of its job, whose plan says what each position is. What the core calls drawing a
token is reading the job's rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from quire_engine.core.block_pool import BlockCopies, BlockCopy, KVCacheConfig
from quire_engine.core.executor import UNMEASURED
from quire_engine.core.kv_transfer.transfer import TransferResult
from quire_engine.core.step import ModelOutput, ScheduledChunk, SchedulerOutput
from quire_proto.errors import ErrorCode, QuireError

from examples.graph_embeddings.graph import Ints
from examples.graph_embeddings.model import GraphSage, index_tensor, mean_of_rows
from examples.graph_embeddings.plan import Plan

STALE = "stale"
"""The reason of the error of a job whose sources were given up before it had them: it is planned anew."""


@dataclass(slots=True)
class Job:
    """A part of a query on its way through the scheduler. ``result`` are the rows of its readout, once they are read:
    [nodes, width].
    """

    plan: Plan
    result: torch.Tensor | None = None


@dataclass(slots=True)
class RowCounts:
    """Rows of embeddings that were made, since the start: computed by the model, or copied from a block that a change
    has left behind.
    """

    computed: int = 0
    copied: int = 0


@dataclass(slots=True)
class _Rows:
    """The rows of one layer that a step computes, of all its chunks: row numbers in the pool to write, and the rows to
    compute them from. For layer 1 these are features, of different graphs; for the others again row numbers.
    """

    written: list[Ints] = field(default_factory=list)
    own: list[Ints] = field(default_factory=list)
    sources: list[Ints] = field(default_factory=list)
    offsets: list[Ints] = field(default_factory=list)
    num_sources: int = 0
    features: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class EmbeddingExecutor:
    """Owns the memory: ``device_rows`` and ``host_rows`` are [blocks * block_size, width], a block's rows one after the
    other. ``jobs`` are those that the scheduler knows, by number.
    """

    depth = 1
    rates = UNMEASURED  # they decide how to preempt, and a query that was admitted has all its blocks: none is

    def __init__(
        self, model: GraphSage, config: KVCacheConfig, jobs: Mapping[int, Job], *, device: str = "cpu"
    ) -> None:
        self.kv_cache_config = config
        self.counts = RowCounts()
        self._model = model.to(device)
        self._jobs = jobs
        self._size = config.block_size
        self._job_numbers: dict[int, int] = {}  # by row
        self._tables: dict[int, list[int]] = {}
        is_pinned = device.startswith("cuda")
        self.device_rows = torch.zeros(config.device_blocks * self._size, model.width, device=device)
        self.host_rows = torch.zeros(config.host_blocks * self._size, model.width, pin_memory=is_pinned)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Copies blocks, makes the rows of all chunks layer by layer, and reads what jobs asked for."""
        model_output, begun = ModelOutput(), perf_counter()
        self._take_rows(scheduler_output)
        self._copy_blocks(scheduler_output.copies)
        copied = perf_counter()
        chunks = enumerate(scheduler_output.chunks)
        live = [chunk for number, chunk in chunks if self._has_its_sources(number, chunk, model_output)]
        tables = [np.array(self._tables[chunk.row], np.int64) for chunk in live]
        self._copy_rows(live, tables)
        for layer in range(1, self._model.num_layers + 1):
            self._compute(layer, live, tables)
        computed = perf_counter()
        for chunk, table in zip(live, tables, strict=True):
            if chunk.num_draws:
                job = self._job(chunk)
                rows = index_tensor(self._rows_at(job.plan.readout, table), self.device_rows)
                job.result = self.device_rows[rows].cpu()
        model_output.token_ids = [self._job_numbers[chunk.row] for chunk in scheduler_output.chunks if chunk.num_draws]
        timings = model_output.timings
        timings.swap, timings.forward, timings.sample = copied - begun, computed - copied, perf_counter() - computed
        return model_output

    def take_transfers(self, timeout: float) -> Sequence[TransferResult]:
        """There is no disk."""
        del timeout
        return ()

    def remove_lora(self, lora_id: int) -> None:
        """There are no adapters."""
        del lora_id

    def close(self) -> None:
        """Gives the memory back."""
        self.device_rows, self.host_rows = self.device_rows[:0].clone(), self.host_rows[:0].clone()

    # Blocks

    def _copy_blocks(self, copies: BlockCopies) -> None:
        self._copy(self.device_rows, self.host_rows, copies.blocks_to_swap_out)
        self._copy(self.device_rows, self.device_rows, copies.blocks_to_copy)
        self._copy(self.host_rows, self.device_rows, copies.blocks_to_swap_in)
        self._copy(self.device_rows, self.host_rows, copies.blocks_to_swap_ahead)

    def _copy(self, sources: torch.Tensor, targets: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
        """One after the other: a block may be the target of two."""
        for copy in copies:
            source, target = copy.source * self._size, copy.target * self._size
            targets[target : target + self._size] = sources[source : source + self._size]

    # Rows

    def _take_rows(self, scheduler_output: SchedulerOutput) -> None:
        """Takes in which job has which row, and its block table."""
        for new in scheduler_output.new:
            self._job_numbers[new.row] = new.token_ids[0]
            self._tables[new.row] = new.block_ids[0].tolist()
        for changes in scheduler_output.new_blocks:
            for row, index, block_id in zip(changes[::3], changes[1::3], changes[2::3], strict=True):
                self._tables[row][index : index + 1] = [block_id]

    def _job(self, chunk: ScheduledChunk) -> Job:
        return self._jobs[self._job_numbers[chunk.row]]

    def _has_its_sources(self, number: int, chunk: ScheduledChunk, model_output: ModelOutput) -> bool:
        """Whether the core found all sources of the plan when it admitted the job. If not, the job ends with an error:
        its plan cannot make what is missing.
        """
        if chunk.start >= self._job(chunk).plan.first_target:
            return True
        message = "Blocks that this query was to read were given up before it ran."
        model_output.errors[number] = QuireError(ErrorCode.UNAVAILABLE, message, reason=STALE)
        return False

    def _rows_at(self, slots: Ints, table: Ints) -> Ints:
        """The rows of the pool that slots of a block table are."""
        return table[slots // self._size] * self._size + slots % self._size

    def _copy_rows(self, chunks: Sequence[ScheduledChunk], tables: Sequence[Ints]) -> None:
        """Copies the rows that a change has left as they were. They are copied from sources, which no chunk writes."""
        read, written = list[Ints](), list[Ints]()
        for chunk, table in zip(chunks, tables, strict=True):
            plan = self._job(chunk).plan
            begin, end = _targets_within(chunk, plan)
            copies = plan.copies[begin:end]
            at = np.flatnonzero(copies >= 0)
            read.append(self._rows_at(copies[at], table))
            written.append(self._rows_at(plan.first_target + begin + at, table))
        if sum(map(len, read)):
            rows = self.device_rows[index_tensor(np.concatenate(read), self.device_rows)]
            self._write(written, rows)
            self.counts.copied += len(rows)

    def _compute(self, layer: int, chunks: Sequence[ScheduledChunk], tables: Sequence[Ints]) -> None:
        """Computes what the chunks have of a layer, with one product for all of them."""
        rows = _Rows()
        for chunk, table in zip(chunks, tables, strict=True):
            self._add_rows(rows, layer, chunk, table)
        if not rows.written:
            return
        if layer == 1:
            own, means = (torch.cat(parts) for parts in zip(*rows.features, strict=True))
        else:
            own = self.device_rows[index_tensor(np.concatenate(rows.own), self.device_rows)]
            means = mean_of_rows(self.device_rows, np.concatenate(rows.sources), np.concatenate(rows.offsets))
        self._write(rows.written, self._model.apply(layer, own, means))
        self.counts.computed += len(own)

    def _add_rows(self, rows: _Rows, layer: int, chunk: ScheduledChunk, table: Ints) -> None:
        plan = self._job(chunk).plan
        begin, end = _targets_within(chunk, plan)
        begin, end = max(begin, plan.layer_ends[layer - 1]), min(end, plan.layer_ends[layer])
        at = begin + np.flatnonzero(plan.nodes[begin:end] >= 0)
        if not len(at):
            return
        nodes, graph = plan.nodes[at], plan.version.graph
        sources, offsets = graph.sources_of(nodes)
        rows.written.append(self._rows_at(plan.first_target + at, table))
        if layer == 1:
            own = graph.features[index_tensor(nodes, graph.features)]
            means = mean_of_rows(graph.features, sources, offsets)
            rows.features.append((own.to(self.device_rows.device), means.to(self.device_rows.device)))
        else:
            rows.own.append(self._rows_at(plan.slots(layer - 1, nodes), table))
            rows.sources.append(self._rows_at(plan.slots(layer - 1, sources), table))
            rows.offsets.append(offsets + rows.num_sources)
            rows.num_sources += len(sources)

    def _write(self, written: Sequence[Ints], rows: torch.Tensor) -> None:
        self.device_rows[index_tensor(np.concatenate(written), rows)] = rows


def _targets_within(chunk: ScheduledChunk, plan: Plan) -> tuple[int, int]:
    """The part of a plan's targets that a chunk has."""
    return chunk.start - plan.first_target, min(chunk.end - plan.first_target, plan.layer_ends[-1])
