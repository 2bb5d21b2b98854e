"""A real Envoy, set up as gateways of the Gateway API Inference Extension set theirs up: the filter ext_proc asks an
endpoint picker, and the cluster takes the endpoint from its answer.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tests.support.ports import free_port
from tests.support.processes import Process, wait_healthy

ENVOY = shutil.which("envoy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
"""None if there is none: ``scripts/envoy.sh`` fetches it."""

SUBSET_HEADER = "x-test-subset"
"""What a client sends to have Envoy tell the picker a subset."""
ADMIN_READY = "/ready"

Cluster = Literal["header", "metadata"]
_TYPES = "type.googleapis.com/envoy"


def typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_TYPES}.{kind}", **fields}}


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def endpoints(name: str, ports: Sequence[int]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": address(port)}} for port in ports]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}


def picker_cluster(port: int) -> dict[str, Any]:
    """Over TLS that is not verified, as gateways do by default."""
    protocol = f"{_TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions"
    options = {"@type": protocol, "explicit_http_config": {"http2_protocol_options": {}}}
    tls = typed("tls", "extensions.transport_sockets.tls.v3.UpstreamTlsContext")
    return {
        "name": "picker",
        "type": "STATIC",
        "load_assignment": endpoints("picker", [port]),
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        "transport_socket": {**tls, "name": "envoy.transport_sockets.tls"},
    }


def pool_cluster(kind: Cluster, ports: Sequence[int]) -> dict[str, Any]:
    """``header``: goes wherever the header says, as kgateway and Envoy AI Gateway have it. ``metadata``: the policy
    override_host over the endpoints, as Istio has it.
    """
    destination = "x-gateway-destination-endpoint"
    if kind == "header":
        by_header = {"use_http_header": True, "http_header_name": destination}
        return {
            "name": "pool",
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": by_header,
        }
    random = typed("random", "extensions.load_balancing_policies.random.v3.Random")
    source = {"metadata": {"key": "envoy.lb", "path": [{"key": destination}]}}
    override = typed(
        "override_host",
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[source],
        fallback_policy={"policies": [{"typed_extension_config": random}]},
    )
    return {
        "name": "pool",
        "type": "STATIC",
        "load_assignment": endpoints("pool", ports),
        "load_balancing_policy": {"policies": [{"typed_extension_config": override}]},
    }


def bootstrap(port: int, admin: int, picker: int, pool: dict[str, Any], mode: str, retries: int) -> dict[str, Any]:
    rule = {
        "header": SUBSET_HEADER,
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            "type": "STRING",
        },
        "remove": True,
    }
    subset = typed("subset", "extensions.filters.http.header_to_metadata.v3.Config", request_rules=[rule])
    modes = dict.fromkeys(
        ("request_header_mode", "response_header_mode", "request_trailer_mode", "response_trailer_mode"), "SEND"
    )
    ext_proc = typed(
        "envoy.filters.http.ext_proc",
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}},
        processing_mode={**modes, "request_body_mode": mode, "response_body_mode": mode},
        message_timeout="300s",
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )
    router = typed("envoy.filters.http.router", "extensions.filters.http.router.v3.Router")
    action: dict[str, Any] = {"cluster": "pool", "timeout": "0s"}
    if retries:
        action["retry_policy"] = {"retry_on": "connect-failure", "num_retries": retries}
    route = {"match": {"prefix": "/"}, "route": action}
    manager = typed(
        "envoy.filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="ingress",
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        http_filters=[subset, ext_proc, router],
    )
    return {
        "admin": {"address": address(admin)},
        "static_resources": {
            "listeners": [{"name": "http", "address": address(port), "filter_chains": [{"filters": [manager]}]}],
            "clusters": [picker_cluster(picker), pool],
        },
    }


class Envoy(Process):
    """Envoy in front of the servers on ``ports``, which asks the picker on ``picker``, and tries a request so many
    times more where a server cannot be reached.
    """

    def __init__(
        self, folder: Path, picker: int, ports: Sequence[int], kind: Cluster, mode: str, retries: int = 0
    ) -> None:
        assert ENVOY is not None
        self.port, admin = free_port(), free_port()
        configured = bootstrap(self.port, admin, picker, pool_cluster(kind, ports), mode, retries)
        file = folder / f"envoy-{self.port}.json"
        file.write_text(json.dumps(configured))
        command = [ENVOY, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
        super().__init__(command, folder / f"envoy-{self.port}.log")
        self._admin = admin

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> "Envoy":
        wait_healthy(self, self._admin, ADMIN_READY)
        return self
