"""Guesses the next tokens of a sequence where its text repeats itself.

Two proposers guess, both from the sequence's own prompt and output. ``NgramProposer`` follows one earlier occurrence of
its last tokens, as long as what came there comes again. ``SuffixProposer`` follows all of them at once, of any length,
and knows by how long a text is repeated and what followed it elsewhere how far it can be trusted. Hit rates are known
at no cost: each guessed token is compared with the one that was drawn, whether it was computed or not.
"""

from collections import Counter, abc
from collections.abc import Iterator
from itertools import count

MAX_CANDIDATES = 16
"""Earlier occurrences that are looked at, the last ones first."""
MAX_SOURCES = 16
"""Earlier occurrences that ``SuffixProposer`` follows at once."""
MAX_MATCH = 64
"""Tokens beyond which a longer equal text is not told from one of so many."""

_HIT_MEMORY = 0.95  # weight of a guess after the next one
_PRIOR_HITS, _PRIOR_GUESSES = 1.0, 2.0
_SHARED_MEMORY = 0.998

Guess = tuple[int, float]
"""A token, and the probability that it is right if those before it are."""


class NgramProposer:
    """Guesses the tokens that follow a sequence, from an earlier occurrence of its last tokens: of at least
    ``shortest``, and the longest one counts, up to ``longest``; of equally long ones the last.

    While guesses are right the same occurrence is followed; a wrong one has another looked up. Prompt lookup decoding
    (Saxena 2023); the hash chains by which earlier occurrences are found are those of LZ77 compressors.
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
        # Where each n-gram of ``shortest`` tokens ends last, and for each end the one before it of the same n-gram.
        self._last: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []
        self._num_seen = 0
        self._source = 0  # where the guess of the next token stands in the text; 0 for none
        self._hits = _PRIOR_HITS
        self._guesses = _PRIOR_GUESSES

    @property
    def hit_rate(self) -> float:
        """The probability that a guessed token is right, if those before it are."""
        return self._hits / self._guesses

    def update(self) -> None:
        """Takes in the tokens that the sequence got since the last call."""
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
        """The guessed tokens, one after the other. A guess that runs into the text's end goes on with itself: the text
        has begun to repeat.
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
        """The end of the best earlier occurrence of the last tokens; 0 if there is none."""
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
    """How often guesses were right, by the length of the text that was repeated before them. What few guesses tell is
    drawn to what ``shared`` knows of all sequences, and that to one half.
    """

    __slots__ = ("_expected", "_hits", "_memory", "_shared")

    def __init__(self, shared: "HitRates | None" = None) -> None:
        classes = MAX_MATCH.bit_length() + 1
        self._shared = shared
        self._memory = _HIT_MEMORY if shared else _SHARED_MEMORY
        self._hits = [0.0] * classes
        self._expected = [0.0] * classes

    def rate(self, length: int) -> float:
        """The probability that a guess is right on which all occurrences of a text of so many tokens agree."""
        prior = self._shared.rate(length) if self._shared else _PRIOR_HITS / _PRIOR_GUESSES
        kind = _length_class(length)
        return min(1.0, (_PRIOR_GUESSES * prior + self._hits[kind]) / (_PRIOR_GUESSES + self._expected[kind]))

    def observe(self, length: int, share: float, *, hit: bool) -> None:
        """Adds a guess on which this share of the occurrences agreed."""
        kind = _length_class(length)
        self._hits[kind] = self._memory * self._hits[kind] + hit
        self._expected[kind] = self._memory * self._expected[kind] + share
        if self._shared:
            self._shared.observe(length, share, hit=hit)


def _length_class(length: int) -> int:
    """1, 2, 3 to 4, 5 to 8 and so on."""
    return (min(length, MAX_MATCH) - 1).bit_length()


class SuffixProposer:
    """Guesses the tokens that follow a sequence from all earlier occurrences of its longest suffix that has any: the
    token that followed most of them, and among those the same again. Of occurrences that are not whole, the next
    longest are asked when no longer one is left.

    That is the longest path of a suffix tree with its counts (suffix decoding, Oliaro et al. 2024), and needs no tree:
    occurrences are followed token by token, and looked up again when none is left.
    """

    __slots__ = ("_earlier", "_followed", "_last", "_num_seen", "_rates", "_sources", "_token_ids")

    def __init__(self, token_ids: abc.Sequence[int], rates: HitRates) -> None:
        self._token_ids = token_ids
        self._rates = rates
        # Where each token stands last, and for each place the one before it of the same token; both count from 1.
        self._last: dict[int, int] = {}
        self._earlier: list[int] = []
        self._num_seen = 0
        # Where earlier occurrences of the last tokens end, the longest first and of equally long ones the last, each
        # with its length when it was found; they have been right for ``_followed`` tokens since.
        self._sources: list[tuple[int, int]] = []
        self._followed = 0

    def update(self) -> None:
        """Takes in the tokens that the sequence got since the last call."""
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
        """The guessed tokens, one after the other. Behind the text's end stands what was guessed: the text has begun to
        repeat.
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
        """Compares what the sources guess with the token that came, and keeps those that were right."""
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
        """Looks up the last occurrences of the last token, and how much of the text before it is equal."""
        found, end = list[tuple[int, int]](), self._earlier[-1]
        while end and len(found) < MAX_SOURCES:
            found.append((end, _match_length(self._token_ids, end, 1, MAX_MATCH)))
            end = self._earlier[end - 1]
        found.sort(key=lambda source: -source[1])
        self._sources, self._followed = found, 0


def _vote(follow: list[int], sources: list[tuple[int, int]]) -> tuple[int, int, float]:
    """The token that follows most of the longest occurrences, the last one's of equally many; their length when they
    were found, and the share that agrees.
    """
    length = sources[0][1]
    if len(sources) == 1 or sources[1][1] < length:
        return follow[0], length, 1.0
    longest = next((index for index, source in enumerate(sources) if source[1] < length), len(sources))
    ((token_id, votes),) = Counter(follow[:longest]).most_common(1)
    return token_id, length, votes / longest


def _match_length(token_ids: abc.Sequence[int], end: int, length: int, most: int) -> int:
    """How many tokens before ``end`` equal the last ones of the text, ``most`` at most; ``length`` are known to."""
    limit = min(most, end)
    while length < limit and token_ids[end - 1 - length] == token_ids[-1 - length]:
        length += 1
    return length
