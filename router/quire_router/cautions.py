"""Warnings of settings that may not be meant so. Nothing here stops a start."""

import logging

from quire_router.admission.tenants_file import TenantsFile, read_tenants
from quire_router.config import Settings

log = logging.getLogger("quire.router")


def warn_of(settings: Settings) -> None:
    """Says what may not be meant, for all workers together. Raises ``TenantsFileError``."""
    file = TenantsFile() if settings.tenants is None else read_tenants(settings.tenants)
    if not settings.api_key and settings.tenants is None:
        log.warning("no API key is configured: everyone who can reach this port may use the service")
    if not settings.engine:
        log.warning("no --engine is given: requests are held for one, and then refused")
    for tenant, model in file.unknown_models(settings.models):
        log.warning("%s: %s may use %r, which is not served here", settings.tenants, tenant or "the default", model)
