"""Proposes draft tokens for a sequence whose text repeats itself.

Both proposers use only the sequence's own prompt and output. ``NgramProposer`` follows one earlier occurrence of the
last tokens for as long as the text repeats it. ``SuffixProposer`` follows all earlier occurrences at once, at any
length. It derives the probability of a draft from the length of the repeated text and from the tokens that followed it
elsewhere. Hit rates cost nothing extra: each draft is compared with the sampled token, whether it was computed or not.
"""

from collections import Counter, abc
from collections.abc import Iterator
from itertools import count

MAX_CANDIDATES = 16
"""Earlier occurrences to compare, latest first."""
MAX_SOURCES = 16
"""Earlier occurrences that ``SuffixProposer`` follows at once."""
MAX_MATCH = 64
"""Tokens of equal text that are compared; longer matches count as this long."""

_HIT_MEMORY = 0.95  # weight of a guess, relative to the next one
_PRIOR_HITS, _PRIOR_GUESSES = 1.0, 2.0
_SHARED_MEMORY = 0.998

Guess = tuple[int, float]
"""A draft token, and the probability that it is right if those before it are."""


class NgramProposer:
    """Proposes the tokens that followed an earlier occurrence of the last tokens. The occurrence must match at least
    ``shortest`` tokens. The longest match wins, up to ``longest`` tokens; ties go to the latest occurrence.

    The same occurrence is followed while its drafts are right; after a wrong draft another is looked up. This is prompt
    lookup decoding (Saxena 2023). Earlier occurrences are found by hash chains, as in LZ77 compressors.
    """

    __slots__ = (
        "_earlier",
        "_guesses",
        "_hits",
        "_last",
        "_longest",
        "_num_seen",
        "_shortest",
        "_source",
        "_token_ids",
    )

    def __init__(self, token_ids: abc.Sequence[int], shortest: int, longest: int) -> None:
        self._token_ids = token_ids
        self._shortest = shortest
        self._longest = longest
        # The last end of each n-gram of ``shortest`` tokens, and for each end, the previous end of the same n-gram.
        self._last: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []
        self._num_seen = 0
        self._source = 0  # index in the text of the draft for the next token; 0 for none
        self._hits = _PRIOR_HITS
        self._guesses = _PRIOR_GUESSES

    @property
    def hit_rate(self) -> float:
        """The probability that a draft is right, if those before it are."""
        return self._hits / self._guesses

    def update(self) -> None:
        """Adds the tokens that the sequence got since the last call."""
        known, shortest = self._token_ids, self._shortest
        for position in range(self._num_seen, len(known)):
            if self._source:
                self._count(hit=known[self._source] == known[position])
            end = position + 1
            self._earlier.append(0)
            if end >= shortest:
                ngram = tuple(known[end - shortest : end])
                self._earlier[position] = self._last.get(ngram, 0)
                self._last[ngram] = end
        self._num_seen = len(known)
        if not self._source and known:
            self._source = self._find()

    def guesses(self) -> Iterator[Guess]:
        """Yields the drafts one by one. A draft that reaches the end of the text continues with the drafts themselves:
        the text has begun to repeat.
        """
        if not self._source:
            return
        known, period, hit_rate = self._token_ids, len(self._token_ids) - self._source, self.hit_rate
        for index in count():
            yield known[self._source + index % period], hit_rate

    def _count(self, *, hit: bool) -> None:
        self._hits = _PRIOR_HITS + _HIT_MEMORY * (self._hits - _PRIOR_HITS) + hit
        self._guesses = _PRIOR_GUESSES + _HIT_MEMORY * (self._guesses - _PRIOR_GUESSES) + 1
        self._source = self._source + 1 if hit else 0

    def _find(self) -> int:
        """Returns the end of the best earlier occurrence of the last tokens; 0 if there is none."""
        best = best_length = 0
        end = self._earlier[-1]
        for _ in range(MAX_CANDIDATES):
            if not end or best_length >= self._longest:
                break
            length = _match_length(self._token_ids, end, self._shortest, self._longest)
            if length > best_length:
                best, best_length = end, length
            end = self._earlier[end - 1]
        return best


class HitRates:
    """How often drafts were right, by the length of the repeated text before them. With few drafts, a rate stays close
    to the rate in ``shared``, which covers all sequences; that in turn starts at 1/2.
    """

    __slots__ = ("_expected", "_hits", "_memory", "_shared")

    def __init__(self, shared: "HitRates | None" = None) -> None:
        classes = MAX_MATCH.bit_length() + 1
        self._shared = shared
        self._memory = _HIT_MEMORY if shared else _SHARED_MEMORY
        self._hits = [0.0] * classes
        self._expected = [0.0] * classes

    def rate(self, length: int) -> float:
        """Returns the probability that a draft is right if all occurrences of a text of ``length`` tokens agree on
        it.
        """
        prior = self._shared.rate(length) if self._shared else _PRIOR_HITS / _PRIOR_GUESSES
        kind = _length_class(length)
        return min(1.0, (_PRIOR_GUESSES * prior + self._hits[kind]) / (_PRIOR_GUESSES + self._expected[kind]))

    def observe(self, length: int, share: float, *, hit: bool) -> None:
        """Adds the result of a draft on which this ``share`` of the occurrences agreed."""
        kind = _length_class(length)
        self._hits[kind] = self._memory * self._hits[kind] + hit
        self._expected[kind] = self._memory * self._expected[kind] + share
        if self._shared:
            self._shared.observe(length, share, hit=hit)


