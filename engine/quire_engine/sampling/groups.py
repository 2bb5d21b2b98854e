"""The draws of a step, sorted by how they are made. Knows rows of logits by their number, never a device's numbers."""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from quire_engine.device.transfers import upload_arrays
from quire_engine.sampling.cells import TokenArray
from quire_engine.sampling.rows import SamplingRows
from quire_engine.sampling.state import SequenceState


@dataclass(frozen=True, slots=True)
class Group:
    """Draws that are made alike: the place of each among the step's draws, and the row of the logits that it is made
    from.
    """

    states: list[SequenceState] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.states)

    def add(self, state: SequenceState, place: int, row: int) -> None:
        """Takes in one draw."""
        self.states.append(state)
        self.places.append(place)
        self.rows.append(row)

    def without(self, sequence_ids: Container[int]) -> "Group":
        """The draws of all other sequences."""
        group = Group()
        for state, place, row in zip(self.states, self.places, self.rows, strict=True):
            if state.sequence_id not in sequence_ids:
                group.add(state, place, row)
        return group

    def take(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of each draw, [D, V]; without a copy where they are all of ``logits`` in their order."""
        return take(logits, self.rows)

    def copy(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of each draw as float32 [D, V], which may be changed."""
        taken = self.take(logits)
        return taken.to(torch.float32, copy=taken is logits)

    def columns(self) -> SamplingRows:
        """The parameters of each draw."""
        draws = [state.draw for state in self.states]
        seeds, positions = [draw.seed for draw in draws], [len(draw.token_ids) for draw in draws]
        return SamplingRows.of([draw.params for draw in draws], seeds, positions)


@dataclass(frozen=True, slots=True)
class Groups:
    """The draws of a step. Those of ``told``, which ask for log-probabilities, are in one of the others too."""

    greedy: Group = field(default_factory=Group)
    random: Group = field(default_factory=Group)
    processed: Group = field(default_factory=Group)
    beams: Group = field(default_factory=Group)
    told: Group = field(default_factory=Group)

    def add(self, state: SequenceState, place: int, row: int) -> None:
        """Takes in one draw."""
        self._of(state).add(state, place, row)
        if state.wants_logprobs and not state.is_beam:
            self.told.add(state, place, row)

    def without(self, failed: Collection[int]) -> "Groups":
        """The draws that are still to be made where grammars have failed."""
        if not failed:
            return self
        return replace(self, processed=self.processed.without(failed), beams=self.beams.without(failed))

    def _of(self, state: SequenceState) -> Group:
        if state.is_beam:
            return self.beams
        if state.is_processed:
            return self.processed
        return self.greedy if state.greedy else self.random


def take(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The rows of ``values`` [R, ...] that are named; without a copy where they are all of them in their order."""
    if len(rows) == len(values) and all(row == place for place, row in enumerate(rows)):
        return values
    return values.index_select(0, upload_arrays((index_array(rows),), values.device)[0])


def index_array(places: Sequence[int]) -> TokenArray:
    """Numbers of rows, as what is sent to a device."""
    return np.array(places, dtype=np.int64)
