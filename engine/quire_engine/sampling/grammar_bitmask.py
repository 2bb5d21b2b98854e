"""Bitmasks of the tokens that grammars allow, filled on a separate thread while the model computes.

The matchers belong to that thread. It creates them, has them accept an output's new tokens, and fills their rows of the
bitmask, in the order in which steps are started. So a failed step can be started again.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from quire_proto.errors import QuireError, internal, invalid
from torch.nn import functional as F

from quire_engine.core.step import GrammarError, GrammarMatcher, SampleRequest
from quire_engine.device.accelerator import upload_arrays
from quire_engine.sampling.metadata import KnownTokens

log = logging.getLogger(__name__)

WORD_BITS = 32
Words = npt.NDArray[np.int32]
# For each byte, what its eight bits add to the scores of their tokens: 0 if allowed, -inf if not.
_BYTE_BIASES = np.array([[0.0 if byte >> bit & 1 else -np.inf for bit in range(8)] for byte in range(256)], np.float32)


class GrammarState:
    """An output's position in its grammar. A cache that can be rebuilt from the output's tokens.

    ``take_new_tokens`` runs on the thread of the steps, which owns the tokens, and ``fill`` on the filler's thread.
    """

    __slots__ = ("_error", "_matcher", "_num_tokens_taken", "_sample_request")

    def __init__(self, sample_request: SampleRequest) -> None:
        self._sample_request = sample_request
        self._num_tokens_taken = sample_request.num_prompt_tokens
        self._matcher: GrammarMatcher | None = None
        self._error: QuireError | None = None

    def take_new_tokens(self, known: KnownTokens) -> list[int]:
        """Returns the output tokens in ``known`` that are new since the last call. Pass them to ``fill`` exactly
        once.
        """
        new: list[int] = known[self._num_tokens_taken :].tolist()
        self._num_tokens_taken += len(new)
        return new

    def fill(self, new: Sequence[int], mask: memoryview) -> QuireError | None:
        """Accepts the tokens ``new`` and fills ``mask``. Returns the error if this or an earlier call failed."""
        if self._error is None:
            self._error = self._try_to_fill(new, mask)
        return self._error

    def fill_after(self, draft_token_ids: Sequence[int], mask: memoryview) -> QuireError | None:
        """Fills ``mask`` for the token after the drafts. Call it after ``fill`` for the token before them. Returns the
        error if this call or that one failed. A failure here is not an error of the output, because the drafts may be
        wrong.
        """
        if self._error is not None:
            return self._error
        return self._guarded(lambda matcher: matcher.fill_bitmask_after(draft_token_ids, mask))

    def _try_to_fill(self, new: Sequence[int], mask: memoryview) -> QuireError | None:
        def fill(matcher: GrammarMatcher) -> None:
            if new:
                matcher.accept_tokens(new)
            matcher.fill_bitmask(mask)

        return self._guarded(fill)

    def _guarded(self, work: Callable[[GrammarMatcher], None]) -> QuireError | None:
        """Does ``work`` with the matcher. Returns what it raises as an error of the output."""
        try:
            if self._matcher is None:
                assert self._sample_request.grammar is not None
                self._matcher = self._sample_request.grammar.new_matcher()
            work(self._matcher)
        except GrammarError as error:
            return invalid(grammar_param(self._sample_request), f"The output cannot go on under its grammar: {error}")
        except BaseException:  # a panic in a native library is not an ``Exception``
            log.exception("a grammar failed")
            return internal()
        return None


class DraftGrammarState:
    """The ``GrammarState`` after drafts, for one step. It is made from the output's own state, which must be filled
    first.
    """

    __slots__ = ("_num_drafts", "_state")

    def __init__(self, state: GrammarState, num_drafts: int) -> None:
        self._state, self._num_drafts = state, num_drafts

    def take_new_tokens(self, known: KnownTokens) -> list[int]:
        """Returns the drafts."""
        drafts: list[int] = known[len(known) - self._num_drafts :].tolist()
        return drafts

    def fill(self, new: Sequence[int], mask: memoryview) -> QuireError | None:
        """Fills ``mask`` as if the output had the drafts ``new``. Returns the error if that failed."""
        return self._state.fill_after(new, mask)


AnyGrammarState = GrammarState | DraftGrammarState


@dataclass(frozen=True, slots=True)
class GrammarBitmask:
    """The tokens that the grammars of a step allow. ``words`` [G, ceil(vocabulary / 32)] int32: bit b of word w is set
    if token 32 w + b may come next. ``rows`` maps draw numbers to rows. ``errors`` maps the draws of outputs that
    cannot continue to the reason.
    """

    words: Words
    rows: dict[int, int] = field(default_factory=dict)
    errors: dict[int, QuireError] = field(default_factory=dict)


NO_GRAMMARS = GrammarBitmask(np.empty((0, 0), dtype=np.int32))
"""The bitmask of a step without grammars."""


@dataclass(frozen=True, slots=True)
class PendingBitmask:
    """A bitmask that is being filled."""

    words: Words
    numbers: Sequence[int]
    errors: "Future[list[QuireError | None]]"

    def wait(self) -> GrammarBitmask:
        """Returns the bitmask once it is filled."""
        found = zip(self.numbers, self.errors.result(), strict=True)
        errors = {number: error for number, error in found if error is not None}
        return GrammarBitmask(self.words, {number: row for row, number in enumerate(self.numbers)}, errors)


class AnyPendingBitmask(Protocol):
    """A bitmask that is not complete yet."""

    def wait(self) -> GrammarBitmask:
        """Returns the bitmask once it is filled."""
        ...


class AnyBitmaskFiller(Protocol):
    """Fills bitmasks."""

    def start(self, draws: Sequence[tuple[int, AnyGrammarState, KnownTokens]]) -> AnyPendingBitmask:
        """Starts to fill one row for each draw, given as its number, its output's state and the tokens before it."""
        ...

    def close(self) -> None:
        """Stops the filler. It fills nothing afterwards."""
        ...


