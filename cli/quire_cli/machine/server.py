"""The server that commands talk to: its address and its key, as flags, variables and ``quire serve`` name them."""

import os
from ipaddress import ip_address
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where ``quire serve`` listens unless that port is in use."""
KEY_VARIABLES = ("QUIRE_API_KEY", "OPENAI_API_KEY")
"""The keys of clients, in the order in which they count."""
SERVER_KEYS = "QUIRE_ROUTER_API_KEY"
"""The keys that a server on this machine takes, with commas between them."""
KEY_HELP = f"by default {' or '.join(KEY_VARIABLES)}, or the first of {SERVER_KEYS} for a server on this machine"


def key_of_environment(url: str) -> str | None:
    """Returns the key that is sent to ``url`` where no flag names one. A server's own keys never leave this machine."""
    names = (*KEY_VARIABLES, SERVER_KEYS) if _is_here(url) else KEY_VARIABLES
    given = next((value for name in names if (value := os.environ.get(name))), "")
    return (given.split(",")[0].strip() if given == os.environ.get(SERVER_KEYS) else given) or None


def _is_here(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name, or no URL at all
        return False


def base_url(text: str) -> str:
    """Returns a server's URL without the API's ``/v1``, as a user may write it: the scheme may be missing."""
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
