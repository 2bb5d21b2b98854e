"""Ways to break a policy: each takes a release, and spoils one thing in it. One that finds nothing to spoil raises
``LookupError``.
"""

from collections.abc import Callable
from typing import Any

from tests.kube.helm import Manifest, Release
from tests.kube.manifests import Pod, components, matches
from tests.kube.policies import Policy, access, lifetime, network, wiring
from tests.kube.policies import pods as of_pods

Spoil = Callable[[Release], Any]


def pod(release: Release, component: str) -> Pod:
    """The first pod of a component."""
    for found in components(release, component):
        return found
    raise LookupError(component)


def container(release: Release, component: str) -> Manifest:
    """The first container of a component."""
    return pod(release, component).containers[0]


def first(release: Release, *kinds: str) -> Manifest:
    """The first manifest of one of these kinds."""
    for found in release.of(*kinds):
        return found
    raise LookupError(kinds)


def without(release: Release, kind: str) -> None:
    """Takes all manifests of a kind away."""
    first(release, kind)
    release.manifests[:] = [manifest for manifest in release.manifests if manifest["kind"] != kind]


def variable(release: Release, component: str, name: str, value: str) -> None:
    """Sets a plain variable."""
    container(release, component)["env"].append({"name": name, "value": value})


def policies_of(release: Release, component: str, direction: str) -> list[Manifest]:
    """The network policies that say what a component's pods accept or open."""
    target = pod(release, component)
    found = [
        policy
        for policy in release.of("NetworkPolicy")
        if matches(policy["spec"]["podSelector"], target.labels) and policy["spec"].get(direction)
    ]
    if not found:
        raise LookupError(direction)
    return found


def everybody_may(release: Release, component: str, direction: str) -> None:
    """Adds a rule that allows everything."""
    policies_of(release, component, direction)[0]["spec"][direction].append({})


def nobody_may(release: Release, component: str, direction: str) -> None:
    """Takes every rule of one direction away."""
    for policy in policies_of(release, component, direction):
        policy["spec"][direction] = []


def scaled(release: Release) -> Manifest:
    """The workload that something scales."""
    name = first(release, "HorizontalPodAutoscaler", "ScaledObject")["spec"]["scaleTargetRef"]["name"]
    return next(item for item in release.of("Deployment", "StatefulSet") if item["metadata"]["name"] == name)


def backend(release: Release) -> Manifest:
    """What a route leads to."""
    found: Manifest = first(release, "HTTPRoute", "GRPCRoute")["spec"]["rules"][0]["backendRefs"][0]
    return found


def secret_variable(release: Release) -> Manifest:
    """A variable that comes from a Secret."""
    for entry in container(release, "router")["env"]:
        if "secretKeyRef" in entry.get("valueFrom", {}):
            found: Manifest = entry["valueFrom"]["secretKeyRef"]
            return found
    raise LookupError("secretKeyRef")


def trigger(release: Release) -> Manifest:
    """What KEDA asks over TLS."""
    found: Manifest = first(release, "ScaledObject")["spec"]["triggers"][0]
    first(release, "TriggerAuthentication")
    return found


def own(found: Pod) -> dict[str, Any]:
    """A pod's specification, to be changed."""
    spec: dict[str, Any] = (
        found.owner["spec"]["template"]["spec"] if "template" in found.owner["spec"] else found.owner["spec"]
    )
    return spec


def several(release: Release) -> Release:
    """The release, if it has several routers."""
    if pod(release, "router").owner["spec"]["replicas"] < 2:
        raise LookupError("replicas")
    return release


def context(release: Release, component: str) -> Manifest:
    """The security context of a component's first container."""
    found: Manifest = container(release, component)["securityContext"]
    return found


def _bind_somebody(release: Release) -> None:
    first(release, "RoleBinding")["subjects"][0]["name"] = "somebody"


def _allow(verb: str, resource: str, group: str = "") -> Spoil:
    rule = {"apiGroups": [group], "resources": [resource], "verbs": [verb]}
    return lambda release: first(release, "Role")["rules"].append(rule)


