"""What an optional feature needs, from the distribution's own metadata: our distributions are not on PyPI, so advice
names the packages behind an extra and never the extra itself.
"""

import re
from importlib.metadata import PackageNotFoundError, requires
from shlex import quote

_OF_EXTRA = re.compile(r"(?P<requirement>[^;]+);\s*extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"]\s*")
FOLDERS = {"quire-llm": "cli", "quire-engine": "engine", "quire-router": "router", "quire-proto": "proto"}


def install_command(distribution: str, extra: str) -> str:
    """Returns the command that installs what ``extra`` of one of our distributions needs, such as
    ``pip install 'obstore>=0.12,<0.13'``.
    """
    try:
        found = [_OF_EXTRA.fullmatch(line) for line in requires(distribution) or ()]
    except PackageNotFoundError:  # a checkout that is on the path and was not installed
        found = []
    needed = [match["requirement"].strip() for match in found if match and match["extra"] == extra]
    return f"pip install {' '.join(map(quote, needed)) or quote(f'./{FOLDERS[distribution]}[{extra}]')}"
