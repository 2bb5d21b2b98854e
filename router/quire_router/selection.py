"""The choices of a request that is told only when all of them have ended: which ones, and in which order."""

from dataclasses import dataclass, field

from quire_proto.best_of import best_of
from quire_proto.logprobs import TokenLogprobs, mean_logprob
from quire_proto.sampling import FinishReason, SamplingParams

from quire_router.generation import Delta


@dataclass(slots=True)
class _Candidate:
    """All pieces of one choice."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    score: float | None = None


class BestOfSelection:
    """Holds back the candidates of ``best_of`` and of a beam search.

    Candidates are ranked by the mean log-probability of their tokens, equal ones by index; a search has ranked its
    beams already. When the client cancels, it gets the best of what there is.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._candidates: dict[int, _Candidate] = {}

    @staticmethod
    def applies_to(params: SamplingParams) -> bool:
        """Whether the choices of such a request are told together."""
        return params.beam_width > 0 or params.best_of > params.n

    def add(self, piece: Delta) -> None:
        """Keeps a piece of a candidate."""
        whole = self._candidates.setdefault(piece.index, _Candidate())
        whole.texts.append(piece.text)
        whole.token_ids += piece.token_ids
        whole.logprobs += piece.logprobs
        whole.finish_reason, whole.score = piece.finish_reason, piece.score

    def best(self) -> list[Delta]:
        """One piece for each of the ``n`` best, best first. All have ended; if any did by being cancelled, nobody can
        say which ones would have been best, so all of them are given that reason.
        """
        wholes = [self._candidates[index] for index in sorted(self._candidates)]
        aborted = any(whole.finish_reason is FinishReason.ABORT for whole in wholes)
        if not self._params.beam_width:
            means = [mean_logprob(whole.logprobs) for whole in wholes]
            wholes = [wholes[index] for index in best_of(means, self._params.n)]
        return [self._to_delta(index, whole, aborted) for index, whole in enumerate(wholes)]

    def _to_delta(self, index: int, whole: _Candidate, aborted: bool) -> Delta:
        return Delta(
            "".join(whole.texts),
            whole.token_ids,
            FinishReason.ABORT if aborted else whole.finish_reason,
            index=index,
            logprobs=whole.logprobs if self._params.logprobs is not None else [],
            score=whole.score,
        )
