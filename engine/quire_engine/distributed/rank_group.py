"""``RankGroup``: all connections of one rank of a model. Ranks form a grid: the ranks of one stage share its layers,
and the ranks with the same part of every stage form a pipeline. ``RankStore``: how ranks on several machines find each
other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Condition

import torch
from torch import distributed

from quire_engine.distributed.communicator import SINGLE_RANK, Communicator, GroupCoordinator
from quire_engine.distributed.pipeline import PipelineStage


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Engine ``dp_rank`` of ``dp_size`` in a data-parallel group. The other engines reach it at ``address``."""

    dp_rank: int
    dp_size: int
    address: str


class RankGroup:
    """The connections of ``rank`` on ``device``. Rank ``stage * tensor_size + part`` has part ``part`` of the layers of
    stage ``stage``; there are ``num_stages`` stages. The connections work after ``connect``.

    ``communicator`` connects the ranks that share the layers of one stage. ``stage`` is this rank's stage, or None
    without a pipeline. ``expert_communicator`` connects the ranks that share experts: the same ranks, or all ranks of
    all engines if this engine has a ``place`` in a group.
    """

    def __init__(
        self,
        rank: int,
        tensor_size: int,
        num_stages: int,
        device: torch.device,
        *,
        ordered: bool,
        place: EnginePlace | None = None,
    ) -> None:
        self.num_stages = num_stages
        index, part = divmod(rank, tensor_size)
        self._stores = f"stage-{index}", f"part-{part}"
        self._store: distributed.Store | None = None
        self._expert_store: distributed.Store | None = None
        self._tensor = GroupCoordinator(part, tensor_size, device, ordered=ordered) if tensor_size > 1 else None
        self.communicator: Communicator = self._tensor or SINGLE_RANK
        self._place, self._experts = place, None
        if place is not None:
            expert_rank, expert_size = place.dp_rank * tensor_size + part, place.dp_size * tensor_size
            self._experts = GroupCoordinator(expert_rank, expert_size, device, ordered=ordered)
        self.expert_communicator: Communicator = self._experts or self.communicator
        self.stage = PipelineStage(index, num_stages, device) if num_stages > 1 else None

    @property
    def num_exchanges(self) -> int:
        """The collectives that this rank has started, plus the messages that it has sent or waited for."""
        collectives = 0 if self._tensor is None else self._tensor.num_collectives
        messages = 0 if self.stage is None else self.stage.num_messages
        return collectives + messages + self.num_expert_exchanges

    @property
    def num_expert_exchanges(self) -> int:
        """How many of ``num_exchanges`` are with other engines of a group."""
        return 0 if self._experts is None else self._experts.num_collectives

    @property
    def has_most_tokens(self) -> bool:
        """Whether no rank of another engine had more tokens in the last forward pass."""
        return self._experts is None or self._experts.has_most_tokens

    def connect(
        self, store: distributed.Store, address: str | None, expert_store: distributed.Store | None = None
    ) -> None:
        """Connects to the other ranks. All ranks rendezvous through ``store``. ``address`` is this machine's address
        for the others, or None if all ranks are on this machine. ``expert_store`` is the store of all engines of a
        group.
        """
        self._store = store  # torch keeps only its own half of a store
        for link, name in zip((self._tensor, self.stage), self._stores, strict=True):
            if link is not None:
                link.connect(distributed.PrefixStore(name, store), address)
        if self._experts is not None and self._place is not None:
            self._expert_store = expert_store
            self._experts.connect(distributed.PrefixStore("experts", expert_store), self._place.address)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites ``tensor`` on the other ranks of the stage with the first rank's."""
        if self._tensor is not None:
            self._tensor.broadcast(tensor)

    def abort(self) -> None:
        """Makes calls that wait for a dead rank fail. Thread-safe."""
        for link in self._links:
            link.abort()

    def close(self) -> None:
        """Leaves the groups. The other ranks may have ended already."""
        for link in self._links:
            link.close()

    @property
    def _links(self) -> list[GroupCoordinator | PipelineStage]:
        return [link for link in (self._tensor, self.stage, self._experts) if link is not None]


def file_store(folder: Path, size: int) -> distributed.Store:
    """Returns a store for ``size`` ranks on one machine: a file in a private ``folder``."""
    return distributed.FileStore(str(folder / "store"), size)


SendStored = Callable[[str, bytes], object]


class RankStore(distributed.Store):  # type: ignore[misc]  # the binding has no stubs
    """The store of ranks on several machines or in several engines. Each process has all values. They arrive over the
    ranks' own links, which are authenticated, unlike torch's ``TCPStore``. Thread-safe.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._peers: dict[object, SendStored] = {}
        self._changed = Condition()
        self._failure: Exception | None = None

    def attach(self, peer: object, send: SendStored) -> None:
        """Calls ``send`` with each value that did not come from ``peer``, also with those that are here already."""
        with self._changed:
            self._peers[peer], values = send, dict(self._values)
        for key, value in values.items():
            send(key, value)

    def put(self, key: str, value: bytes, peer: object = None) -> None:
        """Stores a value that came from ``peer``, and sends it to all other peers."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
            others = [send for other, send in self._peers.items() if other is not peer]
        for send in others:
            send(key, value)

    def fail(self, error: Exception) -> None:
        """Makes all that wait for a value raise ``error``, because ranks are lost."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        """See ``Store.set``."""
        self.put(key, value)

    def get(self, key: str) -> bytes:
        """See ``Store.get``."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        """See ``Store.wait``. Ignores the timeout: waits until ``fail``."""
        with self._changed:
            self._changed.wait_for(lambda: self.check(keys) or self._failure is not None)
            if self._failure is not None and not self.check(keys):
                raise self._failure

    def check(self, keys: Sequence[str]) -> bool:
        """See ``Store.check``."""
        return all(key in self._values for key in keys)

    def clone(self) -> "RankStore":
        """See ``Store.clone``. Returns this store, which all threads may use."""
        return self
