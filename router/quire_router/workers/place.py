"""What a worker is told by the process that started it: its number and ports, and the pipe that says that it is still
there.
"""

import json
import os
from dataclasses import asdict, dataclass

_VARIABLE = "QUIRE_ROUTER_WORKER_PLACE"


@dataclass(frozen=True, slots=True)
class Place:
    """``http_port`` and ``grpc_port`` are shared with the other workers. ``parent`` is a file descriptor that reads as
    ended once the supervisor is gone. ``number`` counts the workers from 1.
    """

    http_port: int
    grpc_port: int
    parent: int
    number: int

    def environment(self) -> dict[str, str]:
        """What a worker's process is started with, besides what this one has."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def own(cls) -> "Place | None":
        """This process's place; None when it is not a worker."""
        told = os.environ.pop(_VARIABLE, None)
        return None if told is None else cls(**json.loads(told))


def worker_number() -> int | None:
    """The number of this worker, until ``Place.own`` has taken its place; None when this is not a worker."""
    told = os.environ.get(_VARIABLE)
    return None if told is None else int(json.loads(told)["number"])