def _length_class(length: int) -> int:
    """Returns the class of a length: 1, 2, 3 to 4, 5 to 8, and so on."""
    return (min(length, MAX_MATCH) - 1).bit_length()


class SuffixProposer:
    """Proposes drafts from all earlier occurrences of the longest suffix that has any: the token that followed most of
    them, then the same among the occurrences that agree. When none of the longest occurrences is left, the next longest
    vote.

    This is the longest path of a suffix tree with counts (suffix decoding, Oliaro et al. 2024), without the tree:
    occurrences are followed token by token, and looked up again when none is left.
    """

    __slots__ = ("_earlier", "_followed", "_last", "_num_seen", "_rates", "_sources", "_token_ids")

    def __init__(self, token_ids: abc.Sequence[int], rates: HitRates) -> None:
        self._token_ids = token_ids
        self._rates = rates
        # The last place of each token, and for each place, the previous place of the same token. Both count from 1.
        self._last: dict[int, int] = {}
        self._earlier: list[int] = []
        self._num_seen = 0
        # The ends of earlier occurrences of the last tokens, longest first, ties latest first, each with its length
        # when it was found. They have been right for ``_followed`` tokens since.
        self._sources: list[tuple[int, int]] = []
        self._followed = 0

    def update(self) -> None:
        """Adds the tokens that the sequence got since the last call."""
        known, last, earlier = self._token_ids, self._last, self._earlier
        for position in range(self._num_seen, len(known)):
            token_id = known[position]
            if self._sources:
                self._follow(token_id)
            earlier.append(last.get(token_id, 0))
            last[token_id] = position + 1
        self._num_seen = len(known)
        if not self._sources and known:
            self._find()

    def guesses(self) -> Iterator[Guess]:
        """Yields the drafts one by one. After the end of the text it continues with the drafts themselves: the text has
        begun to repeat.
        """
        sources, followed, text = self._sources, self._followed, self._token_ids
        size, drafts = len(text), list[int]()
        while sources:
            follow = [text[end] if end < size else drafts[end - size] for end, _ in sources]
            token_id, length, share = _vote(follow, sources)
            yield token_id, share * self._rates.rate(length + followed)
            drafts.append(token_id)
            sources = [
                (end + 1, length) for (end, length), next_id in zip(sources, follow, strict=True) if next_id == token_id
            ]
            followed += 1

    def _follow(self, token_id: int) -> None:
        """Compares the drafts of the sources with the new token, and keeps the sources that were right."""
        follow = [self._token_ids[end] for end, _ in self._sources]
        guessed, length, share = _vote(follow, self._sources)
        self._rates.observe(length + self._followed, share, hit=guessed == token_id)
        self._sources = [
            (end + 1, length)
            for (end, length), next_id in zip(self._sources, follow, strict=True)
            if next_id == token_id
        ]
        self._followed += 1

    def _find(self) -> None:
        """Looks up the latest occurrences of the last token, and how much of the text before each is equal."""
        found, end = list[tuple[int, int]](), self._earlier[-1]
        while end and len(found) < MAX_SOURCES:
            found.append((end, _match_length(self._token_ids, end, 1, MAX_MATCH)))
            end = self._earlier[end - 1]
        found.sort(key=lambda source: -source[1])
        self._sources, self._followed = found, 0


def _vote(follow: list[int], sources: list[tuple[int, int]]) -> tuple[int, int, float]:
    """Returns the token that follows most of the longest occurrences (ties go to the latest), their length when they
    were found, and the share that agrees.
    """
    length = sources[0][1]
    if len(sources) == 1 or sources[1][1] < length:
        return follow[0], length, 1.0
    longest = next((index for index, source in enumerate(sources) if source[1] < length), len(sources))
    ((token_id, votes),) = Counter(follow[:longest]).most_common(1)
    return token_id, length, votes / longest


def _match_length(token_ids: abc.Sequence[int], end: int, length: int, most: int) -> int:
    """Returns how many tokens before ``end`` equal the last ones of the text, at most ``most``. The first ``length``
    are known to be equal.
    """
    limit = min(most, end)
    while length < limit and token_ids[end - 1 - length] == token_ids[-1 - length]:
        length += 1
    return length
