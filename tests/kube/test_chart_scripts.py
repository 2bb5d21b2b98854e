"""What the chart runs besides the services: Redis' start and probes, and the pods of ``helm test``, run for real."""

import asyncio
import base64
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.kube.conftest import Examples
from tests.kube.helm import Helm, Release
from tests.kube.manifests import Pod, components, pods
from tests.kube.settings import environment
from tests.kube.values import example_values, with_values
from tests.support.ports import free_port
from tests.support.scripted_api import open_stage

KEY = "key-of-the-tests-" + 32 * "k"


class BundledRedis:
    """The bundled Redis of a release with its own files, in a folder instead of a pod, on a port of its own."""

    def __init__(self, release: Release, folder: Path) -> None:
        (pod,) = components(release, "redis")
        (config,) = [item["data"] for item in release.of("ConfigMap") if item["metadata"]["name"].endswith("-redis")]
        (secret,) = [item["data"] for item in release.of("Secret") if item["metadata"]["name"].endswith("-redis")]
        self._container = pod.containers[0]
        self._folder = folder
        self.port = free_port()
        self.password = base64.b64decode(secret["redis-password"]).decode()
        for path in ("etc/redis", "etc/redis-secret", "run/redis", "data"):
            (folder / path).mkdir(parents=True, exist_ok=True)
        for name, text in config.items():
            (folder / "etc/redis" / name).write_text(self._here(text))
        self.write(self.password)
        self._append("etc/redis/redis.conf", f"\nport {self.port}\n")

    def write(self, password: str) -> None:
        """What its Secret holds from now on."""
        self.password = password
        new = self._folder / "etc/redis-secret/new"
        new.write_text(f"{password}\n")
        new.replace(new.with_name("password"))

    def start(self) -> None:
        """Returns when its own startup probe is content."""
        self._process = subprocess.Popen([self._here(word) for word in self._container["command"]])
        deadline = time.monotonic() + 20
        while not self.probe("startupProbe"):
            assert self._process.poll() is None, "it has ended"
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def stop(self) -> None:
        """As a pod that is told to end."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(20)

    def probe(self, name: str) -> bool:
        """Whether one of the container's probes is content."""
        command = [self._here(word) for word in self._container[name]["exec"]["command"]]
        return subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0

    def client(self, password: str | None = None) -> redis.Redis:
        """A connection with that password."""
        return redis.Redis(port=self.port, password=password, decode_responses=True, retry=Retry(NoBackoff(), 0))

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def arguments(self) -> str:
        """What everybody on the machine sees of the process."""
        return Path(f"/proc/{self._process.pid}/cmdline").read_text()

    def _here(self, text: str) -> str:
        for path in ("/etc/redis", "/run/redis", "/data"):
            text = text.replace(path, f"{self._folder}{path}")
        return re.sub(r"redis-cli\b", f"redis-cli -p {self.port}", text).replace("sleep 5", "sleep 0.1")

    def _append(self, name: str, text: str) -> None:
        with (self._folder / name).open("a") as file:
            file.write(text)


@pytest.fixture
def bundled(helm: Helm, tmp_path: Path) -> Iterator[BundledRedis]:
    server = BundledRedis(helm.render(example_values("cpu-demo")), tmp_path)
    assert not server.probe("readinessProbe"), "nothing is there yet"
    assert not server.probe("livenessProbe")
    server.start()
    try:
        yield server
    finally:
        server.stop()


def test_redis_starts_and_requires_its_password(bundled: BundledRedis) -> None:
    assert bundled.probe("readinessProbe")
    assert bundled.probe("livenessProbe")
    for password in (None, "wrong"):
        with pytest.raises((redis.AuthenticationError, redis.ResponseError)):
            bundled.client(password).ping()
    assert bundled.password not in bundled.arguments


def test_redis_drops_nothing_and_remembers_over_a_restart(bundled: BundledRedis) -> None:
    client = bundled.client(bundled.password)
    settings = client.config_get("maxmemory-policy", "maxmemory", "appendonly", "appendfsync")
    assert settings == {
        "maxmemory-policy": "noeviction", "maxmemory": "536870912", "appendonly": "yes", "appendfsync": "everysec",
    }  # fmt: skip
    client.set("name", "value")
    bundled.stop()
    assert not bundled.probe("livenessProbe")
    bundled.start()
    assert bundled.client(bundled.password).get("name") == "value"


