"""How a link behaves; every number has a default that suits a cluster. Plain data."""

from dataclasses import dataclass

from quire_proto.tls import ClientTls


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Times in seconds.

    ``grace`` is how long a broken stream may take to come back before its requests go on elsewhere; an engine keeps
    them for about as long. Once nobody listens at its address the session is lost, so ``refused_grace`` is enough.

    An engine that runs requests speaks at least every second. After ``silence`` without a word it gets no new ones,
    after ``stall`` its stream counts as broken. One that was never reached, or that said that it leaves, may take
    ``start_patience`` to start (it loads a model, the first time it builds kernels) before that is worth a warning. An
    engine answers within ``connect_timeout`` what it is; a new session opens between two of its steps, which may be
    long ones, hence ``open_timeout``.

    ``slow_client_timeout`` ends a request whose tokens nobody reads. Batches are acknowledged after ``ack_batches`` of
    them, or ``ack_interval``, whichever comes first. Between two tries to connect a link waits from ``backoff`` up to
    ``max_backoff``, doubling. At most ``max_unsent`` requests wait to be sent, and ``max_unconfirmed`` that were sent
    are kept until the engine answers. With ``tls`` all that goes to engines and comes from them is encrypted.
    """

    grace: float = 5.0
    refused_grace: float = 1.0
    silence: float = 3.0
    stall: float = 5.0
    start_patience: float = 120.0
    slow_client_timeout: float = 30.0
    connect_timeout: float = 5.0
    open_timeout: float = 30.0
    ack_batches: int = 32
    ack_interval: float = 0.1
    backoff: float = 0.05
    max_backoff: float = 2.0
    max_unsent: int = 1024
    max_unconfirmed: int = 1024
    tls: ClientTls | None = None
