"""Several models of one name: what routers are given, and that a weight changes nothing else."""

import json
from typing import Any

from quire_router.admission.model_targets import ModelTarget, ShadowTarget, TargetGroup
from quire_router.admission.targets_file import read_targets

from tests.kube.helm import Helm, Release
from tests.kube.manifests import components
from tests.kube.settings import Reader, environment
from tests.kube.values import example_values, with_values


def targets_of(release: Release) -> str:
    (text,) = [
        each["data"]["targets.json"]
        for each in release.of("ConfigMap")
        if each["metadata"]["name"].endswith("-targets")
    ]
    return str(text)


def test_routers_get_the_targets_of_a_name_and_engines_serve_their_own_keys(
    helm: Helm, reader: Reader, tmp_path: Any
) -> None:
    release = helm.render(example_values("canary"))
    (tmp_path / "targets.json").write_text(targets_of(release))
    models = ["chat-v1", "chat-v2", "chat-v3"]
    group = read_targets(tmp_path / "targets.json", dict.fromkeys(models, b"same")).groups["chat"]

    assert group == TargetGroup((ModelTarget("chat-v1", 90), ModelTarget("chat-v2", 10)), ShadowTarget("chat-v3", 5))
    (router,) = components(release, "router")
    assert list(reader.read(release, router).models) == models
    assert [reader.read(release, engine).names for engine in components(release, "engine")] == [
        [each] for each in models
    ]


def test_a_weight_changes_what_routers_read_and_no_pod(helm: Helm) -> None:
    before = helm.render(example_values("canary"))
    after = helm.render(with_values(example_values("canary"), **{"models__chat-v2__weight": 50}))
    assert json.loads(targets_of(before)) != json.loads(targets_of(after))
    assert before.of("Deployment") == after.of("Deployment")


def test_a_model_alone_has_its_name_until_it_has_a_weight(helm: Helm) -> None:
    alone = helm.render(example_values("cpu-demo"))
    weighted = helm.render(with_values(example_values("cpu-demo"), models__demo__weight=1))
    assert not [each for each in alone.of("ConfigMap") if each["metadata"]["name"].endswith("-targets")]
    assert json.loads(targets_of(weighted)) == {
        "models": {"smollm2-135m": {"targets": [{"model": "demo", "weight": 1}]}}
    }
    routers = [pod for each in (alone, weighted) for pod in components(each, "router")]
    models = [environment(pod.containers[0])["QUIRE_ROUTER_MODEL"] for pod in routers]
    assert [each.partition("=")[0] for each in models] == ["smollm2-135m", "demo"]
