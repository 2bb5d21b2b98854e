"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as vLLM has them."""

from collections.abc import Awaitable, Callable
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field
from quire_proto.names import MAX_NAME, NAME_RULE, is_name

from quire_router.api.auth import Identity
from quire_router.api.request_limits import ReservedBody
from quire_router.api.rest.http import BodyLimits, HttpExchange, read_body
from quire_router.api.schemas.base import StrictModel
from quire_router.api.schemas.parameters import LOAD_LORA, UNLOAD_LORA, Table
from quire_router.api.service import ApiService, counting_rejections
from quire_router.core.errors import lora_updates_forbidden
from quire_router.engines.lora_updates import LoRAUpdater

_TEXT = ((b"content-type", b"text/plain; charset=utf-8"),)


def _check_name(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"it must have {NAME_RULE}")
    return name


Name = Annotated[str, AfterValidator(_check_name), Field(max_length=MAX_NAME)]


class LoadLoRABody(StrictModel):
    """An adapter's name, its folder as engines see it, and the model that it is for, if there are several."""

    foreign: ClassVar[Table] = LOAD_LORA

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    base_model_name: Name | None = None


class UnloadLoRABody(StrictModel):
    """An adapter's name."""

    foreign: ClassVar[Table] = UNLOAD_LORA

    lora_name: Name


class LoRAEndpoints:
    """Handlers of both routes. Where there are keys, they take one of a tenant with ``allow_lora_updates``."""

    def __init__(self, service: ApiService, updater: LoRAUpdater, limits: BodyLimits) -> None:
        self._service = service
        self._updater = updater
        self._limits = limits

    async def load(self, exchange: HttpExchange) -> None:
        """Loads an adapter at all engines, and answers once requests may name it."""
        await self._answer(exchange, "POST /v1/load_lora_adapter", self._load)

    async def unload(self, exchange: HttpExchange) -> None:
        """Unloads an adapter at all engines."""
        await self._answer(exchange, "POST /v1/unload_lora_adapter", self._unload)

    async def _answer(
        self, exchange: HttpExchange, name: str, update: Callable[[ReservedBody, Identity], Awaitable[str]]
    ) -> None:
        exchange.check_json_body(self._limits.max_bytes)
        with (
            self._service.request_scope(name, exchange.request_id, exchange.headers),
            self._service.bodies.reserve_incoming(exchange.caller.tenant, exchange.content_length) as body,
            counting_rejections(),
        ):
            if self._service.keys.required and not exchange.caller.policy.allow_lora_updates:
                raise lora_updates_forbidden()
            await read_body(exchange.receive, self._limits, body)
            message = await update(body, exchange.caller)
            await exchange.response.send(200, message.encode(), _TEXT)

    async def _load(self, body: ReservedBody, caller: Identity) -> str:
        request = await self._service.offload(caller, len(body), lambda: LoadLoRABody.from_json(body.detach()))
        caller.check_model(request.lora_name)
        if request.base_model_name is not None:
            caller.check_model(request.base_model_name)
        await self._updater.load(request.lora_name, request.lora_path, request.base_model_name)
        return f"Success: LoRA adapter '{request.lora_name}' added successfully."

    async def _unload(self, body: ReservedBody, caller: Identity) -> str:
        request = await self._service.offload(caller, len(body), lambda: UnloadLoRABody.from_json(body.detach()))
        caller.check_model(request.lora_name)
        await self._updater.unload(request.lora_name)
        return f"Success: LoRA adapter '{request.lora_name}' removed successfully."
