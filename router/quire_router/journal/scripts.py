"""The Lua scripts that change a record in one step each. They are known to Redis by the hash of their source."""

from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha1
from importlib.resources import files


class ScriptReply(IntEnum):
    """What a script that writes returns; ``common.lua`` says when."""

    CANCELLED = 2
    DONE = 1
    STALE = 0
    LOST = -1


@dataclass(frozen=True, slots=True)
class LuaScript:
    """One script; ``sha`` is the name that EVALSHA takes."""

    source: str
    sha: str


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _load_script(*names: str) -> LuaScript:
    source = "".join(map(_read, names))
    return LuaScript(source, sha1(source.encode(), usedforsecurity=False).hexdigest())


OPEN = _load_script("common.lua", "open.lua")
APPEND = _load_script("common.lua", "append.lua")
FINISH = _load_script("common.lua", "finish.lua")
RELEASE = _load_script("common.lua", "release.lua")
CLAIM = _load_script("common.lua", "claim.lua")
CANCEL = _load_script("common.lua", "cancel.lua")
DELETE = _load_script("common.lua", "delete.lua")
INDEX = _load_script("index.lua")
ALL = (OPEN, APPEND, FINISH, RELEASE, CLAIM, CANCEL, DELETE, INDEX)
