"""The router's settings: one class, filled from the command line and from ``QUIRE_ROUTER_…`` variables.

Also here: the Kubernetes labels of models, warnings about settings that may not be meant or that the machine does not
allow (none of them prevents a start), and the limit of file descriptors.
"""

import logging
import re
import resource
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict
from quire_proto.cli import CliSettings, ListenAddress
from quire_proto.engine_token import TokenFile
from quire_proto.extras import install_command
from quire_proto.local_hosts import ANY_HOST, CONTAINER_HOSTS, is_loopback
from quire_proto.logs import LogFormat
from quire_proto.tls import (
    CaFile,
    CertificateFile,
    CertKeyFiles,
    ClientTls,
    KeyFile,
    ServerTls,
    cert_key_files,
    check_cert_key,
    server_tls,
)
from quire_proto.units import Bytes, Seconds

from quire_router.admission.targets_file import MODEL_NAME
from quire_router.admission.tenants import check_key
from quire_router.admission.tenants_file import TenantsFile, read_tenants
from quire_router.api.auth import OidcSettings, check_issuer_address
from quire_router.clients.kube_client import KubeAccess
from quire_router.discovery.base import (
    Address,
    EngineSource,
    KubernetesService,
    Readiness,
    http_endpoint,
    parse_source,
)
from quire_router.placement.policies import PolicyName

if TYPE_CHECKING:
    from quire_router.clients.redis_client import RedisAccess

log = logging.getLogger(__name__)

