"""The Lua scripts that change a record in one step each. They are known to Redis by the hash of their source."""

from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha1

from quire_router.redis_client import lua_source


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


def _load_script(*names: str) -> LuaScript:
    source = "".join(lua_source(__package__, name) for name in names)
    return LuaScript(source, sha1(source.encode(), usedforsecurity=False).hexdigest())


OPEN = _load_script("common", "open")
APPEND = _load_script("common", "append")
FINISH = _load_script("common", "finish")
RELEASE = _load_script("common", "release")
CLAIM = _load_script("common", "claim")
CANCEL = _load_script("common", "cancel")
DELETE = _load_script("common", "delete")
INDEX = _load_script("index")
ALL = (OPEN, APPEND, FINISH, RELEASE, CLAIM, CANCEL, DELETE, INDEX)