BREACHES: tuple[tuple[Policy, Spoil], ...] = (
    (of_pods.images_do_not_float, lambda r: container(r, "router").update(image="quire-router:latest")),
    (of_pods.images_do_not_float, lambda r: container(r, "engine").update(image="registry:5000/quire-engine")),
    (of_pods.images_do_not_float, lambda r: container(r, "redis").update(image="redis:7")),
    (of_pods.resources_are_set, lambda r: container(r, "router").pop("resources")),
    (of_pods.resources_are_set, lambda r: container(r, "engine")["resources"]["limits"].pop("memory")),
    (of_pods.last_words_are_kept, lambda r: container(r, "engine").pop("terminationMessagePolicy")),
    (of_pods.nothing_runs_as_root, lambda r: own(pod(r, "redis"))["securityContext"].pop("runAsNonRoot")),
    (of_pods.nothing_runs_as_root, lambda r: context(r, "engine").update(runAsUser=0)),
    (of_pods.containers_have_no_rights, lambda r: own(pod(r, "engine"))["securityContext"].pop("seccompProfile")),
    (of_pods.containers_have_no_rights, lambda r: context(r, "router")["capabilities"].update(add=["NET_RAW"])),
    (of_pods.containers_have_no_rights, lambda r: context(r, "router").update(allowPrivilegeEscalation=True)),
    (of_pods.containers_have_no_rights, lambda r: context(r, "redis").update(readOnlyRootFilesystem=False)),
    (of_pods.pods_share_nothing_with_the_node, lambda r: own(pod(r, "engine")).update(hostIPC=True)),
    (
        of_pods.pods_share_nothing_with_the_node,
        lambda r: own(pod(r, "engine"))["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
    ),
    (of_pods.pods_share_nothing_with_the_node, lambda r: container(r, "router")["ports"][0].update(hostPort=80)),
    (
        of_pods.temporary_folders_are_bounded,
        lambda r: own(pod(r, "router"))["volumes"].append({"name": "x", "emptyDir": {}}),
    ),
    (of_pods.disk_is_requested, lambda r: container(r, "engine")["resources"]["requests"].pop("ephemeral-storage")),
    (
        of_pods.disk_is_requested,
        lambda r: own(pod(r, "router"))["volumes"].append({"name": "x", "emptyDir": {"sizeLimit": "1Ki"}}),
    ),
    (of_pods.disk_is_requested, lambda r: context(r, "redis").update(readOnlyRootFilesystem=False)),
    (
        of_pods.mounts_and_volumes_agree,
        lambda r: own(pod(r, "router"))["volumes"].append({"name": "x", "emptyDir": {"sizeLimit": "1Gi"}}),
    ),
    (of_pods.mounts_and_volumes_agree, lambda r: own(pod(r, "router")).update(volumes=[])),
    (of_pods.variables_are_there_once, lambda r: variable(r, "engine", "QUIRE_ENGINE_HOST", "::")),
    (of_pods.only_the_router_speaks_to_kubernetes, lambda r: own(pod(r, "engine")).pop("serviceAccountName")),
    (
        of_pods.only_the_router_speaks_to_kubernetes,
        lambda r: own(pod(r, "redis")).update(automountServiceAccountToken=True),
    ),
    (access.roles_allow_only_what_is_listed, _allow("get", "secrets")),
    (access.roles_allow_only_what_is_listed, _allow("patch", "pods")),
    (access.roles_allow_only_what_is_listed, _allow("patch", "leases", "coordination.k8s.io")),
    (access.roles_allow_only_what_is_listed, lambda r: first(r, "Role")["rules"][0].update(verbs=["*"])),
    (access.bindings_name_what_is_there, _bind_somebody),
    (access.bindings_name_what_is_there, lambda r: first(r, "RoleBinding")["roleRef"].update(name="admin")),
    (access.secrets_stay_in_secrets, lambda r: variable(r, "engine", "HF_TOKEN", "hf_abc")),
    (access.secrets_stay_in_secrets, lambda r: variable(r, "router", "QUIRE_ROUTER_REDIS_URL", "redis://:secret@x")),
    (access.secrets_stay_in_secrets, lambda r: variable(r, "router", "URL", "redis://:$(REDIS_PASSWORD)@x")),
    (access.secrets_stay_in_secrets, lambda r: container(r, "router").update(args=["--api-key=abc"])),
    (access.secrets_stay_in_secrets, lambda r: container(r, "redis").update(args=["--requirepass $(REDIS_PASSWORD)"])),
    (access.secrets_stay_in_secrets, lambda r: first(r, "ConfigMap")["data"].update(x="redis://:secret@host")),
    (access.generated_secrets_are_no_constants, lambda r: first(r, "Secret").update(stringData={"a": "b"})),
    (access.generated_secrets_are_no_constants, lambda r: first(r, "Secret")["data"].update(x="c2hvcnQ=")),
    (network.everything_is_denied_first, lambda r: without(r, "NetworkPolicy")),
    (network.only_the_api_is_open_to_all, lambda r: everybody_may(r, "engine", "ingress")),
    (network.only_the_api_is_open_to_all, lambda r: everybody_may(r, "redis", "ingress")),
    (network.only_the_api_is_open_to_all, lambda r: everybody_may(r, "router", "ingress")),
    (network.needed_paths_are_open, lambda r: nobody_may(r, "engine", "ingress")),
    (network.needed_paths_are_open, lambda r: nobody_may(r, "router", "ingress")),
    (network.needed_paths_are_open, lambda r: nobody_may(r, "router", "egress")),
    (network.needed_paths_are_open, lambda r: nobody_may(r, "redis", "ingress")),
    (network.needed_paths_are_open, lambda r: variable(r, "router", "X", "redis://other.elsewhere.svc:1234/0")),
    (network.needed_paths_are_open, lambda r: nobody_may(r, "engine", "egress")),
    (network.redis_and_engines_keep_to_themselves, lambda r: without(r, "NetworkPolicy")),
    (
        network.policies_name_ports_that_are_there,
        lambda r: policies_of(r, "engine", "ingress")[0]["spec"]["ingress"].append({"ports": [{"port": "grcp"}]}),
    ),
    (
        network.policies_name_ports_that_are_there,
        lambda r: first(r, "NetworkPolicy")["spec"].update(podSelector={"matchLabels": {"a": "b"}}),
    ),
    (lifetime.probes_mean_three_things, lambda r: container(r, "engine").pop("startupProbe")),
    (
        lifetime.probes_mean_three_things,
        lambda r: container(r, "router").update(livenessProbe=container(r, "router")["readinessProbe"]),
    ),
    (
        lifetime.probes_mean_three_things,
        lambda r: container(r, "router")["livenessProbe"].update(httpGet={"path": "/live", "port": 1}),
    ),
    (
        lifetime.engines_may_take_long_to_start,
        lambda r: container(r, "engine")["startupProbe"].update(failureThreshold=3),
    ),
    (
        lifetime.a_late_answer_restarts_no_pod,
        lambda r: container(r, "router")["livenessProbe"].update(failureThreshold=3),
    ),
    (lifetime.pods_end_after_their_drain, lambda r: own(pod(r, "engine")).update(terminationGracePeriodSeconds=30)),
    (lifetime.pods_end_after_their_drain, lambda r: container(r, "router").update(env=[])),
    (lifetime.budgets_protect_and_let_go, lambda r: first(r, "PodDisruptionBudget").update(spec={"selector": {}})),
    (
        lifetime.budgets_protect_and_let_go,
        lambda r: first(r, "PodDisruptionBudget")["spec"].update(maxUnavailable=0, minAvailable=None),
    ),
    (lifetime.several_replicas_have_a_budget, lambda r: without(several(r), "PodDisruptionBudget")),
    (
        lifetime.several_replicas_have_a_budget,
        lambda r: own(pod(several(r), "router")).pop("topologySpreadConstraints"),
    ),
    (lifetime.one_owner_of_replicas, lambda r: scaled(r)["spec"].update(replicas=3)),
    (lifetime.updates_take_nothing_away, lambda r: pod(r, "router").owner["spec"].pop("strategy")),
    (
        wiring.selectors_never_change,
        lambda r: pod(r, "engine").owner["spec"]["selector"]["matchLabels"].update({"helm.sh/chart": "quire-0.1.0"}),
    ),
    (
        wiring.selectors_never_change,
        lambda r: pod(r, "engine").owner["spec"]["selector"].update(matchLabels={"app.kubernetes.io/name": "quire"}),
    ),
    (wiring.services_reach_their_pods, lambda r: first(r, "Service")["spec"]["selector"].update(a="b")),
    (wiring.services_reach_their_pods, lambda r: first(r, "Service")["spec"]["ports"][0].update(targetPort="nothing")),
    (wiring.routes_lead_to_services, lambda r: backend(r).update(port=1)),
    (
        wiring.monitors_find_what_they_watch,
        lambda r: first(r, "ServiceMonitor")["spec"]["endpoints"][0].update(port="x"),
    ),
    (
        wiring.monitors_find_what_they_watch,
        lambda r: first(r, "PodMonitor")["spec"]["podMetricsEndpoints"][0].update(port="x"),
    ),
    (
        wiring.autoscalers_speak_tls_where_others_do,
        lambda r: trigger(r).pop("authenticationRef"),
    ),
    (
        wiring.autoscalers_speak_tls_where_others_do,
        lambda r: first(r, "TriggerAuthentication")["spec"]["secretTargetRef"].pop(),
    ),
    (wiring.autoscalers_speak_tls_where_others_do, lambda r: trigger(r)["metadata"].update(unsafeSsl="true")),
    (wiring.what_pods_mount_is_there, lambda r: secret_variable(r).update(name="no-such-secret")),
    (
        wiring.what_pods_mount_is_there,
        lambda r: first(r, "TriggerAuthentication")["spec"]["secretTargetRef"][0].update(name="no-such-secret"),
    ),
    (
        wiring.what_pods_mount_is_there,
        lambda r: container(r, "router").update(envFrom=[{"secretRef": {"name": "no-such-secret"}}]),
    ),
    (wiring.every_object_says_whose_it_is, lambda r: first(r, "Service")["metadata"].pop("labels")),
    (wiring.every_object_says_whose_it_is, lambda r: first(r, "Secret")["metadata"].update(namespace="other")),
    (wiring.names_fit, lambda r: first(r, "Service")["metadata"].update(name="s" * 64)),
    (wiring.names_fit, lambda r: first(r, "Service")["metadata"].update(name="1-quire-router")),
    (wiring.names_fit, lambda r: first(r, "Deployment")["metadata"]["labels"].update(x="-")),
    (wiring.names_fit, lambda r: r.manifests.append(first(r, "Service"))),
    (wiring.names_fit, lambda r: container(r, "router")["ports"][0].update(name="a-name-of-sixteen")),
    (wiring.keys_are_text, lambda r: first(r, "ConfigMap")["data"].update({False: "n"})),
    (wiring.changed_configuration_restarts_pods, lambda r: pod(r, "redis").annotations.clear()),  # type: ignore[attr-defined]
)
