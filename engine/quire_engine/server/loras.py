"""``LoRARegistry``: the adapters of a running engine, by the names that requests use."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quire.v1 import engine_pb2 as pb
from quire_proto.errors import ErrorCode, QuireError, invalid
from quire_proto.names import NAME_RULE, is_name

from quire_engine.core.lora import LoRARequest
from quire_engine.errors import LoRAError, LoRANotFoundError

log = logging.getLogger(__name__)

MAX_LORAS = 4096
"""Adapters that may be loaded at once. Each is a name in every router, however few are in memory."""


class LoRARegistry:
    """Loads and unloads adapters. ``check`` reads an adapter's folder on a separate thread and returns the adapter with
    its digest. ``model_names`` are the names of the model itself. ``load`` only reads below ``root``, if that is given.
    Use it on the event loop, except ``load_now``.

    ``on_change`` is called when the set of adapters changes, ``on_active`` when the set of adapters in use changes, and
    ``on_unused`` with the id of an unloaded adapter when its last request has ended.
    """

    def __init__(
        self, check: Callable[[LoRARequest], LoRARequest], model_names: list[str], root: Path | None = None
    ) -> None:
        self._check = check
        self._model_names = model_names
        self._root = None if root is None else root.resolve()
        self._loras: dict[str, LoRARequest] = {}
        self._given: set[LoRARequest] = set()  # at the start of the engine, by its flags
        self._last_id = 0
        self._loading = asyncio.Lock()
        self._in_use: Counter[LoRARequest] = Counter()
        self._released = asyncio.Event()
        self.on_change: Callable[[], object] = lambda: None
        self.on_active: Callable[[], object] = lambda: None
        self.on_unused: Callable[[int], object] = lambda _lora_id: None

    @property
    def num_loaded(self) -> int:
        """How many adapters requests may name. Thread-safe."""
        return len(self._loras)

    @property
    def active(self) -> list[str]:
        """The names of the adapters that requests use or wait for."""
        return [lora.lora_name for lora in self._in_use]

    def to_proto(self) -> pb.Loras:
        """Returns all adapters."""
        return pb.Loras(
            loras=[
                pb.Lora(name=name, digest=lora.digest, path="" if lora in self._given else str(lora.lora_path))
                for name, lora in self._loras.items()
            ]
        )

    def load_now(self, name: str, folder: Path) -> LoRARequest:
        """Loads an adapter before the engine serves. Raises ``LoRAError``, or ``QuireError`` like ``load``."""
        self._check_name(name)
        lora = self._check(LoRARequest(name, self._last_id + 1, folder))
        self._given.add(lora)
        return self._add(lora)

    async def load(self, name: str, folder: str, digest: bytes = b"") -> LoRARequest:
        """Loads an adapter. Raises ``QuireError``: INVALID if it cannot be served or does not have the requested
        ``digest``, CONFLICT if the name is taken, and OVERLOADED if there are too many.
        """
        async with self._loading:  # reads one folder at a time into memory
            self._check_name(name)
            if digest and (known := self._loras.get(name)) is not None and known.digest == digest:
                return known
            try:
                lora = await asyncio.to_thread(self._check_below_root, LoRARequest(name, self._last_id + 1, folder))
            except LoRANotFoundError as error:
                log.warning("the adapter %s is not loaded: %a", name, str(error))
                below = "" if self._root is None else f", below the {self._root} of --lora-root"
                message = f"There is no adapter at {folder!a} that this engine can read{below}; its log says why."
                raise invalid("lora_path", message) from None
            except LoRAError as error:
                raise invalid("lora_path", str(error)) from None
            if digest and lora.digest != digest:
                raise invalid("lora_path", f"{lora.lora_path} holds another adapter than the one that others have.")
            return self._add(lora)

    async def unload(self, name: str) -> None:
        """Unloads an adapter, then waits until its last request has ended. It is unloaded even if this coroutine is
        cancelled. Raises ``QuireError`` NOT_FOUND.
        """
        lora = self.find(name)
        del self._loras[name]
        log.info("the adapter %s is unloaded", name)
        self.on_change()
        if lora not in self._in_use:
            self.on_unused(lora.lora_int_id)
        while lora in self._in_use:
            self._released.clear()
            await self._released.wait()

    def find(self, name: str, digest: bytes = b"") -> LoRARequest:
        """Returns the adapter that a request names. Raises ``QuireError`` NOT_FOUND, also if the digest differs."""
        lora = self._loras.get(name)
        if lora is None or (digest and digest != lora.digest):
            raise QuireError(ErrorCode.NOT_FOUND, f"This engine has no adapter {name}.", param="model")
        return lora

    def acquire(self, lora: LoRARequest) -> None:
        """Keeps an adapter that ``find`` returned for a request, until ``release``."""
        self._in_use[lora] += 1
        if self._in_use[lora] == 1:
            self.on_active()

    def release(self, lora: LoRARequest) -> None:
        """Undoes one ``acquire``."""
        self._in_use[lora] -= 1
        if not self._in_use[lora]:
            del self._in_use[lora]
            self._released.set()
            self.on_active()
            if self._loras.get(lora.lora_name) != lora:
                self.on_unused(lora.lora_int_id)

    def _check_below_root(self, lora: LoRARequest) -> LoRARequest:
        """Calls ``check`` if the folder is below the root, after following links. A relative path is relative to the
        root.
        """
        if self._root is None:
            return self._check(lora)
        try:
            folder = (self._root / lora.lora_path).resolve()
        except (OSError, RuntimeError, ValueError):  # a loop of links, or an invalid name
            folder = Path("/")
        if not folder.is_relative_to(self._root):
            raise LoRANotFoundError(f"{lora.lora_path} is not below --lora-root.")
        return self._check(replace(lora, lora_path=folder))

    def _check_name(self, name: str) -> None:
        if not is_name(name):
            raise invalid("lora_name", f"An adapter's name has {NAME_RULE}.")
        if name in self._model_names:
            raise QuireError(ErrorCode.CONFLICT, f"{name} is the name of the model.", param="lora_name")

    def _add(self, lora: LoRARequest) -> LoRARequest:
        known = self._loras.get(lora.lora_name)
        if known is not None and (known.digest, known.lora_path) == (lora.digest, lora.lora_path):
            return known
        if known is not None:
            message = f"Another adapter is loaded as {lora.lora_name}: unload it first."
            raise QuireError(ErrorCode.CONFLICT, message, param="lora_name")
        if len(self._loras) >= MAX_LORAS:
            raise QuireError(ErrorCode.OVERLOADED, f"{MAX_LORAS} adapters are loaded; unload one.")
        self._last_id += 1
        self._loras[lora.lora_name] = lora
        log.info("the adapter %s is loaded from %s", lora.lora_name, lora.lora_path)
        self.on_change()
        return lora
