"""``Pooler``: turns hidden states into embeddings and scores, for models that pool prompts instead of continuing
them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from quire_proto.pooling import PoolingParams, Task
from torch.nn.functional import normalize

from quire_engine.core.pooling import PoolerConfig, PoolingType
from quire_engine.core.step import ModelOutput
from quire_engine.device.accelerator import HostCopy, upload
from quire_engine.models.base import Classifier
from quire_engine.sampling.sampler import non_finite_error
from quire_engine.worker.input_batch import PooledChunk


class Pooler:
    """Pools hidden states in float32, as ``config`` says. ``classifier`` is set if the task is to classify.

    For a prompt of several chunks it keeps what the mean or the first token needs, until the row is freed. It stores
    the sum of each chunk's hidden states by the chunk's start, so that a recomputed chunk counts once. A prompt that
    starts again at 0 drops its sums.
    """

    def __init__(self, config: PoolerConfig, classifier: Classifier | None) -> None:
        self._config = config
        self._classifier = classifier
        self._sums: dict[int, dict[int, torch.Tensor]] = {}

    def pool(self, hidden: torch.Tensor, chunks: Sequence[PooledChunk]) -> "PoolerOutput":
        """Takes the hidden states [T, hidden] of ``chunks``, and pools the prompts that end there."""
        last = [each for each in chunks if each.draw is not None]
        if self._config.pooling_type is PoolingType.LAST:
            rows = torch.tensor([each.rows.stop - 1 for each in last], dtype=torch.int64)
            states = hidden.index_select(0, upload(rows, hidden.device)).float()
        else:
            vectors = [vector for each in chunks if (vector := self._add(hidden, each)) is not None]
            states = torch.stack(vectors) if vectors else hidden[:0].float()
        return PoolerOutput(list(self._finish(states, last)))

    def remove(self, rows: Iterable[int]) -> None:
        """Drops the state of freed rows."""
        for row in rows:
            self._sums.pop(row, None)

    def _add(self, hidden: torch.Tensor, chunk: PooledChunk) -> torch.Tensor | None:
        """Adds a chunk. Returns the pooled hidden state [hidden] if the prompt ends with this chunk, else None."""
        own, is_last = hidden[chunk.rows].float(), chunk.draw is not None
        is_mean = self._config.pooling_type is PoolingType.MEAN
        if chunk.start == 0:
            self._sums.pop(chunk.row, None)
        if is_mean or chunk.start == 0:
            # Cloned because ``own`` may be a view of hidden states, which are valid only until the next step.
            part = own.sum(0) if is_mean else own[0].clone()
            if chunk.start == 0 and is_last:
                return part / chunk.end if is_mean else part
            self._sums.setdefault(chunk.row, {})[chunk.start] = part
        if not is_last:
            return None
        total = torch.stack(list(self._sums[chunk.row].values())).sum(0)
        return total / chunk.end if is_mean else total

    def _finish(self, states: torch.Tensor, last: Sequence[PooledChunk]) -> "Iterator[PooledRows]":
        """Yields the results of pooled hidden states [S, hidden], one for each run of prompts with the same
        parameters.
        """
        first = 0
        for params, group in groupby(last, key=_params_of):
            draws = [each.draw for each in group if each.draw is not None]
            yield PooledRows(draws, HostCopy(self._activated(states[first : first + len(draws)], params)))
            first += len(draws)

    def _activated(self, states: torch.Tensor, params: PoolingParams) -> list[torch.Tensor]:
        """Returns the results [S, size] float32, and for each row whether all of them are finite, [S] bool."""
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


def _params_of(chunk: PooledChunk) -> PoolingParams:
    return chunk.params


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The results of some draws, on their way to the host."""

    draws: Sequence[int]
    copy: HostCopy


class PoolerOutput:
    """The pooled results of a step."""

    def __init__(self, rows: Sequence[PooledRows]) -> None:
        self._rows = rows

    def fetch_into(self, model_output: ModelOutput) -> None:
        """Waits for the results, and writes the result of each draw, or an error, into ``model_output``."""
        for rows in self._rows:
            values, finite = rows.copy.wait()
            host = values.numpy().astype("<f4", copy=False)
            for index, (draw, is_finite) in enumerate(zip(rows.draws, finite.tolist(), strict=True)):
                if is_finite:
                    model_output.pooled[draw] = host[index].tobytes()
                else:
                    model_output.draw_errors[draw] = non_finite_error()
