"""The Lua scripts that change a record in one step each. They are known to Redis by the hash of their source."""

from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha1
from importlib.resources import files


class Answer(IntEnum):
    """What a script returns."""

    DONE = 1
    STALE = 0
    LOST = -1


@dataclass(frozen=True, slots=True)
class Script:
    """One script; ``sha`` is the name that EVALSHA takes."""

    source: str
    sha: str


def _load(name: str) -> Script:
    source = files(__package__).joinpath(name).read_text(encoding="utf-8")
    return Script(source, sha1(source.encode(), usedforsecurity=False).hexdigest())


OPEN = _load("open.lua")
APPEND = _load("append.lua")
FINISH = _load("finish.lua")
ALL = (OPEN, APPEND, FINISH)
