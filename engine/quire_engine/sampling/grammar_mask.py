"""Masks of what grammars allow, filled on a thread of their own while the model computes. Knows no grammar library.

The matchers belong to that one thread: it makes them, lets them accept what an output got, and has them fill their rows
of the mask, in the order in which steps are started. So a step that failed can be started again.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from quire_proto.errors import QuireError, internal, invalid
from torch.nn import functional as F

from quire_engine.device.transfers import upload_arrays
from quire_engine.grammar import GrammarError, Matcher
from quire_engine.scheduling.plan import SampleRequest

log = logging.getLogger(__name__)

WORD_BITS = 32
Words = npt.NDArray[np.int32]
# For each value of a byte, what its eight bits add to the scores of their tokens: 0 where allowed.
_ADDED = np.array([[0.0 if byte >> bit & 1 else -np.inf for bit in range(8)] for byte in range(256)], np.float32)


class GrammarPlace:
    """One output's place in its grammar, a cache of the output's tokens.

    ``take_new`` belongs to the thread of the steps, which owns the tokens, and ``fill`` to the masks' thread.
    """

    __slots__ = ("_draw", "_error", "_matcher", "_num_taken")

    def __init__(self, draw: SampleRequest) -> None:
        self._draw = draw
        self._num_taken = draw.num_prompt
        self._matcher: Matcher | None = None
        self._error: QuireError | None = None

    @property
    def sequence_id(self) -> int:
        """Whose output it is."""
        return self._draw.sequence_id

    def take_new(self) -> list[int]:
        """The output tokens since the last time, to be handed to ``fill`` exactly once."""
        new = self._draw.token_ids[self._num_taken :]
        self._num_taken += len(new)
        return new

    def fill(self, new: Sequence[int], mask: memoryview) -> QuireError | None:
        """Goes on by ``new`` and fills ``mask``; or says why it cannot, now and whenever it is asked again."""
        if self._error is None:
            self._error = self._try_to_fill(new, mask)
        return self._error

    def _try_to_fill(self, new: Sequence[int], mask: memoryview) -> QuireError | None:
        try:
            if self._matcher is None:
                assert self._draw.grammar is not None
                self._matcher = self._draw.grammar.matcher()
            if new:
                self._matcher.accept(new)
            self._matcher.fill(mask)
        except GrammarError as error:
            return invalid(grammar_param(self._draw), f"The output cannot go on under its grammar: {error}")
        except BaseException:  # a panic inside a native library is no Exception
            log.exception("the grammar of sequence %d failed", self.sequence_id)
            return internal()
        return None


@dataclass(frozen=True, slots=True)
class Masks:
    """What the grammars of a step allow. ``words`` [G, ceil(vocabulary / 32)] int32: bit b of word w is set where token
    32 w + b may come next. ``rows`` says which row is which sequence's, ``errors`` which sequences cannot go on.
    """

    words: Words
    rows: dict[int, int] = field(default_factory=dict)
    errors: dict[int, QuireError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """Masks that are being filled."""

    words: Words
    places: Sequence[GrammarPlace]
    errors: "Future[list[QuireError | None]]"

    def collect(self) -> Masks:
        """Waits for them."""
        ids = [place.sequence_id for place in self.places]
        errors = {id: error for id, error in zip(ids, self.errors.result(), strict=True) if error is not None}
        return Masks(self.words, {id: row for row, id in enumerate(ids)}, errors)


class MaskFiller:
    """The thread that fills masks."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // WORD_BITS)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")

    def start(self, places: Sequence[GrammarPlace]) -> PendingMasks | None:
        """Begins to fill one mask for each place, if there are any."""
        if not places:
            return None
        words = np.zeros((len(places), self._num_words), dtype=np.int32)
        work = [(place, place.take_new(), row.data) for place, row in zip(places, words, strict=True)]
        return PendingMasks(words, places, self._thread.submit(_fill, work))

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


def no_masks() -> Masks:
    """The masks of a step without grammars."""
    return Masks(np.empty((0, 0), dtype=np.int32))


def constrain(scores: torch.Tensor, constrained: Sequence[tuple[int, int]], masks: Masks) -> None:
    """Sets in ``scores`` [R, V] float32, in place, what the grammar forbids to -inf, for each row named with the id of
    its sequence.
    """
    if constrained:
        words = masks.words[[masks.rows[sequence_id] for _, sequence_id in constrained]]
        # Eight tokens are looked up at a time and added: several times faster than filling under an unpacked mask.
        rows = np.array([row for row, _ in constrained], dtype=np.int64)
        octets, places = upload_arrays((words.astype("<i4", copy=False).view(np.uint8), rows), scores.device)
        added = F.embedding(octets.int(), _added(scores.device)).flatten(1)[:, : scores.shape[1]]
        scores.index_add_(0, places, added)


@lru_cache
def _added(device: torch.device) -> torch.Tensor:
    """``_ADDED`` on a device, [256, 8] float32."""
    return upload_arrays((_ADDED,), device)[0]


def grammar_param(draw: SampleRequest) -> str:
    """What REST calls the parameter that asked for the draw's grammar."""
    structured = draw.params.structured
    return "response_format" if structured is None else structured.param


def _fill(work: Sequence[tuple[GrammarPlace, list[int], memoryview]]) -> list[QuireError | None]:
    return [place.fill(new, mask) for place, new, mask in work]
