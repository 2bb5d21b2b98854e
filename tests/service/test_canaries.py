"""Two versions of a model behind one name, and a third as a shadow, with real engines: shares, what stays with what
when parts die, weights that change while routers run, and shadows that leave nothing.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

import httpx
import openai
import pytest
import redis as redis_client
from openai import OpenAI
from safetensors.torch import load_file, save_file

from tests.service.conftest import DEMO, FLOAT32, SMALL_POOLS
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.processes import Engine, Router, eventually
from tests.support.redis_server import RedisServer, redis_server

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1000, "temperature": 1.2, "seed": 11}
LONG |= {"extra_body": {"ignore_eos": True}}
SHORT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


def other_version(folder: Path) -> Path:
    """The demo model with other weights."""
    shutil.copytree(DEMO, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if "mlp" in name)
    save_file({**tensors, name: -tensors[name]}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass
class Fleet:
    """Two engines of v1, of which the second serves it as ``twin`` as well, and one of v2; two routers."""

    redis: RedisServer
    targets: Path
    engines: list[Engine]
    routers: list[Router]
    folder: Path
    flags: tuple[str, ...]

    def client(self, router: int = 0) -> OpenAI:
        return OpenAI(base_url=f"{self.routers[router].url}/v1", api_key="none", max_retries=0, timeout=120)

    def set_targets(self, v1: int, v2: int, shadow: str = "") -> None:
        """Replaces the file, and waits until each router has read it."""
        write_targets(self.targets, v1, v2, shadow)
        for router in self.routers:
            eventually(lambda router=router: router.text.count("was read again") > self.read.get(router.http_port, 0))
        self.note_read()

    def note_read(self) -> None:
        self.read = {router.http_port: router.text.count("was read again") for router in self.routers}

    def target_of(self, router: int = 0, **headers: str) -> str:
        answer = self.client(router).completions.with_raw_response.create(model="chat", **SHORT, extra_headers=headers)
        assert answer.parse().model == "chat"
        return answer.headers["x-quire-model-target"]

    def shadows(self, result: str) -> float:
        return self.routers[0].metric("quire_shadow_requests_total", result=result)


def write_targets(path: Path, v1: int, v2: int, shadow: str = "") -> None:
    group: dict[str, Any] = {"targets": [{"model": "v1", "weight": v1}, {"model": "v2", "weight": v2}]}
    if v2 == 0:
        del group["targets"][1]
    if shadow:
        group["shadow"] = {"model": shadow, "percent": 100}
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"models": {"chat": group}}))
    new.rename(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return DEMO, other_version(tmp_path_factory.mktemp("other") / "v2")


@pytest.fixture
def fleet(folders: tuple[Path, Path], tmp_path: Path) -> Iterator[Fleet]:
    v1, v2 = folders
    targets = tmp_path / "targets.json"
    write_targets(targets, 1, 1)
    with redis_server() as redis:
        engines: list[Engine] = [
            ForkedEngine(folder, tmp_path, *SMALL_POOLS, *FLOAT32, name=name)
            for folder, name in ((v1, "v1"), (v1, "v1,twin"), (v2, "v2"))
        ]
        flags = ("--model", f"v2={v2}", "--model", f"twin={v1}", "--model-targets", str(targets))
        flags += ("--redis-url", redis.url, "--hold-timeout", "3")
        addresses = [engine.address for engine in engines]
        routers: list[Router] = [ForkedRouter(v1, addresses, tmp_path, *flags, name="v1") for _ in range(2)]
        try:
            for process in (*engines, *routers):
                process.wait_ready()
            for router in routers:
                eventually(lambda router=router: router.metric("quire_engines_ready") == 4)
            found = Fleet(redis, targets, engines, routers, tmp_path, flags)
            found.note_read()
            yield found
        finally:
            for process in (*routers, *engines):
                if process.popen.poll() is None:
                    process.stop()


def busy_engine(engines: Sequence[Engine]) -> Engine:
    """The engine that runs something."""

    def busy() -> list[Engine]:
        return [each for each in engines if each.metric("quire_engine_running_sequences") > 0]

    eventually(busy)
    return busy()[0]


def text_of(fleet: Fleet, model: str, **body: Any) -> str:
    """What a version answers that is asked for by its own name."""
    return str(fleet.client().completions.create(model=model, **body).choices[0].text)


def test_answers_are_those_of_their_targets_and_weights_change_without_a_restart(fleet: Fleet) -> None:
    wanted = {model: text_of(fleet, model, **SHORT) for model in ("v1", "v2")}
    assert wanted["v1"] != wanted["v2"]
    sessions = [f"session-{number}" for number in range(12)]

    def of_sessions() -> list[str]:
        return [fleet.target_of(number % 2, **{"x-session-id": name}) for number, name in enumerate(sessions)]

    first = of_sessions()
    assert set(first) == {"v1", "v2"}
    for _ in range(8):
        answer = fleet.client().completions.with_raw_response.create(model="chat", **SHORT)
        assert answer.parse().choices[0].text == wanted[answer.headers["x-quire-model-target"]]

    fleet.set_targets(0, 1)
    assert {fleet.target_of(number % 2) for number in range(6)} == {"v2"}
    assert of_sessions() == first, "the sessions stay where they are, at the routers that know them"
    assert all(router.popen.poll() is None for router in fleet.routers)


def test_an_answer_goes_on_with_its_version_after_engine_and_router_were_killed(fleet: Fleet) -> None:
    undisturbed = text_of(fleet, "v1", **LONG)
    fleet.set_targets(1, 0)
    ids: list[str] = []
    with fleet.client().completions.with_streaming_response.create(model="chat", stream=True, **LONG) as answer:
        assert answer.headers["x-quire-model-target"] == "v1"
        seen = ""
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            seen += "".join(choice["text"] for choice in chunk["choices"])
            ids.append(chunk["id"])
            if len(ids) == 20:
                busy_engine(fleet.engines).kill()
            if len(ids) == 60:
                fleet.routers[0].kill()
                break
    fleet.routers.pop(0)
    fleet.note_read()
    fleet.set_targets(0, 1)
    rest = httpx.get(f"{fleet.routers[0].url}/v1/requests/{ids[0]}/events", timeout=60)
    assert "error" not in rest.text, rest.text[-600:]
    whole = "".join(
        choice["text"]
        for line in rest.text.splitlines()
        if line.startswith("data: {")
        for choice in json.loads(line[6:]).get("choices", ())
    )
    assert undisturbed.startswith(seen)
    assert whole == undisturbed


def test_an_answer_ends_with_an_error_rather_than_with_the_tokens_of_other_weights(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Two engines that serve different weights under one name: what one began, the other does not continue."""
    engines = [ForkedEngine(folder, tmp_path, *SMALL_POOLS, *FLOAT32, name="v1") for folder in folders]
    addresses = [engine.address for engine in engines]
    router = ForkedRouter(folders[0], addresses, tmp_path, "--hold-timeout", "2", name="v1")
    try:
        for process in (*engines, router):
            process.wait_ready()
        eventually(lambda: router.metric("quire_engines_ready") == 2)
        client = OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60)
        stream = client.completions.create(model="v1", stream=True, **LONG)
        next(stream)
        busy_engine(engines).kill()
        with pytest.raises(openai.APIError, match="the version of the model which began this answer") as failed:
            list(stream)
        assert failed.value.code == "version_gone"
        assert client.completions.create(model="v1", **SHORT).choices[0].text, (
            "what begins takes the version that is left"
        )
    finally:
        for process in (router, *engines):
            if process.popen.poll() is None:
                process.stop()