_NOT_IN_A_LABEL = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_LABEL = 63  # characters
_MAX_DESCRIPTORS = 2**20  # more are not requested, whatever the hard limit is
_RESERVED_DESCRIPTORS = 256  # for engines, Redis and files
_AUTOSCALER_DESCRIPTORS = 768  # for each port of autoscalers: a relayed connection needs three
_MIN_CONNECTIONS = 16  # of a port
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LEASE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9.\[\]:_-]{1,260}")
_HOST = re.compile(r"[a-z0-9_.-]{1,253}|\[[0-9a-f:.]{2,45}\]")
_FORWARDED = re.compile(r"[A-Z]{3,7} (/[A-Za-z0-9._~:-]+)+")
_ENGINE_KEY = re.compile(r"[!-~]{1,512}")
_SERVER_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def _split(value: Any) -> Any:
    """The entries of a comma-separated list; a repeated flag adds entries."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        return entries
    return [item.strip() for entry in entries for item in entry.split(",") if item.strip()]


def _split_keys(value: Any) -> Any:
    """As ``_split``. An empty text is no list, as of a variable that was left empty; separators alone are a mistake."""
    keys = _split(value)
    if not keys and value not in ("", [""], []):
        raise ValueError("it names no key: leave it out to let everybody in")
    return keys


def _model(entry: str) -> str:
    name, _ = split_model(entry)
    if not MODEL_NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a model: letters, digits, '.', '_', '-' and '/', at most 128")
    return entry


def _distinct(entries: list[str]) -> list[str]:
    names = [split_model(entry)[0] for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is given twice")
    return entries


def _source(entry: str) -> str:
    source = parse_source(entry)
    if isinstance(source, KubernetesService):
        KubeAccess.of_environment()  # raises here, else each of several workers would, again and again
    return str(source)


def _once(entries: list[str]) -> list[str]:
    return list(dict.fromkeys(entries))


def _key(entry: SecretStr) -> SecretStr:
    check_key(entry.get_secret_value())
    return entry


def _engine_key(entry: SecretStr) -> SecretStr:
    if not _ENGINE_KEY.fullmatch(entry.get_secret_value()):
        raise ValueError("it has a character that no key has: only printable ASCII without spaces can be sent")
    return entry


def _server_name(entry: str) -> str:
    if not _SERVER_NAME.fullmatch(entry):
        raise ValueError(f"{entry!r} is not a host name")
    return entry


def _password_file(file: Path) -> Path:
    from quire_router.clients.redis_client import read_password  # imports the client of Redis

    read_password(file)
    return file


def _origin(entry: str) -> str:
    if entry != "*" and not _ORIGIN.fullmatch(entry):
        raise ValueError(f"{entry!r} is not an origin: scheme, host and perhaps a port, as https://chat.example, or *")
    return entry


def _host(entry: str) -> str:
    if entry != ANY_HOST and not _HOST.fullmatch(entry.lower()):
        raise ValueError(f"{entry!r} is not a host: a name or an address without a port, or *")
    return entry.lower().strip("[]")


def _forwarded(entry: str) -> str:
    if not _FORWARDED.fullmatch(entry):
        raise ValueError(f"{entry!r} is not a method and a path, as 'POST /tokenize'")
    return entry


def _namespace(entry: str) -> str:
    if not _NAMESPACE.fullmatch(entry):
        raise ValueError(f"{entry!r} is not the name of a namespace")
    return entry


def _lease(entry: str) -> str:
    if not _LEASE.fullmatch(entry):
        raise ValueError(f"{entry!r} is not the name of a Lease")
    return entry


def split_model(entry: str) -> tuple[str, Path]:
    """Name and folder of ``NAME=FOLDER``, or of ``FOLDER``, whose last component is the name."""
    name, separator, folder = entry.partition("=")
    if separator:
        return name, Path(folder)
    return Path(entry).resolve().name, Path(entry)


MAX_FALLBACKS = 3
"""Endpoints that the picker names behind the first: placement explains as many."""

Port = Annotated[int, Field(ge=0, le=65535)]
Period = Annotated[Seconds, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
MaxBytes = Annotated[Bytes, Field(ge=1)]
ServerName = Annotated[str, AfterValidator(_server_name)]
Models = Annotated[
    list[Annotated[str, AfterValidator(_model)]], NoDecode, BeforeValidator(_split), AfterValidator(_distinct)
]
Sources = Annotated[
    list[Annotated[str, AfterValidator(_source)]], NoDecode, BeforeValidator(_split), AfterValidator(_once)
]
PasswordFile = Annotated[Path, AfterValidator(_password_file)]
Origins = Annotated[list[Annotated[str, AfterValidator(_origin)]], NoDecode, BeforeValidator(_split)]
Hosts = Annotated[list[Annotated[str, AfterValidator(_host)]], NoDecode, BeforeValidator(_split)]
Forwarded = Annotated[list[Annotated[str, AfterValidator(_forwarded)]], NoDecode, BeforeValidator(_split)]
Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]
IssuerUrl = Annotated[str, AfterValidator(check_issuer_address)]
EngineKey = Annotated[SecretStr, AfterValidator(_engine_key)]
Keys = Annotated[list[Annotated[SecretStr, AfterValidator(_key)]], NoDecode, BeforeValidator(_split_keys)]


class Settings(CliSettings):
    """Quire's router: OpenAI-style REST and gRPC in front of engines.

    Every flag can also be given as an environment variable: QUIRE_ROUTER_ and the flag's name in capitals with
    underscores, lists separated by commas.

    quire-router simulate --help is about trying requests on a simulated fleet, quire-router usage --help about what
    tenants used.
    """

    model_config = SettingsConfigDict(env_prefix="QUIRE_ROUTER_", cli_prog_name="quire-router")
    foreign_flags: ClassVar[Mapping[str, str]] = {
        "--port": "--http-port and --grpc-port are the ports that clients use",
        "--served-model-name": "--model NAME=FOLDER names it",
        "--worker-urls": "use --engine",
        "--policy": "use --placement-policy",
    }
    metavars: ClassVar[Mapping[str, str]] = {
        "--model": "[NAME=]FOLDER",
        "--allowed-origins": "ORIGIN",
        "--allowed-hosts": "NAME",
        "--engine": "HOST:PORT|URL",
        "--engine-token-file": "FILE",
        "--engine-tls-ca": "FILE",
        "--engine-tls-cert": "FILE",
        "--engine-tls-key": "FILE",
        "--engine-tls-name": "NAME",
        "--host": "ADDRESS",
        "--http-port": "PORT",
        "--grpc-port": "PORT",
        "--metrics-port": "PORT",
        "--scaling-port": "PORT",
        "--scaling-cert": "FILE",
        "--scaling-key": "FILE",
        "--scaling-namespace": "NAME",
        "--scaling-client-ca": "FILE",
        "--scaling-client-name": "NAME",
        "--pod-deletion-cost-lease": "NAME",
        "--keda-port": "PORT",
        "--keda-cert": "FILE",
        "--keda-key": "FILE",
        "--keda-client-ca": "FILE",
        "--picker-port": "PORT",
        "--picker-cert": "FILE",
        "--picker-key": "FILE",
        "--picker-client-ca": "FILE",
        "--picker-forward": "'METHOD /PATH'",
        "--redis-url": "URL",
        "--redis-username": "NAME",
        "--redis-password-file": "FILE",
        "--api-key": "KEY",
        "--engine-api-key": "KEY",
        "--tenants": "FILE",
        "--model-targets": "FILE",
        "--oidc-issuer-url": "URL",
        "--oidc-client-id": "NAME",
        "--oidc-tenant-claim": "NAME",
        "--oidc-jwks-url": "URL",
        "--oidc-ca-file": "FILE",
    }

    model: Models = Field(min_length=1, description="Folder of a model that is served, and its name; repeatable.")
    model_targets: Path | None = Field(
        default=None,
        description="TOML or JSON file with names that lead to other models, with weights and shadows; read again "
        "when it changes.",
    )
    engine: Sources = Field(
        default=[],
        description="HOST:PORT of an engine, or a source of engines: dns://NAME:PORT or "
        "kubernetes://[NAMESPACE/]SERVICE[:PORT]. For other servers put vllm+, sglang+ or openai+ in front, as in "
        "vllm+http://HOST:PORT. Repeatable.",
    )
    engine_api_key: EngineKey | None = Field(
        default=None, description="Key to send to vLLM, SGLang and other servers; none by default."
    )
    engine_kv_events_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="Port on which vLLM servers publish KV events; by default they are not read."
    )
    engine_kv_events_replay_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="Port on which vLLM servers repeat KV events; without it, missed events stay unknown."
    )
    engine_dns_period: Annotated[Seconds, Field(gt=0, le=60)] = Field(
        default=1, description="Longest time between two lookups of a dns:// name, in seconds."
    )
    engine_token_file: TokenFile | None = Field(
        default=None,
        description="File with the token for Quire's engines, in its first line; read again when it changes. See "
        "docs/tls.md.",
    )
    engine_readiness: Readiness = Field(
        default="hint",
        description="Which engines get no new requests while Kubernetes reports them as not ready: none (hint), "
        "servers other than Quire's (external), or all.",
    )
    engine_tls_ca: CaFile | None = Field(
        default=None,
        description="PEM file of the authorities that sign engines' certificates; without it, connections are plain "
        "text.",
    )
    engine_tls_cert: CertificateFile | None = Field(
        default=None, description="PEM file of the certificate to show to engines; none by default."
    )
    engine_tls_key: KeyFile | None = Field(default=None, description="PEM file of its key.")
    engine_tls_name: ServerName | None = Field(
        default=None, description="Name to expect in engines' certificates; by default the host of the address."
    )
    engine_tls_optional: bool = Field(
        default=False,
        description="Use plain text with engines that have no TLS yet, during a change; see docs/tls.md.",
    )
    host: ListenAddress = Field(default="127.0.0.1", description="Address to listen on.")
    http_port: Port = Field(default=8000, description="Port of the REST API.")
    grpc_port: Port = Field(default=8001, description="Port of the gRPC API.")
    allowed_origins: Origins = Field(
        default=[],
        description="Site whose pages may use the API from a browser (CORS), such as https://chat.example, or * for "
        "all. Repeatable.",
    )
    allowed_hosts: Hosts = Field(
        default=list(CONTAINER_HOSTS),
        description="Host name, besides localhost and loopback addresses, that clients may use for a router without "
        "keys on a loopback address; * allows all. Repeatable. See docs/gateways.md.",
    )
    metrics_port: Port = Field(default=8002, description="Port of metrics and health.")
    scaling_port: Port | None = Field(
        default=None, description="Port of the external.metrics.k8s.io API for autoscalers, over TLS; off by default."
    )
    scaling_cert: CertificateFile | None = Field(default=None, description="PEM file of that port's certificate.")
    scaling_key: KeyFile | None = Field(default=None, description="PEM file of its key.")
    scaling_namespace: Annotated[str, AfterValidator(_namespace)] | None = Field(
        default=None, description="Namespace whose autoscalers may read the load; by default the pod's own."
    )
    scaling_client_ca: CaFile | None = Field(
        default=None,
        description="PEM file of the authorities for clients' certificates; by default those that the cluster "
        "publishes.",
    )
    scaling_client_name: Names = Field(
        default=[],
        description="Common name that a client's certificate must have, with --scaling-client-ca; any by default. "
        "Repeatable.",
    )
    pod_deletion_cost_lease: Annotated[str, AfterValidator(_lease)] | None = Field(
        default=None,
        description="Lease that elects the router which marks engines' pods, so that Kubernetes deletes the cheapest "
        "first; by default no pod is marked.",
    )
    keda_port: Port | None = Field(
        default=None, description="Port of KEDA's external scaler, over gRPC; off by default."
    )
    keda_cert: CertificateFile | None = Field(
        default=None, description="PEM file of that port's certificate; without it, the port is plain text."
    )
    keda_key: KeyFile | None = Field(default=None, description="PEM file of its key.")
    keda_client_ca: CaFile | None = Field(
        default=None,
        description="PEM file of the authorities that sign KEDA's certificate; without it, no client certificate is "
        "required.",
    )
    keda_insecure: bool = Field(
        default=False,
        description="Serve that port without certificates on addresses other than loopback. Anyone who reaches it "
        "learns how busy models are, so let a network policy admit KEDA only.",
    )
    picker_port: Port | None = Field(
        default=None,
        description="Port of the endpoint picker for gateways of the Gateway API Inference Extension, over gRPC; off "
        "by default. See docs/gateways.md.",
    )
    picker_secure_serving: bool = Field(
        default=True, description="Serve that port over TLS, as gateways expect, instead of in plain text."
    )
    picker_cert: CertificateFile | None = Field(
        default=None, description="PEM file of its certificate; by default one is made at each start."
    )
    picker_key: KeyFile | None = Field(default=None, description="PEM file of its key.")
    picker_client_ca: CaFile | None = Field(
        default=None,
        description="PEM file of the authorities that sign gateways' certificates, which are required.",
    )
    picker_insecure: bool = Field(
        default=False,
        description="Serve that port to anyone who reaches it, without client certificates. Use this only where a "
        "mesh or a network policy admits gateways only.",
    )
    picker_forward: Forwarded = Field(
        default=[],
        description="Further requests that gateways forward, besides the API's own, such as 'POST /tokenize'. "
        "Repeatable.",
    )
    picker_fallbacks: Annotated[int, Field(ge=0, le=MAX_FALLBACKS)] = Field(
        default=0,
        description="Number of endpoints to name after the best one, for gateways that read several.",
    )
    workers: Annotated[int, Field(ge=1, le=256)] = Field(
        default=1, description="Processes that share the ports; more than one needs --redis-url."
    )
    redis_url: SecretStr | None = Field(
        default=None,
        description="Redis server in which routers store and share request state; by default --journal-file or memory "
        "is used.",
    )
    journal_file: Path | None = Field(
        default=None,
        description="SQLite file in which a single router stores request state instead of Redis; by default memory is "
        "used.",
    )
    journal_max_bytes: Annotated[Bytes, Field(ge=2**20, le=2**43)] = Field(
        default=2**32, description="Largest size of --journal-file; the oldest records are deleted early to keep it."
    )
    redis_username: Annotated[str, Field(pattern=r"^\S+$")] | None = Field(
        default=None, description="User name for Redis; by default the URL's, or Redis' default user."
    )
    redis_password_file: PasswordFile | None = Field(
        default=None, description="File with the password for Redis, read for each connection; by default the URL's."
    )
    api_key: Keys = Field(
        default=[],
        description="Key that clients must send; repeatable. Without a key, --tenants and an issuer, the API is open "
        "to all.",
    )
    require_key: bool = Field(
        default=False,
        description="Refuse to start if no key would be required, for example because a key's variable is empty.",
    )
    tenants: Path | None = Field(
        default=None, description="TOML or JSON file with tenants, their keys and limits; read again when it changes."
    )
    oidc_issuer_url: IssuerUrl | None = Field(
        default=None, description="OpenID Connect issuer whose tokens are accepted like keys; off by default."
    )
    oidc_client_id: str | None = Field(default=None, description="Audience that tokens must have.")
    oidc_tenant_claim: Annotated[str, Field(min_length=1)] = Field(
        default="sub", description="Claim that identifies the caller."
    )
    oidc_jwks_url: IssuerUrl | None = Field(
        default=None, description="Address of the issuer's keys; by default as its configuration says."
    )
    oidc_ca_file: CaFile | None = Field(
        default=None, description="PEM file of the authority for the issuer's certificate; by default the system's."
    )
    allow_priority: bool = Field(default=False, description="Let clients set the priority of their requests.")
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="Whether a model's generation_config.json sets the sampling defaults of requests.",
    )
    unknown_parameters: Literal["warn", "refuse"] = Field(
        default="warn",
        description="Whether unknown parameters are ignored and named in a header (warn), or answered with 400 "
        "(refuse).",
    )
    allow_special_tokens_in_content: bool = Field(
        default=False, description="Read special tokens in messages as control tokens instead of text."
    )
    hold_timeout: Period = Field(default=10, description="Seconds that requests wait while no engine is ready.")
    max_queue_seconds: Period = Field(default=60, description="Seconds that requests wait for an engine with room.")
    sleep_after: Period | None = Field(
        default=None, description="Seconds without a request after which engines sleep; never by default."
    )
    min_awake: Annotated[int, Field(ge=0)] = Field(
        default=1, description="Engines of each model that --sleep-after keeps awake."
    )
    target_load: Count | None = Field(
        default=None,
        description="Requests per awake engine, as autoscalers count them, above which sleeping engines wake up; by "
        "default they do so only when requests find no room.",
    )
    max_queued_requests: Count = Field(default=512, description="Requests that may wait for one model; more get a 429.")
    max_queued_bytes: MaxBytes = Field(
        default=256 * 2**20, description="Bytes that may wait for one model; more get a 429."
    )
    placement_policy: PolicyName = Field(default="cost", description="How an engine is chosen for a request.")
    max_affinity_wait: Annotated[Seconds, Field(ge=0)] = Field(
        default=20, description="Seconds that a request may wait longer to use a cached prefix."
    )
    debug_route: bool = Field(default=False, description="Explain each placement in the header x-quire-route.")
    page: bool = Field(default=True, description="Serve the web page at /, and the stream that it reads.")
    allow_fleet: bool = Field(default=False, description="Let every key view the fleet, on the page and in its stream.")
    allow_lora_updates: bool = Field(
        default=False,
        description="Let clients load and unload adapters on all engines through /v1/load_lora_adapter; see "
        "docs/models.md.",
    )
    max_body_bytes: MaxBytes = Field(default=4 * 2**20, description="Largest request body.")
    max_inflight_body_bytes: MaxBytes = Field(
        default=128 * 2**20, description="Bytes of request bodies that may be read and checked at once; more get a 429."
    )
    max_concurrent_requests: Count = Field(
        default=4096, description="Requests that may be in progress; more get a 429."
    )
    max_connections: Count = Field(default=8192, description="Open HTTP connections per port; more get a 429.")
    max_peer_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5,
        description="Share of a full port's connections above which an address loses its own idle ones first.",
    )
    request_timeout: Period = Field(default=600, description="Seconds that a request may take.")
    stall_timeout: Period = Field(
        default=30,
        description="Seconds after which a server other than Quire's is set aside if it answers polls and none of its "
        "streams advances; ten of its steps if that is longer.",
    )
    slow_client_timeout: Period = Field(default=30, description="Seconds that a client may leave its stream unread.")
    sse_keepalive_seconds: Annotated[Seconds, Field(ge=0, allow_inf_nan=False)] = Field(
        default=15, description="Seconds of silence after which a stream gets a comment; 0 turns this off."
    )
    grpc_keepalive_seconds: Annotated[Seconds, Field(ge=0, allow_inf_nan=False)] = Field(
        default=15, description="Seconds of silence after which a gRPC stream gets an empty message; 0 turns this off."
    )
    shutdown_delay: Annotated[Seconds, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0,
        description="Seconds after SIGTERM in which new requests are still accepted, while /ready already fails.",
    )
    shutdown_timeout: Period = Field(default=25, description="Seconds that running requests get to end after SIGTERM.")
    retention: Period = Field(default=3600, description="Seconds that finished requests are stored.")
    responses_retention: Period = Field(
        default=21_600,
        description="Seconds that finished responses of the Responses API, and conversations after their last change, "
        "are stored.",
    )
    max_tenant_response_bytes: MaxBytes = Field(
        default=2 * 2**30, description="Bytes of all stored responses of a tenant, without their answers."
    )
    max_tenant_conversations: Count = Field(default=10_000, description="Conversations of a tenant.")
    max_tenant_conversation_bytes: MaxBytes = Field(
        default=256 * 2**20, description="Bytes of all conversations of a tenant."
    )
    usage_retention: Period = Field(default=400 * 86_400, description="Seconds that tenants' hourly usage is stored.")
    max_file_bytes: MaxBytes = Field(default=100 * 2**20, description="Largest file for a batch.")
    max_tenant_file_bytes: MaxBytes = Field(
        default=2**30,
        description="Bytes of a tenant's files and uploads, plus twice the answers of its running batches.",
    )
    file_retention: Annotated[Seconds, Field(ge=3600, allow_inf_nan=False)] = Field(
        default=604_800, description="Seconds that files and batches are stored."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged."
    )
    log_format: LogFormat = Field(default="text", description="Format of log lines: text for people, or JSON.")

    @model_validator(mode="after")
    def _workers_share(self) -> Self:
        if self.workers > 1 and self.redis_url is None:
            raise ValueError("--workers needs --redis-url: several processes know of each other through Redis.")
        return self

    @model_validator(mode="after")
    def _one_journal(self) -> Self:
        if self.redis_url is not None and self.journal_file is not None:
            raise ValueError("--journal-file and --redis-url exclude each other: request state is kept in one place.")
        return self

    @model_validator(mode="after")
    def _redis_can_be_found(self) -> Self:
        if self.redis is None and self.redis_username is not None:
            raise ValueError("--redis-username needs --redis-url: it says where Redis is.")
        if self.redis is None and self.redis_password_file is not None:
            raise ValueError("--redis-password-file needs --redis-url: it says where Redis is.")
        return self

    @model_validator(mode="after")
    def _engine_tls_can_be_used(self) -> Self:
        if self.engine_tls is not None:
            check_cert_key(self.engine_tls.identity, "--engine-tls")
        return self

    @model_validator(mode="after")
    def _kv_events_can_be_read(self) -> Self:
        if self.engine_kv_events_port is None:
            if self.engine_kv_events_replay_port is not None:
                raise ValueError("--engine-kv-events-replay-port needs --engine-kv-events-port: it fills gaps of that.")
            return self
        if not any(entry.startswith("vllm+") for entry in self.engine):
            raise ValueError("--engine-kv-events-port needs servers of vLLM, such as --engine vllm+http://HOST:PORT.")
        if find_spec("zmq") is None or find_spec("msgspec") is None:
            raise ValueError(
                f"--engine-kv-events-port needs two packages: {install_command('quire-router', 'kv-events')}"
            )
        return self

    @model_validator(mode="after")
    def _autoscalers_can_be_told(self) -> Self:
        if self.scaling_port is not None and self.scaling_identity is None:
            raise ValueError("--scaling-port needs --scaling-cert and --scaling-key: it is asked over TLS only.")
        if self.scaling_client_name and self.scaling_client_ca is None:
            raise ValueError("--scaling-client-name needs --scaling-client-ca: else the cluster says who may ask.")
        check_cert_key(self.scaling_identity, "--scaling")
        if self.keda_tls is not None:
            check_cert_key(self.keda_tls.identity, "--keda")
        if self.keda_insecure and self.keda_client_ca is not None:
            raise ValueError("--keda-insecure and --keda-client-ca exclude each other: a certificate is needed or not.")
        is_closed = self.keda_client_ca is not None or is_loopback(self.host)
        if self.keda_port is not None and not (is_closed or self.keda_insecure):
            raise ValueError(
                "--keda-port needs --keda-client-ca, whose authorities sign KEDA's certificate, or --keda-insecure "
                "where KEDA alone reaches the port: others would learn how busy models are."
            )
        if self.is_asked_for_load:
            labels_of(self.models)
        return self

    @model_validator(mode="after")
    def _pods_can_be_marked(self) -> Self:
        found = any(isinstance(parse_source(entry), KubernetesService) for entry in self.engine)
        if self.pod_deletion_cost_lease is not None and not found:
            raise ValueError(
                "--pod-deletion-cost-lease needs engines that Kubernetes names, such as --engine kubernetes://SERVICE."
            )
        return self

    @model_validator(mode="after")
    def _servers_can_be_picked(self) -> Self:
        if self.picker_tls is not None:
            check_cert_key(self.picker_tls.identity, "--picker")
            if not self.picker_secure_serving:
                raise ValueError("--picker-cert needs --picker-secure-serving: plain text has no certificate.")
        if self.picker_port is None:
            return self
        if self.workers > 1 and not self.picker_port:
            raise ValueError("--picker-port must not be 0 with --workers: they share the port.")
        if not any(can_be_picked(parse_source(entry)) for entry in self.engine):
            raise ValueError(
                "--picker-port needs servers that speak HTTP at an IP address, such as --engine "
                "vllm+kubernetes://SERVICE or vllm+http://IP:PORT: requests for Quire's own engines go through this "
                "router's ports."
            )
        if self.picker_insecure and self.picker_client_ca is not None:
            raise ValueError(
                "--picker-insecure and --picker-client-ca exclude each other: a certificate is needed or not."
            )
        if not self.picker_insecure and self.picker_client_ca is None:
            raise ValueError(
                "--picker-port needs --picker-client-ca, whose authorities sign gateways' certificates, or "
                "--picker-insecure where gateways alone reach the port: others would learn of servers and try keys."
            )
        return self

    @model_validator(mode="after")
    def _tokens_can_be_checked(self) -> Self:
        if self.oidc_issuer_url is not None and not self.oidc_client_id:
            raise ValueError("--oidc-issuer-url needs --oidc-client-id: else tokens for anybody would be accepted.")
        if self.oidc_issuer_url is None and (self.oidc_client_id or self.oidc_jwks_url or self.oidc_ca_file):
            raise ValueError("--oidc-client-id, --oidc-jwks-url and --oidc-ca-file need --oidc-issuer-url.")
        return self

    @model_validator(mode="after")
    def _keys_are_there_where_they_must_be(self) -> Self:
        if self.require_key and not (self.api_key or self.tenants or self.oidc_issuer_url):
            raise ValueError(
                "--require-key needs --api-key, --tenants or --oidc-issuer-url: everybody would be let in."
            )
        if "scaling_client_name" in self.model_fields_set and not self.scaling_client_name:
            raise ValueError("--scaling-client-name is empty, so that any client may ask: name one, or leave it out.")
        return self

    def read_tenants(self) -> TenantsFile | None:
        """Returns the tenants' file; None without one. Raises ``SettingsFileError`` for one that cannot be used, by
        itself or with these settings.
        """
        if self.tenants is None:
            return None
        return read_tenants(
            self.tenants, has_keys=bool(self.api_key), must_close=self.require_key, has_issuer=self.oidc is not None
        )

    @property
    def oidc(self) -> OidcSettings | None:
        """Whose tokens are accepted; None: nobody's."""
        if self.oidc_issuer_url is None:
            return None
        return OidcSettings(
            self.oidc_issuer_url,
            self.oidc_client_id or "",
            self.oidc_tenant_claim,
            self.oidc_jwks_url,
            self.oidc_ca_file,
        )

    @property
    def is_for_this_machine(self) -> bool:
        """Whether only this machine reaches the ports, or the operator says which names they are asked for."""
        return is_loopback(self.host) or "allowed_hosts" in self.model_fields_set

    @property
    def scaling_identity(self) -> CertKeyFiles | None:
        """Certificate and key of ``--scaling-port``. Raises ``ValueError`` if one of them is missing."""
        return cert_key_files(self.scaling_cert, self.scaling_key, "--scaling")

    @property
    def keda_tls(self) -> ServerTls | None:
        """TLS of ``--keda-port``; None for plain text. Raises ``ValueError`` if certificate or key is missing."""
        return server_tls(self.keda_cert, self.keda_key, self.keda_client_ca, "--keda")

    @property
    def picker_tls(self) -> ServerTls | None:
        """Files of ``--picker-port``; None without any. Raises ``ValueError`` if certificate or key is missing."""
        return server_tls(self.picker_cert, self.picker_key, self.picker_client_ca, "--picker")

    @property
    def is_asked_for_load(self) -> bool:
        """Whether this router serves autoscalers."""
        return self.scaling_port is not None or self.keda_port is not None

    @property
    def redis(self) -> "RedisAccess | None":
        """Where request state is kept; None: in memory. Raises ``ValueError`` if it is no URL, or names a user or
        password twice.
        """
        if self.redis_url is None:
            return None
        from quire_router.clients.redis_client import RedisAccess  # a tenth of a start without Redis

        return RedisAccess(self.redis_url.get_secret_value(), self.redis_username, self.redis_password_file)

    @property
    def engine_tls(self) -> ClientTls | None:
        """TLS of connections to engines; None for plain text. Raises ``ValueError`` if a part of it is missing."""
        identity = cert_key_files(self.engine_tls_cert, self.engine_tls_key, "--engine-tls")
        if self.engine_tls_ca is not None:
            return ClientTls(self.engine_tls_ca, identity, self.engine_tls_name, self.engine_tls_optional)
        if identity is not None or self.engine_tls_name is not None or self.engine_tls_optional:
            raise ValueError("TLS to engines needs --engine-tls-ca: without it everything would be sent in plain text.")
        return None

    @property
    def models(self) -> dict[str, Path]:
        """The folder of each model by its name."""
        return dict(split_model(entry) for entry in self.model)


