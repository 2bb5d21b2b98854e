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
        description="TOML or JSON that names models as targets of other names, with weights and shadows, read again "
        "when it is replaced.",
    )
    engine: Sources = Field(
        default=[],
        description="HOST:PORT of an engine, or where engines are found: dns://NAME:PORT or "
        "kubernetes://[NAMESPACE/]SERVICE[:PORT]; of another's with vllm+, sglang+ or openai+ before it, as "
        "vllm+http://HOST:PORT; repeatable.",
    )
    engine_api_key: EngineKey | None = Field(
        default=None, description="The key that vLLM, SGLang and other servers ask for; none: none is sent."
    )
    engine_kv_events_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="Port on which servers of vLLM publish their KV events; none: they are not read."
    )
    engine_kv_events_replay_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="Port on which servers of vLLM repeat KV events; none: what was missed stays unknown."
    )
    engine_dns_period: Annotated[Seconds, Field(gt=0, le=60)] = Field(
        default=1, description="Seconds at most between two lookups of a dns:// name."
    )
    engine_token_file: TokenFile | None = Field(
        default=None,
        description="File with the token that Quire's engines ask for, the first line of several; read again when it "
        "changes; see docs/tls.md.",
    )
    engine_readiness: Readiness = Field(
        default="hint",
        description="Which engines get nothing new while Kubernetes says that they are not ready: none (hint), "
        "servers that are not Quire's (external), or all.",
    )
    engine_tls_ca: CaFile | None = Field(
        default=None, description="PEM file of the authorities that sign engines' certificates; none: plain text."
    )
    engine_tls_cert: CertificateFile | None = Field(
        default=None, description="PEM file of the certificate that engines get; none: no certificate is sent."
    )
    engine_tls_key: KeyFile | None = Field(default=None, description="PEM file of its key.")
    engine_tls_name: ServerName | None = Field(
        default=None, description="The name that engines' certificates are checked for; none: the host of the address."
    )
    engine_tls_optional: bool = Field(
        default=False,
        description="Speak plain text to engines without TLS, while they change from one to the other; see "
        "docs/tls.md.",
    )
    host: ListenAddress = Field(default="127.0.0.1", description="Address to listen on.")
    http_port: Port = Field(default=8000, description="Port of the REST API.")
    grpc_port: Port = Field(default=8001, description="Port of the gRPC API.")
    allowed_origins: Origins = Field(
        default=[],
        description="A site whose pages may use the API in browsers (CORS), as https://chat.example; * is every site; "
        "repeatable.",
    )
    allowed_hosts: Hosts = Field(
        default=list(CONTAINER_HOSTS),
        description="A name, besides localhost and loopback addresses, under which a service on a loopback address may "
        "be asked without keys; * is every name; repeatable; see docs/gateways.md.",
    )
    metrics_port: Port = Field(default=8002, description="Port of metrics and health.")
    scaling_port: Port | None = Field(
        default=None, description="Port of external.metrics.k8s.io, for autoscalers, over TLS; none: not served."
    )
    scaling_cert: CertificateFile | None = Field(default=None, description="PEM file of that port's certificate.")
    scaling_key: KeyFile | None = Field(default=None, description="PEM file of its key.")
    scaling_namespace: Annotated[str, AfterValidator(_namespace)] | None = Field(
        default=None, description="The namespace whose autoscalers get the load; none: the pod's own."
    )
    scaling_client_ca: CaFile | None = Field(
        default=None,
        description="PEM file of the authorities of clients' certificates; none: those that the cluster publishes.",
    )
    scaling_client_name: Names = Field(
        default=[],
        description="Common name of a client's certificate, with --scaling-client-ca; repeatable; none: any.",
    )
    pod_deletion_cost_lease: Annotated[str, AfterValidator(_lease)] | None = Field(
        default=None,
        description="Lease of the router that marks the engines' pods, so that those go first whose end costs least; "
        "none: no pod is marked.",
    )
    keda_port: Port | None = Field(
        default=None, description="Port of KEDA's external scaler, over gRPC; none: not served."
    )
    keda_cert: CertificateFile | None = Field(
        default=None, description="PEM file of that port's certificate; none: plain text."
    )
    keda_key: KeyFile | None = Field(default=None, description="PEM file of its key.")
    keda_client_ca: CaFile | None = Field(
        default=None,
        description="PEM file of the authorities that sign KEDA's certificate; none: no certificate is required.",
    )
    keda_insecure: bool = Field(
        default=False,
        description="Tell anyone who reaches that port how busy models are, at an address that is not loopback: where "
        "a network policy lets KEDA alone reach it.",
    )
    picker_port: Port | None = Field(
        default=None,
        description="Port of the endpoint picker, which gateways of the Gateway API Inference Extension ask over gRPC; "
        "none: not served; see docs/gateways.md.",
    )
    picker_secure_serving: bool = Field(
        default=True, description="Serve that port over TLS, as gateways expect; otherwise in plain text."
    )
    picker_cert: CertificateFile | None = Field(
        default=None, description="PEM file of its certificate; none: one that is made for each start."
    )
    picker_key: KeyFile | None = Field(default=None, description="PEM file of its key.")
    picker_client_ca: CaFile | None = Field(
        default=None,
        description="PEM file of the authorities that sign gateways' certificates, which they need.",
    )
    picker_insecure: bool = Field(
        default=False,
        description="Answer anyone who reaches that port, without a certificate: where a mesh or a network policy lets "
        "gateways alone reach it.",
    )
    picker_forward: Forwarded = Field(
        default=[],
        description="Requests that gateways send on besides the API's own, as 'POST /tokenize'; repeatable.",
    )
    picker_fallbacks: Annotated[int, Field(ge=0, le=MAX_FALLBACKS)] = Field(
        default=0,
        description="Endpoints that are named behind the best one, for gateways that read more than one.",
    )
    workers: Annotated[int, Field(ge=1, le=256)] = Field(
        default=1, description="Processes that share the ports; more than one need --redis-url."
    )
    redis_url: SecretStr | None = Field(
        default=None, description="Redis, where routers keep and share request state; none: --journal-file, or memory."
    )
    journal_file: Path | None = Field(
        default=None, description="SQLite file where one router keeps request state, instead of Redis; none: memory."
    )
    journal_max_bytes: Annotated[Bytes, Field(ge=2**20, le=2**43)] = Field(
        default=2**32, description="Largest --journal-file, for which the oldest records go before their time."
    )
    redis_username: Annotated[str, Field(pattern=r"^\S+$")] | None = Field(
        default=None, description="User of Redis; none: the one in the URL, or the default user."
    )
    redis_password_file: PasswordFile | None = Field(
        default=None, description="File with the password of Redis, read for each connection; none: the one in the URL."
    )
    api_key: Keys = Field(
        default=[],
        description="A key that clients must send; repeatable; without one, --tenants and an issuer: open to all.",
    )
    require_key: bool = Field(
        default=False, description="Do not start where no key would be needed, as where the variable of a key is empty."
    )
    tenants: Path | None = Field(
        default=None, description="TOML or JSON that names tenants and their limits, read again when it is replaced."
    )
    oidc_issuer_url: IssuerUrl | None = Field(
        default=None, description="Issuer of tokens (OpenID Connect) that are taken as keys are; none: keys alone."
    )
    oidc_client_id: str | None = Field(default=None, description="The audience that tokens must be for.")
    oidc_tenant_claim: Annotated[str, Field(min_length=1)] = Field(
        default="sub", description="Claim of tokens that says who a caller is."
    )
    oidc_jwks_url: IssuerUrl | None = Field(
        default=None, description="Where the issuer's keys are; none: where its configuration says."
    )
    oidc_ca_file: CaFile | None = Field(
        default=None, description="Authority of the issuer's certificate; none: the system's."
    )
    allow_priority: bool = Field(default=False, description="Let clients set the priority of their requests.")
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="Whether the sampling that a model's generation_config.json recommends is the default of requests.",
    )
    unknown_parameters: Literal["warn", "refuse"] = Field(
        default="warn", description="Whether unknown parameters are ignored and named in a header, or are a 400."
    )
    allow_special_tokens_in_content: bool = Field(
        default=False, description="Read special tokens in messages as control tokens; otherwise they are text."
    )
    hold_timeout: Period = Field(default=10, description="Seconds that requests wait while no engine is ready.")
    max_queue_seconds: Period = Field(default=60, description="Seconds that requests wait for an engine with room.")
    sleep_after: Period | None = Field(
        default=None, description="Seconds without a request after which engines go to sleep; none: never."
    )
    min_awake: Annotated[int, Field(ge=0)] = Field(
        default=1, description="Engines of each model that --sleep-after leaves awake."
    )
    target_load: Count | None = Field(
        default=None,
        description="Requests that each awake engine is meant to have, as autoscalers have it: sleeping engines are "
        "woken up for more; none: only when requests find no room.",
    )
    max_queued_requests: Count = Field(default=512, description="Requests that wait for one model before 429.")
    max_queued_bytes: MaxBytes = Field(default=256 * 2**20, description="Bytes of what waits for one model before 429.")
    placement_policy: PolicyName = Field(default="cost", description="How an engine is chosen for a request.")
    max_affinity_wait: Annotated[Seconds, Field(ge=0)] = Field(
        default=20, description="Seconds that a request may wait longer for the sake of what is cached."
    )
    debug_route: bool = Field(default=False, description="Say in x-quire-route where a request runs, and why.")
    page: bool = Field(default=True, description="Serve the page for browsers at /, and the stream that it reads.")
    allow_fleet: bool = Field(default=False, description="Let every key see the fleet, on the page and in its stream.")
    allow_lora_updates: bool = Field(
        default=False,
        description="Load and unload adapters at all engines by /v1/load_lora_adapter; see docs/models.md.",
    )
    max_body_bytes: MaxBytes = Field(default=4 * 2**20, description="Largest request body.")
    max_inflight_body_bytes: MaxBytes = Field(
        default=128 * 2**20, description="Bytes of request bodies that are read and checked at once before 429."
    )
    max_concurrent_requests: Count = Field(default=4096, description="Requests in progress before 429.")
    max_connections: Count = Field(default=8192, description="Open HTTP connections before 429, each port.")
    max_peer_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5,
        description="Share of a full port's connections with which an address evicts its own idle ones first.",
    )
    request_timeout: Period = Field(default=600, description="Seconds that one request may take.")
    stall_timeout: Period = Field(
        default=30,
        description="Seconds after which a server that is not Quire's is set aside if it answers polls and none of its "
        "streams advances; or ten of its steps if that is longer.",
    )
    slow_client_timeout: Period = Field(default=30, description="Seconds a client may leave its stream unread.")
    sse_keepalive_seconds: Annotated[Seconds, Field(ge=0, allow_inf_nan=False)] = Field(
        default=15, description="Seconds of silence after which a stream has a comment; 0: never."
    )
    grpc_keepalive_seconds: Annotated[Seconds, Field(ge=0, allow_inf_nan=False)] = Field(
        default=15, description="Seconds of silence after which a stream over gRPC has an empty message; 0: never."
    )
    shutdown_delay: Annotated[Seconds, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0, description="Seconds in which new requests are still taken after SIGTERM, while /ready says no."
    )
    shutdown_timeout: Period = Field(default=25, description="Seconds that running requests get when stopping.")
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
    usage_retention: Period = Field(
        default=400 * 86_400, description="Seconds that what tenants used in an hour is stored."
    )
    max_file_bytes: MaxBytes = Field(default=100 * 2**20, description="Largest file for a batch.")
    max_tenant_file_bytes: MaxBytes = Field(
        default=2**30,
        description="Bytes of a tenant's files and uploads, and twice the answers of its batches that run.",
    )
    file_retention: Annotated[Seconds, Field(ge=3600, allow_inf_nan=False)] = Field(
        default=604_800, description="Seconds that files and batches are stored."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level logged.")
    log_format: LogFormat = Field(default="text", description="Form of log lines: for people, or JSON.")

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
        log.warning("no --engine is given: requests are held for one, and then refused")
    fitting = connections_within(settings)
    if "max_connections" in settings.model_fields_set and fitting < settings.max_connections:
        message = "the limit of %d file descriptors leaves %d connections to each port, less than --max-connections %d"
        log.warning(message, _descriptors(), fitting, settings.max_connections)
    for entry in settings.engine if settings.picker_port is not None else ():
        if not can_be_picked(parse_source(entry)):
            log.warning("no gateway is sent to %s: it has no address that speaks HTTP in plain text", entry)
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
