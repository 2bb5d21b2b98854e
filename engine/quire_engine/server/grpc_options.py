"""The settings of an engine's gRPC server: message sizes, and pings. Pings never end a router's session for being too
frequent, and they detect a router whose host is gone.
"""

MAX_RECEIVE_BYTES = 16 << 20
MAX_SEND_BYTES = 256 << 20
KEEPALIVE_SECONDS = 20.0
"""Seconds without traffic after which a router is pinged. If it does not answer within twice this time, its session is
closed after its grace period, and its requests are aborted.
"""


def server_options(keepalive: float = KEEPALIVE_SECONDS) -> list[tuple[str, int]]:
    """Returns the options of ``grpc.aio.server``. ``keepalive`` is in seconds."""
    ping, answer = round(keepalive * 1000), round(2 * keepalive * 1000)
    return [
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.max_send_message_length", MAX_SEND_BYTES),
        # A stalled router sends its pings in bursts. gRPC would treat them as abuse and end its session.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_time_ms", ping),
        ("grpc.keepalive_timeout_ms", answer),
        ("grpc.http2.ping_timeout_ms", answer),  # otherwise 60 s, regardless of keepalive_timeout_ms
        # Do not ping with each message to size the window by the round trip; use a fixed window of this size.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 4 << 20),
        # Two engines on one port would share its connections, and a router's session could reach either.
        ("grpc.so_reuseport", 0),
    ]
