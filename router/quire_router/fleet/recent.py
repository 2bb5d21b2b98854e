"""Tokens that were dispatched to an engine too recently for its reports to tell of them. Does no I/O."""

SETTLE_SECONDS = 0.1
"""More than a Submit takes on its way to an engine, or a share to another router."""


class UnreportedTokens:
    """An upper bound, in two buckets of which the older one is dropped.

    A report may have been made while a Submit was on its way, or while the step ran that began before it came. So what
    was dispatched counts as told only when, after the first report that followed, another one came ``SETTLE_SECONDS``
    later: the step that it is of took up all commands that had come before.
    """

    __slots__ = ("_new", "_old", "_turned")

    def __init__(self) -> None:
        self._new = 0
        self._old = 0
        self._turned = float("-inf")

    @property
    def tokens(self) -> int:
        """So many may be missing in the last report."""
        return self._new + self._old

    def add(self, tokens: int) -> None:
        """They were dispatched, here or by another router, since the last report."""
        self._new += tokens

    def on_report(self, now: float) -> None:
        """A report came, at ``now`` in seconds of a monotonic clock."""
        if now - self._turned >= SETTLE_SECONDS:
            self._old, self._new, self._turned = self._new, 0, now
