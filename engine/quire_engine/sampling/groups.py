"""The draws of a step, grouped by how they are made."""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from quire_engine.device.transfers import upload_arrays
from quire_engine.sampling.cells import TokenArray
from quire_engine.sampling.rows import SamplingMetadata
from quire_engine.sampling.state import SequenceSamplingState


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Draws that are made alike: the state of each one's sequence, its index among the step's draws, and its row of the
    logits.
    """

    states: list[SequenceSamplingState] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.states)

    def add(self, state: SequenceSamplingState, index: int, row: int) -> None:
        """Adds one draw."""
        self.states.append(state)
        self.indices.append(index)
        self.rows.append(row)

    def without(self, sequence_ids: Container[int]) -> "DrawGroup":
        """The draws of all other sequences."""
        group = DrawGroup()
        for state, index, row in zip(self.states, self.indices, self.rows, strict=True):
            if state.sequence_id not in sequence_ids:
                group.add(state, index, row)
        return group

    def select(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of each draw, [D, V]; ``logits`` itself, not copied, if they are all of its rows in order."""
        return select_rows(logits, self.rows)

    def select_copy(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of the logits of each draw, float32 [D, V]."""
        taken = self.select(logits)
        return taken.to(torch.float32, copy=taken is logits)

    def sampling_metadata(self) -> SamplingMetadata:
        """The sampling parameters of each draw."""
        draws = [state.draw for state in self.states]
        seeds, positions = [draw.seed for draw in draws], [len(draw.token_ids) for draw in draws]
        return SamplingMetadata.from_params([draw.params for draw in draws], seeds, positions)


@dataclass(frozen=True, slots=True)
class DrawGroups:
    """The draws of a step. Those of ``with_logprobs`` are in one of the other groups too."""

    greedy: DrawGroup = field(default_factory=DrawGroup)
    random: DrawGroup = field(default_factory=DrawGroup)
    processed: DrawGroup = field(default_factory=DrawGroup)
    beams: DrawGroup = field(default_factory=DrawGroup)
    with_logprobs: DrawGroup = field(default_factory=DrawGroup)

    def add(self, state: SequenceSamplingState, index: int, row: int) -> None:
        """Adds one draw."""
        self._group_of(state).add(state, index, row)
        if state.wants_logprobs and not state.is_beam:
            self.with_logprobs.add(state, index, row)

    def without(self, failed: Collection[int]) -> "DrawGroups":
        """The groups without the sequences ``failed``, whose grammars have failed."""
        if not failed:
            return self
        return replace(self, processed=self.processed.without(failed), beams=self.beams.without(failed))

    def _group_of(self, state: SequenceSamplingState) -> DrawGroup:
        if state.is_beam:
            return self.beams
        if state.needs_processors:
            return self.processed
        return self.greedy if state.greedy else self.random


def select_rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """``rows`` of ``values`` [R, ...]; ``values`` itself, not copied, if they are all of its rows in order."""
    if len(rows) == len(values) and all(row == index for index, row in enumerate(rows)):
        return values
    return values.index_select(0, upload_arrays((index_array(rows),), values.device)[0])


def index_array(indices: Sequence[int]) -> TokenArray:
    """Indices as int64, to be uploaded."""
    return np.array(indices, dtype=np.int64)
