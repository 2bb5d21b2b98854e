"""One stretch of time without a stream to an engine: when to try again, and how loudly to tell. Does no I/O."""

import logging
from dataclasses import dataclass
from time import monotonic
from typing import Self

import grpc
from quire_proto.tls import ClientTls, TlsError

from quire_router.fleet.backoff import Backoff
from quire_router.fleet.channel import explain
from quire_router.fleet.settings import ConnectionSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectFailure:
    """Why there is no stream. ``refused`` where nobody listens at the address, ``lasting`` where somebody has to change
    something first.
    """

    text: str
    refused: bool = False
    lasting: bool = False

    @classmethod
    def of(cls, errors: BaseExceptionGroup, tls: ClientTls | None = None) -> Self:
        """The first error of a group, in one line. ``tls`` is what the stream was to be opened with."""
        error = errors.exceptions[0]
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, grpc.aio.AioRpcError):
            details = error.details() or ""
            if "connection refused" in details.lower():
                return cls("nobody listens there", refused=True)
            if (about_tls := explain(details, tls)) is not None:
                return cls(about_tls, lasting=True)
            return cls(f"{error.code().name}: {details}")
        return cls(str(error) or type(error).__name__, lasting=isinstance(error, TlsError))


class ConnectFailureLog:
    """Begins when the stream is missing. For ``patience`` seconds that is no reason to warn; afterwards it is one. What
    is less severe than a warning is left out where the engine is ``known_to_leave``.

    A lasting problem is a reason at once, but only when it comes twice in a row: files may just be being replaced, and
    an engine that ends closes what is being opened.
    """

    def __init__(
        self, address: str, settings: ConnectionSettings, patience: float = 0.0, *, known_to_leave: bool = False
    ) -> None:
        self._address = address
        self._warn_after = monotonic() + patience
        self._logged_level = logging.INFO if known_to_leave else logging.NOTSET
        self._backoff = Backoff(settings.backoff, settings.max_backoff)
        self._last: ConnectFailure | None = None

    def record(self, problem: ConnectFailure) -> None:
        """Logs a failed try: the first as information, and the first that is a reason to warn."""
        lasting = problem.lasting and problem == self._last
        level = logging.WARNING if lasting or monotonic() >= self._warn_after else logging.INFO
        self._last = problem
        if level > self._logged_level:
            missing = "cannot be reached" if level == logging.WARNING else "is not there yet"
            log.log(level, "engine %s %s: %s", self._address, missing, problem.text)
            self._logged_level = level

    def next_delay(self, spacing: float) -> float:
        """Seconds until the next try; they grow up to ``spacing`` where that is more than the settings say."""
        return self._backoff.next(spacing)
