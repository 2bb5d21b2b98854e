"""Whether a source of engines can be asked, for the metrics and the log."""

import logging
from time import time

from quire_router import metrics

log = logging.getLogger(__name__)
_FEW = 5
"""Failures between which something was heard that are worth a warning, where none of it lasted."""
_LONGEST = 200  # characters of a problem: who is asked may answer whatever it likes


class Standing:
    """Of the source that is configured as ``source``. It is told of every answer and of every failure."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._unanswered = self._unsteady = 0
        self._connected = metrics.DISCOVERY_CONNECTED.labels(source)
        self._heard = metrics.DISCOVERY_HEARD.labels(source)
        self._connected.set(0)

    def heard(self) -> None:
        """What is known is true now."""
        if self._unanswered > 1:
            log.info("%s answers again", self._source)
        self._unanswered = 0
        self._connected.set(1)
        self._heard.set(time())

    def lasted(self) -> None:
        """It answered, and not only for a moment."""
        self._unsteady = 0

    def failed(self, problem: str) -> None:
        """What is known may have become old. A connection that ends is no news; that none can be made is, and that each
        one ends at once.
        """
        self._unanswered += 1
        self._unsteady += 1
        self._connected.set(0)
        told = " ".join(problem.split())[:_LONGEST]
        if self._unanswered == 2:
            log.warning("%s cannot be asked, and the engines that are known stay: %s", self._source, told)
        elif self._unanswered == 1 and self._unsteady == _FEW:
            log.warning("%s answers and breaks off, again and again: %s", self._source, told)
        else:
            log.debug("%s: %s", self._source, told)
