"""Warnings of settings that may not be meant so, or that the machine does not allow. Nothing here stops a start."""

import logging
import resource
from contextlib import suppress

from quire_router.admission.tenants_file import TenantsFile, read_tenants
from quire_router.config import Settings

log = logging.getLogger("quire.router")
_MOST_DESCRIPTORS = 2**20  # more are not asked for, whatever the hard limit is
_KEPT = 256  # descriptors for engines, Redis and files
_OF_AN_AUTOSCALER = 768  # for one of its ports: a connection that is relayed needs three
_FEWEST = 16  # connections of a port


def warn_of(settings: Settings) -> None:
    """Says what may not be meant, for all workers together. Raises ``TenantsFileError``."""
    file = TenantsFile() if settings.tenants is None else read_tenants(settings.tenants)
    if not settings.api_key and settings.tenants is None:
        log.warning("no API key is configured: everyone who can reach this port may use the service")
    if not settings.engine:
        log.warning("no --engine is given: requests are held for one, and then refused")
    fitting = connections_within(settings)
    if fitting < settings.max_connections:
        message = "the limit of %d file descriptors leaves %d connections to each port, less than --max-connections %d"
        log.warning(message, _descriptors(), fitting, settings.max_connections)
    for tenant, model in file.unknown_models(settings.models):
        log.warning("%s: %s may use %r, which is not served here", settings.tenants, tenant or "the default", model)


def raise_descriptor_limit() -> None:
    """Lets this process, and those that it starts, open as many files and connections as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # the warning says what is left
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_within(settings: Settings) -> int:
    """``--max-connections``, or fewer where all ports together could not have as many with the file descriptors that
    this process may open: what is above it is refused in words then, or takes the place of an idle connection.
    """
    autoscalers = sum(port is not None for port in (settings.scaling_port, settings.keda_port))
    left = _descriptors() - _KEPT - _OF_AN_AUTOSCALER * autoscalers
    ports = 3 if settings.workers == 1 else 2  # the metrics port of workers is their supervisor's
    return min(settings.max_connections, max(_FEWEST, left // ports))


def _descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
