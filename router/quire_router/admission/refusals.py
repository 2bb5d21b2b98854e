"""Counting what admission refuses."""

from collections.abc import Iterator
from contextlib import contextmanager

from quire_proto.errors import QuireError

from quire_router import metrics


@contextmanager
def counting_refusals() -> Iterator[None]:
    """Counts an error that leaves the block by its reason."""
    try:
        yield
    except QuireError as error:
        if error.reason is not None:
            metrics.ADMISSION_REFUSALS.labels(error.reason).inc()
        raise
