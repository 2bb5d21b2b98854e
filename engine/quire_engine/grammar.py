"""What the core may know of a grammar: that it was compiled, and that outputs can be matched against it.

Implemented in ``structured/``, by a library. The core hands grammars from requests to draws and never looks inside.
"""

from collections.abc import Sequence
from typing import Protocol


class GrammarError(Exception):
    """A grammar cannot go on with this output: its limits were reached, or the output does not match it. The text is
    one sentence that a client may read.
    """


class GrammarMatcher(Protocol):
    """One output's place in a grammar. Made and used by one thread, which is not that of the steps."""

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Takes in tokens that the output got. Raises ``GrammarError``."""
        ...

    def fill_bitmask(self, mask: memoryview) -> None:
        """Writes which tokens may come next into ``mask``: contiguous int32 words, as many as the model's vocabulary
        needs and all 0 before, where bit b of word w allows token 32 w + b (``np.frombuffer(mask, np.int32)`` shares
        them). Words that it leaves alone allow nothing. May be called again for the same place. Raises
        ``GrammarError``.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar: constant, shared by all outputs that are held to it, safe to use from any thread."""

    def new_matcher(self) -> GrammarMatcher:
        """The place before the first token of an output."""
        ...
