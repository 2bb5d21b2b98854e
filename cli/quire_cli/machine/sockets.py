"""Whether addresses are this machine's, and ports free."""

import socket

LOCALHOST = "127.0.0.1"


def is_free(port: int, host: str = LOCALHOST) -> bool:
    """Whether the port can be listened on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
        return True


def is_local(host: str) -> bool:
    """Whether this machine has the address, so that some port of it can be listened on."""
    return is_free(0, host)
