"""Whether a source of engines can be asked, for the metrics and the log."""

import logging
from time import time

from quire_router import metrics

log = logging.getLogger(__name__)


class Standing:
    """Of the source that is configured as ``source``. It is told of every answer and of every failure."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._failures = 0
        self._connected = metrics.DISCOVERY_CONNECTED.labels(source)
        self._heard = metrics.DISCOVERY_HEARD.labels(source)
        self._connected.set(0)

    def heard(self) -> None:
        """What is known is true now."""
        if self._failures > 1:
            log.info("%s answers again", self._source)
        self._failures = 0
        self._connected.set(1)
        self._heard.set(time())

    def failed(self, problem: str) -> None:
        """What is known may have become old. A connection that ends is no news; that none can be made is."""
        self._failures += 1
        self._connected.set(0)
        if self._failures == 2:
            log.warning("%s cannot be asked, and the engines that are known stay: %s", self._source, problem)
        else:
            log.debug("%s: %s", self._source, problem)
