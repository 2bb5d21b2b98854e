"""``Pooler``: makes embeddings and scores of hidden states, where prompts are pooled instead of continued."""

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
    """Pools hidden states as ``config`` says, in float32. ``classifier`` is there if its task is to classify.

    Of a prompt that takes several chunks it keeps what the mean or the first token needs, until its row is freed: the
    sum of each chunk's hidden states by the chunk's start, so that a chunk which is computed again counts once. A
    prompt that begins anew forgets them.
    """

    def __init__(self, config: PoolerConfig, classifier: Classifier | None) -> None:
        self._config = config
        self._classifier = classifier
        self._sums: dict[int, dict[int, torch.Tensor]] = {}

    def pool(self, hidden: torch.Tensor, chunks: Sequence[PooledChunk]) -> "PoolerOutput":
        """Takes in the hidden states [T, hidden] of ``chunks``, and pools the prompts that end there."""
        last = [each for each in chunks if each.draw is not None]
        if self._config.pooling_type is PoolingType.LAST:
            rows = torch.tensor([each.rows.stop - 1 for each in last], dtype=torch.int64)
            states = hidden.index_select(0, upload(rows, hidden.device)).float()
        else:
            vectors = [vector for each in chunks if (vector := self._add(hidden, each)) is not None]
            states = torch.stack(vectors) if vectors else hidden[:0].float()
        return PoolerOutput(list(self._finish(states, last)))

    def remove(self, rows: Iterable[int]) -> None:
        """Drops what is kept for rows that are freed."""
        for row in rows:
            self._sums.pop(row, None)

    def _add(self, hidden: torch.Tensor, chunk: PooledChunk) -> torch.Tensor | None:
        """The pooled hidden state [hidden] of a prompt that ends with this chunk; None for one that goes on."""
        own, is_last = hidden[chunk.rows].float(), chunk.draw is not None
        is_mean = self._config.pooling_type is PoolingType.MEAN
        if chunk.start == 0:
            self._sums.pop(chunk.row, None)
        if is_mean or chunk.start == 0:
            # Of a view, the clone: hidden states hold until the next step.
            part = own.sum(0) if is_mean else own[0].clone()
            if chunk.start == 0 and is_last:
                return part / chunk.end if is_mean else part
            self._sums.setdefault(chunk.row, {})[chunk.start] = part
        if not is_last:
            return None
        total = torch.stack(list(self._sums[chunk.row].values())).sum(0)
        return total / chunk.end if is_mean else total

    def _finish(self, states: torch.Tensor, last: Sequence[PooledChunk]) -> "Iterator[PooledRows]":
        """What becomes of pooled hidden states [S, hidden], for each run of prompts that ask for the same."""
        first = 0
        for params, group in groupby(last, key=_params_of):
            draws = [each.draw for each in group if each.draw is not None]
            yield PooledRows(draws, HostCopy(self._activated(states[first : first + len(draws)], params)))
            first += len(draws)

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


def _params_of(chunk: PooledChunk) -> PoolingParams:
    return chunk.params


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The numbers of some draws, on their way to the host."""

    draws: Sequence[int]
    copy: HostCopy


class PoolerOutput:
    """What a step has pooled."""

    def __init__(self, rows: Sequence[PooledRows]) -> None:
        self._rows = rows

    def fetch_into(self, model_output: ModelOutput) -> None:
        """Waits until the numbers are there, and writes those of each draw into ``model_output``, or an error."""
        for rows in self._rows:
            values, finite = rows.copy.wait()
            host = values.numpy().astype("<f4", copy=False)
            for index, (draw, is_finite) in enumerate(zip(rows.draws, finite.tolist(), strict=True)):
                if is_finite:
                    model_output.pooled[draw] = host[index].tobytes()
                else:
                    model_output.draw_errors[draw] = non_finite_error()