def test_a_shadow_is_compared_and_leaves_nothing(fleet: Fleet) -> None:
    fleet.set_targets(1, 0, "twin")
    wanted = text_of(fleet, "v1", **SHORT)
    assert text_of(fleet, "chat", **SHORT) == wanted
    eventually(lambda: fleet.shadows("equal") == 1)
    eventually(lambda: requests_used(fleet) == {"v1": 1, "chat": 1})
    records = redis_client.Redis.from_url(fleet.redis.url).keys("quire:*:record")
    assert len(records) == 2, "the shadow left one"

    fleet.set_targets(1, 0, "v2")
    assert text_of(fleet, "chat", **SHORT) == wanted
    eventually(lambda: fleet.shadows("different") == 1)
    share = fleet.routers[0].metric("quire_shadow_equal_share_sum", target="v2")
    assert 0 <= share < 1
    eventually(lambda: fleet.engines[2].metric("quire_engine_running_sequences") == 0)


def requests_used(fleet: Fleet) -> dict[str, int]:
    """The requests of each model in the ledger."""
    query = {"start_time": int(time()) - 7200}
    page = httpx.get(f"{fleet.routers[0].url}/v1/usage", params=query, timeout=60).raise_for_status().json()
    rows = [row for hour in page["data"] for row in hour["results"]]
    return {model: sum(row["num_model_requests"] for row in rows if row["model"] == model) for model in ("v1", "chat")}
