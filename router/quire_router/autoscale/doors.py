"""The ports at which autoscalers ask, opened where the settings say so."""

import logging
from contextlib import AsyncExitStack
from dataclasses import replace

from quire_router.api.rest.protocol import ConnectionLimits
from quire_router.api.rest.server import listen
from quire_router.autoscale.certificates import Certificates
from quire_router.autoscale.external_metrics import ExternalMetrics
from quire_router.autoscale.front_proxy import FrontProxy, from_cluster, from_file
from quire_router.autoscale.keda import KedaServer, Scaler
from quire_router.autoscale.labels import labels_of
from quire_router.autoscale.load import Load
from quire_router.autoscale.namespace import pod_namespace
from quire_router.autoscale.tls_server import TlsServer
from quire_router.config import Settings
from quire_router.supervise import supervise

log = logging.getLogger("quire.router")
_LIMITS = ConnectionLimits(connections=256, head=10.0)


async def open_to_autoscalers(settings: Settings, load: Load, ending: AsyncExitStack) -> None:
    """Tells ``load`` from now on, at the ports that the settings name; ``ending`` closes them. Raises ``OSError`` when
    a port cannot be had, and ``ValueError`` for files that are no good.
    """
    if settings.scaling_port is not None:
        _open_external_metrics(settings, load, ending)
    if settings.keda_port is not None:
        await _open_keda(settings, load, ending)


def _open_external_metrics(settings: Settings, load: Load, ending: AsyncExitStack) -> None:
    assert settings.scaling_port is not None
    assert settings.scaling_identity is not None
    proxy = FrontProxy(
        from_cluster()
        if settings.scaling_client_ca is None
        else from_file(settings.scaling_client_ca, settings.scaling_client_name)
    )
    certificates = Certificates(settings.scaling_identity, lambda: proxy.authorities)
    namespace = settings.scaling_namespace or pod_namespace()
    app = ExternalMetrics(load, labels_of(settings.models), namespace, proxy)
    server = TlsServer(
        app,
        listen(settings.host, settings.scaling_port),
        certificates,
        replace(_LIMITS, peer_share=settings.max_peer_share),
    )
    server.start()
    ending.push_async_callback(server.stop)
    for kind, follow in (("front proxy", proxy.follow), ("certificates", certificates.follow)):
        ending.push_async_callback(supervise(kind, follow).stop)
    log.info("autoscaling: external metrics on %s:%d", settings.host, server.port)


async def _open_keda(settings: Settings, load: Load, ending: AsyncExitStack) -> None:
    assert settings.keda_port is not None
    tls, scaler = settings.keda_tls, Scaler(load, labels_of(settings.models))
    server = KedaServer(scaler, settings.host, settings.keda_port, tls, peer_share=settings.max_peer_share)
    await server.start()
    ending.push_async_callback(server.stop)
    log.info("autoscaling: KEDA on %s:%d%s", settings.host, server.port, "" if tls is None else " over TLS")
