"""The server that commands talk to: its address and key, as flags, variables and ``quire serve`` name them, and the
errors where none answers.
"""

import os
import sys
from ipaddress import ip_address
from urllib.parse import urlsplit

from quire_proto.terminal import DIM, colored

from quire_cli.machine.running import running_servers

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where ``quire serve`` listens unless that port is in use."""
URL_HELP = f"the server; by default the newest that quire serve runs here, or {DEFAULT_URL}"
KEY_VARIABLES = ("QUIRE_API_KEY", "OPENAI_API_KEY")
"""The keys of clients, in the order in which they count."""
SERVER_KEYS = "QUIRE_ROUTER_API_KEY"
"""The keys that a server on this machine takes, with commas between them."""
KEY_HELP = f"by default {' or '.join(KEY_VARIABLES)}, or the first of {SERVER_KEYS} for a server on this machine"
WRONG_KEY = "give --api-key, or set QUIRE_API_KEY"


def find_server(given: str | None) -> str:
    """Returns the URL of the server that a command talks to: the given one, else the newest that ``quire serve`` runs
    here, else the default. Says which one it is where several run.
    """
    if given is not None:
        return base_url(given)
    running = running_servers()
    if len(running) > 1:
        newest = running[0]
        told = f"{len(running)} servers run here; this is {newest.model} at {newest.url}, the newest: --url chooses"
        sys.stderr.write(f"{colored(told, DIM, sys.stderr)}\n")
    return running[0].url if running else DEFAULT_URL


def is_starting(url: str) -> bool:
    """Whether ``quire serve`` runs here to serve this URL: what it refuses, it will take soon."""
    return any(server.url == url for server in running_servers())


def no_server(url: str) -> str:
    """Returns the error for an address where nothing listens."""
    listed = " or ".join(server.url for server in running_servers()[:3])
    advice = f"one runs at {listed}" if listed else "quire serve MODEL starts one"
    return f"no server answers at {url}; {advice}."


def not_http(url: str) -> str:
    """Returns the error for a port that speaks another protocol."""
    return (
        f"{url} does not speak HTTP/1, as the port for gRPC does not: --url names the port of the REST API, by "
        "default 8000."
    )


def other_server(url: str, status: int) -> str:
    """Returns the error for an answer of another program."""
    return f"{url} is not an OpenAI-compatible server (it answers HTTP {status} without an error object): check --url."


def key_of_environment(url: str) -> str | None:
    """Returns the key that is sent to ``url`` where no flag names one. A server's own keys never leave this machine."""
    names = (*KEY_VARIABLES, SERVER_KEYS) if _is_here(url) else KEY_VARIABLES
    given = next((value for name in names if (value := os.environ.get(name))), "")
    return (given.split(",")[0].strip() if given == os.environ.get(SERVER_KEYS) else given) or None


def _is_here(url: str) -> bool:
    if is_starting(url):
        return True
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name, or no URL at all
        return False


def base_url(text: str) -> str:
    """Returns a server's URL without the API's ``/v1``, as a user may write it: the scheme may be missing."""
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
