"""``LoadedLoRAs``: the adapters that clients have loaded, in the store that all routers share. So they outlive every
engine and every router that had them.
"""

import json
import logging
from collections.abc import Mapping

from quire_router.core.generation import LoRA
from quire_router.engines.settings import ServedLoRA
from quire_router.journal.objects import ObjectStore, StoredObject

log = logging.getLogger(__name__)

_NAME = "loras"
_TTL = 10 * 365 * 86_400.0  # seconds: objects expire, and this one is not to


class LoadedLoRAs:
    """Adapters by their names, as ``store`` last had them; ``is_read`` once it has been asked.

    What is loaded or unloaded here is written with the next ``sync`` that reaches the store. Of two routers that change
    one name, the one that writes later wins.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.is_read = False
        self._store = store
        self._unwritten: dict[str, ServedLoRA | None] = {}  # by name; None: unloaded

    def change(self, name: str, served: ServedLoRA | None) -> None:
        """An adapter was loaded, or for None unloaded."""
        self._unwritten[name] = served

    async def sync(self) -> Mapping[str, ServedLoRA]:
        """Writes what was changed here, and returns all adapters that there are. Raises ``QuireError`` UNAVAILABLE
        while the store cannot be used, and OVERLOADED when it has no room.
        """
        while True:
            changes = dict(self._unwritten)
            stored = await self._store.get(_NAME)
            found = {} if stored is None else _read(stored.data)
            loras = {name: served for name, served in {**found, **changes}.items() if served is not None}
            before = stored or StoredObject(_write({}), 0)
            data = _write(loras)
            if data == before.data or await self._store.put(_NAME, data, before.version, _TTL):
                break  # else another router has written meanwhile
        self._unwritten = {
            name: served
            for name, served in self._unwritten.items()
            if name not in changes or changes[name] is not served  # changed again meanwhile
        }
        self.is_read = True
        return loras


def _write(loras: Mapping[str, ServedLoRA]) -> bytes:
    rows = {
        name: {"model": served.model, "path": served.lora.path, "digest": served.lora.digest.hex()}
        for name, served in sorted(loras.items())
    }
    return json.dumps(rows).encode()


def _read(data: bytes) -> dict[str, ServedLoRA]:
    """Returns what was written; nothing where somebody else has damaged it."""
    try:
        return {
            name: ServedLoRA(row["model"], LoRA(name, bytes.fromhex(row["digest"]), row["path"]))
            for name, row in json.loads(data).items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        log.error("the list of loaded adapters is damaged: rebuilding it from what engines have")
        return {}