class BitmaskFiller:
    """Fills bitmasks on its own thread."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // WORD_BITS)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")

    def start(self, draws: Sequence[tuple[int, AnyGrammarState, KnownTokens]]) -> PendingBitmask:
        """Starts to fill one row for each draw, given as its number, its output's state and the tokens before it."""
        words = np.zeros((len(draws), self._num_words), dtype=np.int32)
        work = [
            (state, state.take_new_tokens(known), row.data) for (_, state, known), row in zip(draws, words, strict=True)
        ]
        return PendingBitmask(words, [number for number, _, _ in draws], self._thread.submit(_fill, work))

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


def apply_grammar_bitmask(
    scores: torch.Tensor, constrained: Sequence[tuple[int, int]], bitmask: GrammarBitmask
) -> None:
    """Sets the scores of forbidden tokens to -inf in ``scores`` [R, V] float32, in place, for each (row, draw number)
    in ``constrained``.
    """
    if constrained:
        words = bitmask.words[[bitmask.rows[number] for _, number in constrained]]
        # Looks up and adds eight tokens at a time: several times faster than a fill under an unpacked mask.
        rows = np.array([row for row, _ in constrained], dtype=np.int64)
        octets, indices = upload_arrays((words.astype("<i4", copy=False).view(np.uint8), rows), scores.device)
        biases = F.embedding(octets.int(), _byte_biases(scores.device)).flatten(1)[:, : scores.shape[1]]
        scores.index_add_(0, indices, biases)


@lru_cache
def _byte_biases(device: torch.device) -> torch.Tensor:
    """Returns ``_BYTE_BIASES`` on ``device``, [256, 8] float32."""
    return upload_arrays((_BYTE_BIASES,), device)[0]


def grammar_param(sample_request: SampleRequest) -> str:
    """Returns the REST name of the parameter that asked for the grammar."""
    structured = sample_request.params.structured
    return "response_format" if structured is None else structured.param


def _fill(work: Sequence[tuple[AnyGrammarState, list[int], memoryview]]) -> list[QuireError | None]:
    return [state.fill(new, mask) for state, new, mask in work]
