"""Names from outside: what a file of an artifact, a key of a bucket, or an adapter may be called, and how a log shows
any other text. They match before they touch a path or a log.
"""

import re
from typing import Final

from quire_proto.logs import one_line

_PART = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]{1,255}"
_NAME = re.compile(rf"{_PART}(?:/{_PART}){{0,15}}", re.ASCII)
MAX_NAME: Final = 256  # characters
NAME_RULE: Final = f"at most {MAX_NAME} letters, digits, dots, dashes and underscores, in parts between slashes"


def is_name(text: object) -> bool:
    """Whether ``text`` is one or more parts of letters, digits, ``.``, ``_`` and ``-``, of which none is ``.`` or
    ``..``: below a folder it leads nowhere else.
    """
    return isinstance(text, str) and len(text) <= MAX_NAME and _NAME.fullmatch(text) is not None


def shown(text: object, most: int = 200) -> str:
    """Returns a text from outside as one line of printable characters, ``most`` of them."""
    line = str(text)
    return one_line(line if len(line) <= most else f"{line[:most]}…")
