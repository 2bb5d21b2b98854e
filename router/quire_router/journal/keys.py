"""What a journal's keys in Redis are called."""

BACKGROUND = "quire:background"
"""The index of background requests that have not ended, by when their leases expire (ms, by Redis' clock)."""

PROBE = "quire:probe"
"""Is never there: nothing is written to it, to see whether anything can be."""


def keys(request_id: str) -> tuple[str, str]:
    """A request's record and its tokens; the braces put both into one slot of a cluster."""
    return f"quire:{{{request_id}}}:record", f"quire:{{{request_id}}}:tokens"