def can_be_picked(source: EngineSource) -> bool:
    """Whether gateways could send requests to engines of a source."""
    if isinstance(source, Address):
        return http_endpoint(source.address) is not None
    return bool(source.kind)


def label_of(model: str) -> str:
    """The model's name as the value of a Kubernetes label: a character that a label cannot have, such as ``/``, becomes
    ``_``, and the name is cut to 63 characters of which the last is a letter or a digit.
    """
    return _NOT_IN_A_LABEL.sub("_", model)[:_MAX_LABEL].rstrip("_.-")


def labels_of(models: Iterable[str]) -> dict[str, str]:
    """The label of each model. Raises ``ValueError`` if two models would have the same."""
    labels: dict[str, str] = {}
    for model in models:
        label = label_of(model)
        for other, taken in labels.items():
            if taken == label:
                raise ValueError(f"{other!r} and {model!r} would both be {label!r} as the label of a metric")
        labels[model] = label
    return labels


def log_startup_warnings(settings: Settings, targets: Collection[str] = ()) -> None:
    """Logs warnings about the settings, once for all workers; ``targets`` are the names that have some. Raises
    ``SettingsFileError``.
    """
    file = settings.read_tenants() or TenantsFile(open=True)
    open_to_all = file.open and not settings.api_key and settings.oidc is None
    if open_to_all and not is_loopback(settings.host):
        log.warning("no API key is configured: everyone who can reach this port may use the service")
    if not settings.engine:
        log.warning("no --engine is given: requests wait for one, and are then refused")
    fitting = connections_within(settings)
    if "max_connections" in settings.model_fields_set and fitting < settings.max_connections:
        message = "the limit of %d file descriptors leaves %d connections to each port, less than --max-connections %d"
        log.warning(message, _descriptors(), fitting, settings.max_connections)
    for entry in settings.engine if settings.picker_port is not None else ():
        if not can_be_picked(parse_source(entry)):
            log.warning("cannot send gateways to %s: it has no address for HTTP in plain text", entry)
    for tenant, model in file.unknown_models({*settings.models, *targets}):
        log.warning("%s: %s may use %r, which is not served here", settings.tenants, tenant or "the default", model)


def raise_descriptor_limit() -> None:
    """Raises the soft limit of this process, and of those that it starts, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a warning says what is left
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_within(settings: Settings) -> int:
    """``--max-connections``, or fewer if this process may not open enough file descriptors for that on all ports: more
    connections get an error response then, or replace an idle one.
    """
    autoscalers = sum(port is not None for port in (settings.scaling_port, settings.keda_port))
    left = _descriptors() - _RESERVED_DESCRIPTORS - _AUTOSCALER_DESCRIPTORS * autoscalers
    ports = 3 if settings.workers == 1 else 2  # the metrics port of workers is their supervisor's
    return min(settings.max_connections, max(_MIN_CONNECTIONS, left // ports))


def _descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
