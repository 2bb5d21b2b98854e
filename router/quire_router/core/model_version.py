"""``ModelVersion``: which weights an engine runs, with which settings. An answer that has begun is continued by engines
of its version only, whatever name they serve it by. Does no I/O.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

from quire.v1 import engine_pb2

_MAX_REVISION = 128  # characters; a longer one is replaced by its hash
_MAX_TEXT = 256  # characters of a version in a record


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """``revision`` identifies the weights, and ``settings`` (hexadecimal) what an engine makes of them: element types
    and quantization. Empty where that is not known, as with engines of others, and in records of older routers.
    """

    revision: str = ""
    settings: str = ""

    @classmethod
    def of(cls, description: engine_pb2.DescribeResponse) -> Self:
        """What an engine says of itself. A server of others names its model, and says nothing of its numbers: it goes
        on with what any engine began, and any engine with what it did.
        """
        if not description.settings_digest:
            return cls()
        revision = description.model_revision
        if len(revision) > _MAX_REVISION or not revision.isprintable():
            revision = blake2b(revision.encode(), digest_size=16).hexdigest()
        return cls(revision, description.settings_digest.hex())

    @classmethod
    def parse(cls, text: str) -> Self:
        """The version that was written as ``text``; an unknown one if it is none."""
        if len(text) > _MAX_TEXT or not text.isprintable():
            return cls()
        revision, _, settings = text.rpartition(" ")
        return cls(revision, settings)

    def __str__(self) -> str:
        return f"{self.revision} {self.settings}" if self.revision or self.settings else ""

    def continues(self, other: "ModelVersion") -> bool:
        """Whether one may continue what the other has begun: they differ in nothing that is known of both."""
        pairs = (self.revision, other.revision), (self.settings, other.settings)
        return all(one == another or not one or not another for one, another in pairs)


UNKNOWN_VERSION = ModelVersion()
"""That of which nothing is known: every engine may continue it."""
