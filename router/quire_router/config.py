"""The router's settings: one class, filled from the command line and from ``QUIRE_ROUTER_…`` variables."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict
from quire_proto.settings import CommandSettings

from quire_router.admission.key import check_key
from quire_router.placement.settings import PolicyName

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def _split(value: Any) -> Any:
    """Comma-separated entries, as an environment variable holds them; a repeated flag adds entries."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        return entries
    return [part.strip() for entry in entries for part in entry.split(",") if part.strip()]


def _model(entry: str) -> str:
    name, _ = split_model(entry)
    if not _MODEL_NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a model: letters, digits, '.', '_', '-' and '/', at most 128")
    return entry


def _distinct(entries: list[str]) -> list[str]:
    names = [split_model(entry)[0] for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is given twice")
    return entries


def _address(entry: str) -> str:
    match = _ADDRESS.fullmatch(entry)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError(f"{entry!r} is not HOST:PORT")
    return entry


def _key(entry: SecretStr) -> SecretStr:
    check_key(entry.get_secret_value())
    return entry


def split_model(entry: str) -> tuple[str, Path]:
    """``NAME=FOLDER``, or ``FOLDER`` whose last part is the name."""
    name, separator, folder = entry.partition("=")
    if separator:
        return name, Path(folder)
    return Path(entry).resolve().name, Path(entry)


Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Models = Annotated[
    list[Annotated[str, AfterValidator(_model)]], NoDecode, BeforeValidator(_split), AfterValidator(_distinct)
]
Addresses = Annotated[list[Annotated[str, AfterValidator(_address)]], NoDecode, BeforeValidator(_split)]
Keys = Annotated[list[Annotated[SecretStr, AfterValidator(_key)]], NoDecode, BeforeValidator(_split)]


class Settings(CommandSettings):
    """Quire's router: OpenAI-style REST and gRPC in front of engines.

    Every flag can also be given as an environment variable: QUIRE_ROUTER_ and the flag's name in capitals with
    underscores, lists separated by commas.

    quire-router simulate --help is about trying requests on a simulated fleet.
    """

    model_config = SettingsConfigDict(env_prefix="QUIRE_ROUTER_", cli_prog_name="quire-router")
    metavars: ClassVar[Mapping[str, str]] = {
        "--model": "[NAME=]FOLDER",
        "--engine": "HOST:PORT",
        "--host": "ADDRESS",
        "--http-port": "PORT",
        "--grpc-port": "PORT",
        "--metrics-port": "PORT",
        "--redis-url": "URL",
        "--api-key": "KEY",
        "--tenants": "FILE",
    }

    model: Models = Field(min_length=1, description="Folder of a model that is served, and its name; repeatable.")
    engine: Addresses = Field(default=[], description="Address of an engine; repeatable.")
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    http_port: Port = Field(default=8000, description="Port of the REST API.")
    grpc_port: Port = Field(default=8001, description="Port of the gRPC API.")
    metrics_port: Port = Field(default=8002, description="Port of metrics and health.")
    workers: Annotated[int, Field(ge=1, le=256)] = Field(
        default=1, description="Processes that share the ports; more than one need --redis-url."
    )
    redis_url: SecretStr | None = Field(default=None, description="Where request state is kept; none: in memory.")
    api_key: Keys = Field(default=[], description="A key that clients must send; repeatable; none: open to all.")
    tenants: Path | None = Field(default=None, description="TOML or JSON that names tenants and their limits.")
    allow_priority: bool = Field(default=False, description="Let clients set the priority of their requests.")
    hold_timeout: Seconds = Field(default=10, description="Seconds that requests wait while no engine is ready.")
    max_queue_seconds: Seconds = Field(default=60, description="Seconds that requests wait for an engine with room.")
    max_queued_requests: Count = Field(default=512, description="Requests that wait for one model before 429.")
    max_queued_bytes: Count = Field(default=256 * 2**20, description="Bytes of what waits for one model before 429.")
    placement_policy: PolicyName = Field(default="cost", description="How an engine is chosen for a request.")
    max_affinity_wait: Annotated[float, Field(ge=0)] = Field(
        default=20, description="Seconds that a request may wait longer for the sake of what is cached."
    )
    debug_route: bool = Field(default=False, description="Say in x-quire-route where a request runs, and why.")
    max_body_bytes: Count = Field(default=4 * 2**20, description="Largest request body.")
    max_concurrent_requests: Count = Field(default=4096, description="Requests in progress before 429.")
    max_connections: Count = Field(default=8192, description="Open HTTP connections before 429, each port.")
    request_timeout: Seconds = Field(default=600, description="Seconds that one request may take.")
    slow_client_timeout: Seconds = Field(default=30, description="Seconds a client may leave its stream unread.")
    shutdown_timeout: Seconds = Field(default=25, description="Seconds that running requests get when stopping.")
    retention: Seconds = Field(default=3600, description="Seconds that finished requests are remembered.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level logged.")

    @model_validator(mode="after")
    def _workers_share(self) -> Self:
        if self.workers > 1 and self.redis_url is None:
            raise ValueError("--workers needs --redis-url: several processes know of each other through Redis.")
        return self

    @property
    def models(self) -> dict[str, Path]:
        """The folder of each model by its name."""
        return dict(split_model(entry) for entry in self.model)
