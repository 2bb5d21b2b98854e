"""``Pooler``: makes embeddings and scores of hidden states, where prompts are pooled instead of continued."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from quire_proto.pooling import PoolingParams, Task
from torch.nn.functional import normalize

from quire_engine.core.pooling import PoolerConfig, PoolingType
from quire_engine.core.step import ModelOutput, ScheduledChunk
from quire_engine.device.accelerator import HostCopy, upload
from quire_engine.models.loader import Classifier
from quire_engine.sampling.sampler import non_finite_error
from quire_engine.worker.input_batch import PooledChunk


class Pooler:
    """Pools hidden states as ``config`` says, in float32. ``classifier`` is there if its task is to classify.

    Of a prompt that takes several chunks it keeps what the mean or the first token needs, until the sequence has
    finished: the sum of each chunk's hidden states by the chunk's start, so that a chunk which is computed again counts
    once. A prompt that begins anew, as it was preempted, forgets them.
    """

    def __init__(self, config: PoolerConfig, classifier: Classifier | None) -> None:
        self._config = config
        self._classifier = classifier
        self._sums: dict[int, dict[int, torch.Tensor]] = {}

    def pool(self, hidden: torch.Tensor, chunks: Sequence[PooledChunk]) -> "PoolerOutput":
        """Takes in the hidden states [T, hidden] of ``chunks``, and pools the prompts that end there."""
        last = [each for each in chunks if each.chunk.is_last]
        if self._config.pooling_type is PoolingType.LAST:
            rows = torch.tensor([each.rows.stop - 1 for each in last], dtype=torch.int64)
            states = hidden.index_select(0, upload(rows, hidden.device)).float()
        else:
            vectors = [vector for each in chunks if (vector := self._add(hidden, each)) is not None]
            states = torch.stack(vectors) if vectors else hidden[:0].float()
        return PoolerOutput(list(self._finish(states, [each.chunk for each in last])))

    def remove_finished(self, sequence_ids: Sequence[int]) -> None:
        """Drops what is kept for sequences that have finished; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            self._sums.pop(sequence_id, None)

    def _add(self, hidden: torch.Tensor, each: PooledChunk) -> torch.Tensor | None:
        """The pooled hidden state [hidden] of a prompt that ends with this chunk; None for one that goes on."""
        chunk, own = each.chunk, hidden[each.rows].float()
        is_mean = self._config.pooling_type is PoolingType.MEAN
        if chunk.start == 0:
            self._sums.pop(chunk.sequence_id, None)
        if is_mean or chunk.start == 0:
            # Of a view, the clone: hidden states hold until the next step.
            part = own.sum(0) if is_mean else own[0].clone()
            if chunk.start == 0 and chunk.is_last:
                return part / chunk.end if is_mean else part
            self._sums.setdefault(chunk.sequence_id, {})[chunk.start] = part
        if not chunk.is_last:
            return None
        total = torch.stack(list(self._sums[chunk.sequence_id].values())).sum(0)
        return total / chunk.end if is_mean else total

    def _finish(self, states: torch.Tensor, chunks: Sequence[ScheduledChunk]) -> "Iterator[PooledRows]":
        """What becomes of pooled hidden states [S, hidden], for each run of chunks that ask for the same."""
        first = 0
        for params, group in groupby(chunks, key=_params_of):
            ids = [chunk.sequence_id for chunk in group]
            yield PooledRows(ids, HostCopy(self._activated(states[first : first + len(ids)], params)))
            first += len(ids)

    def _activated(self, states: torch.Tensor, params: PoolingParams) -> list[torch.Tensor]:
        """The numbers [S, size] float32, and whether all of a row are finite, [S] bool."""
        activates = self._config.use_activation if params.use_activation is None else params.use_activation
        if params.task is Task.EMBED:
            values = states[:, : params.dimensions]
            values = normalize(values, dim=1) if activates else values
        else:
            assert self._classifier is not None, "a model that classifies has a layer for it"
            values = self._classifier(states)
            if activates:
                values = values.sigmoid() if values.shape[1] == 1 else values.softmax(1)
        return [values, values.isfinite().all(1)]


def _params_of(chunk: ScheduledChunk) -> PoolingParams:
    assert chunk.pooling is not None, "the chunk of a prompt that is pooled"
    return chunk.pooling


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The numbers of some sequences, on their way to the host."""

    sequence_ids: Sequence[int]
    copy: HostCopy


class PoolerOutput:
    """What a step has pooled."""

    def __init__(self, rows: Sequence[PooledRows]) -> None:
        self._rows = rows

    def fetch_into(self, model_output: ModelOutput) -> None:
        """Waits until the numbers are there, and writes those of each sequence into ``model_output``, or an error."""
        for rows in self._rows:
            values, finite = rows.copy.wait()
            host = values.numpy().astype("<f4", copy=False)
            for index, (sequence_id, is_finite) in enumerate(zip(rows.sequence_ids, finite.tolist(), strict=True)):
                if is_finite:
                    model_output.pooled[sequence_id] = host[index].tobytes()
                else:
                    model_output.errors[sequence_id] = non_finite_error()