def test_a_password_of_any_characters_can_change_while_redis_runs(bundled: BundledRedis) -> None:
    bundled.stop()
    bundled.write("""it's "50%" \\ of $HOME `x` #1 \u2603""")
    bundled.start()
    assert bundled.client(bundled.password).ping()
    old, began = bundled.password, bundled.pid
    bundled.write('another \\"one" {{ $$ }}')
    deadline = time.monotonic() + 20
    while not bundled.probe("readinessProbe"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert bundled.client(bundled.password).ping()
    assert bundled.pid == began
    with pytest.raises(redis.AuthenticationError):
        bundled.client(old).ping()


def pods_of_helm_test(release: Release) -> list[Pod]:
    """The pods of ``helm test``."""
    return [pod for pod in pods(release) if pod.owner["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"]


async def run(pod: Pod, address: str, **variables: str) -> tuple[int, str]:
    """The status and output of a test pod that asks ``address`` instead of the Service."""
    container = pod.containers[0]
    program, *command = [*container["command"], *container["args"]]
    assert program == "python"
    given = {**environment(container), "ADDRESS": address, "SECONDS_TO_WAIT": "20", **variables}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, env={**os.environ, **given},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, output.decode()


def test_there_is_a_test_for_each_api(example: Examples) -> None:
    release = example("cpu-demo", "1.37")
    (router,) = [item for item in release.of("Service") if item["metadata"]["name"] == "quire-router"]
    ports = {str(port["port"]) for port in router["spec"]["ports"]}
    addresses = [environment(pod.containers[0])["ADDRESS"].rpartition(":") for pod in pods_of_helm_test(release)]
    assert {host for host, _, _ in addresses} == {"quire-router.default.svc"}
    assert {port for _, _, port in addresses} == {"8000", "8001"} <= ports


async def test_helm_test_sends_requests(example: Examples) -> None:
    async with open_stage(keys=[KEY]) as stage:
        for pod in pods_of_helm_test(example("cpu-demo", "1.37")):
            address = f"127.0.0.1:{stage.port if 'rest' in pod.name else stage.rpc_port}"
            status, output = await run(pod, address, MODEL="tiny", API_KEY=f"{KEY},another")
            assert (status, "answered over" in output) == (0, True), output
            status, output = await run(pod, address, MODEL="no-such-model", API_KEY=KEY)
            assert status == 1, output
            status, output = await run(pod, address, MODEL="tiny", API_KEY="k" * 40)
            assert status == 1, output


async def test_helm_test_says_what_to_look_at_when_nothing_answers(example: Examples) -> None:
    for pod in pods_of_helm_test(example("cpu-demo", "1.37")):
        nobody = f"127.0.0.1:{free_port()}"
        status, output = await run(pod, nobody, MODEL="tiny", API_KEY=KEY, SECONDS_TO_WAIT="0.5")
        assert status == 1
        for what in ("describe pods", "engine.image", "models.", ".source.", ".resources.limits.memory", "discovery"):
            assert what in output


async def test_helm_test_fails_where_redis_cannot_be_reached(example: Examples) -> None:
    async with open_stage(keys=[KEY], durable=lambda _request_ids: False) as stage:
        (pod,) = [pod for pod in pods_of_helm_test(example("cpu-demo", "1.37")) if "rest" in pod.name]
        status, output = await run(pod, f"127.0.0.1:{stage.port}", MODEL="tiny", API_KEY=KEY)
    assert (status, "redis.persistence.storageClass" in output) == (1, True), output


async def test_helm_test_without_a_key_checks_that_requests_are_refused(helm: Helm) -> None:
    values = with_values(example_values("cpu-demo"), router__auth={"mode": "existing", "existingSecret": "tenants"})
    release = helm.render(values)
    for keys, expected in (([KEY], 0), ([], 1)):
        async with open_stage(keys=keys) as stage:
            for pod in pods_of_helm_test(release):
                assert "API_KEY" not in environment(pod.containers[0])
                address = f"127.0.0.1:{stage.port if 'rest' in pod.name else stage.rpc_port}"
                status, output = await run(pod, address, MODEL="no-such-model")
                assert status == expected, output
