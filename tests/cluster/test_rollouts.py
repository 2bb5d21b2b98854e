"""What clients see when everything is replaced: rollouts, TLS turned on and off, keys and passwords rotated."""

import copy
import json
import uuid
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.cluster import Release, eventually
from tests.cluster.conftest import CHART, Releases, Values
from tests.cluster.rows import Row
from tests.kube.values import with_values

LONG = 150.0
"""Seconds that Kubernetes may take to change a Secret's files in pods, and services to read them."""
BOTH = ("engine", "router")


@pytest.mark.parametrize(
    "components",
    [
        pytest.param(("engine",), marks=pytest.mark.row("all engines are rolled out"), id="engines"),
        pytest.param(("router",), marks=pytest.mark.row("all routers are rolled out"), id="routers"),
        pytest.param(("redis",), marks=pytest.mark.row("Redis is rolled out"), id="redis"),
        pytest.param(BOTH, marks=pytest.mark.row("engines and routers are rolled out together"), id="both"),
    ],
)
def test_rolled_out(row: Row, release: Release, components: tuple[str, ...]) -> None:
    release.settled()
    with row.client(release):
        before = pods(release, *components)
        for component in components:
            release.kubectl("rollout", "restart", release.workload(component))
        release.settled(*components)
        assert not pods(release, *components) & before


@pytest.mark.row("TLS is turned on by `helm upgrade`")
def test_tls_on(row: Row, release: Release) -> None:
    release.settled()
    with row.client(release):
        for optional in (True, False):
            release.set(CHART, with_values(copy.deepcopy(release.values), tls__mode="helm", tls__optional=optional))
            release.settled()


@pytest.mark.row("certificates and their authority are made anew (Secrets deleted, `helm upgrade`)")
def test_certificates_rotated(row: Row, release: Release) -> None:
    with_tls(release)
    with row.client(release):
        before = certificates(release)
        release.kubectl("delete", "secret", *before)
        release.set(CHART, release.values)
        assert before.keys() == certificates(release).keys()
        assert not set(before.values()) & set(certificates(release).values())
        for component in BOTH:
            eventually(f"{component}s have it", lambda component=component: has_own(release, component), seconds=LONG)


@pytest.mark.row("TLS is turned off by `helm rollback`")
def test_tls_off(row: Row, release: Release) -> None:
    without = with_values(copy.deepcopy(release.values), tls__mode="off", tls__optional=False)
    revisions = []
    for values in (without, with_values(copy.deepcopy(without), tls__mode="helm", tls__optional=True)):
        release.set(CHART, values)
        revisions.append(json.loads(release.helm("history", release.name, "--output", "json"))[-1]["revision"])
    with_tls(release)
    with row.client(release):
        for revision in reversed(revisions):
            release.helm("rollback", release.name, str(revision), "--wait", "--timeout", "300s")
            release.settled()
    release.values = without


@pytest.mark.row("TLS is turned on and off again with a single engine")
def test_tls_with_one_engine(row: Row, releases: Releases, namespaces: Callable[[], str], values: Values) -> None:
    """In two steps each way, as docs/tls.md says: with one engine there is no other of the old kind meanwhile."""
    release = releases(namespaces(), "quire")
    single = with_values(copy.deepcopy(values), models__demo__replicas=1)
    release.set(CHART, single)
    try:
        with row.client(release):
            for mode, optional in (("helm", True), ("helm", False), ("helm", True), ("off", False)):
                release.set(CHART, with_values(copy.deepcopy(single), tls__mode=mode, tls__optional=optional))
                release.settled()
    finally:
        release.uninstall()


@pytest.mark.row("the API key is replaced: both for a while, then the new one alone")
def test_keys_rotated(row: Row, release: Release) -> None:
    release.settled()
    old, new = release.secret("api-keys", "api-keys"), uuid.uuid4().hex
    with row.client(release):
        replace(release, "api-keys", "api-keys", f"{old},{new}")
        release.kubectl("rollout", "restart", release.workload("router"))
        release.settled("router")
    replace(release, "api-keys", "api-keys", f"{new},{old}")  # clients have the new one from here on
    with row.client(release):
        replace(release, "api-keys", "api-keys", new)
        release.kubectl("rollout", "restart", release.workload("router"))
        release.settled("router")


@pytest.mark.row("the password of Redis is replaced")
def test_password_rotated(row: Row, release: Release) -> None:
    release.settled()
    new = uuid.uuid4().hex
    with row.client(release):
        replace(release, "redis", "redis-password", new)
        eventually("Redis takes it", lambda: "PONG" in asked_redis(release, new), seconds=LONG, every=2)
    release.settled()


def with_tls(release: Release) -> None:
    """Turns TLS on, and plain text off, where they are not."""
    tls = release.values.get("tls", {})
    if tls.get("mode") != "helm" or tls.get("optional"):
        release.set(CHART, with_values(copy.deepcopy(release.values), tls__mode="helm", tls__optional=False))
    release.settled()


def pods(release: Release, *components: str) -> set[str]:
    """The ids of components' pods, which those of a StatefulSet have anew under the same names."""
    return {pod["metadata"]["uid"] for component in components for pod in release.pods(component)}


def certificates(release: Release) -> dict[str, str]:
    """The certificates that Helm made, by their Secrets' names."""
    found = json.loads(release.kubectl("get", "secrets", "--output", "json"))["items"]
    own = [secret for secret in found if secret["metadata"]["name"].startswith(f"{release.fullname}-")]
    return {secret["metadata"]["name"]: secret["data"]["tls.crt"] for secret in own if "tls.crt" in secret["data"]}


def has_own(release: Release, component: str) -> bool:
    """Whether all pods of a component have the certificate of its Secret as a file."""
    wanted = release.secret(f"{component}-tls", "tls.crt")
    command = "import pathlib; print(*(each.read_text() for each in pathlib.Path('/etc/quire/tls').glob('tls.crt')))"
    pods = release.pods(component)
    return all(
        wanted in release.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", command) for pod in pods
    )


def replace(release: Release, name: str, key: str, value: str) -> None:
    """Gives a key of a Secret of the release another value."""
    patch: dict[str, Any] = {"data": {key: b64encode(value.encode()).decode()}}
    release.kubectl("patch", "secret", f"{release.fullname}-{name}", "--patch", json.dumps(patch))


def asked_redis(release: Release, password: str) -> str:
    """What Redis answers to one who has a password."""
    pod = release.pods("redis")[0]["metadata"]["name"]
    return release.kubectl("exec", pod, "--", "env", f"REDISCLI_AUTH={password}", "redis-cli", "ping")
