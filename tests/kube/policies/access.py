"""Rights in the cluster, and secrets."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.kube.helm import Release
from tests.kube.manifests import name, pods

READ = {"get", "list", "watch"}
ALLOWED = {
    ("Role", "discovery.k8s.io", "endpointslices"): READ,
    ("Role", "", "pods"): READ,
    ("ClusterRole", "external.metrics.k8s.io", "*"): {"get", "list"},
    ("ClusterRole", "external.metrics.k8s.io", "quire_load"): {"get", "list"},
}
"""What a role may let whom do; everything else is a breach."""
FOREIGN_ROLES = {"extension-apiserver-authentication-reader"}
"""Roles of the cluster that a binding may name: this one reads whom an aggregated API has to trust."""
SECRET_NAME = re.compile(r"(PASSWORD|(?<!SPECIAL)(?<!SPECIAL_)TOKEN(?!I)|SECRET|API_?KEY|CREDENTIAL)", re.IGNORECASE)
NOT_THE_SECRET = re.compile(r"(FILE|PATH|NAME|DIR|TOKENS)$", re.IGNORECASE)
PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def roles_allow_only_what_is_listed(release: Release) -> Iterator[str]:
    """Every rule of every role stands in ``ALLOWED``. Who has a Lease of the release may mark pods."""
    leases = {lease["metadata"]["name"] for lease in release.of("Lease")}
    for role in release.of("Role", "ClusterRole"):
        for rule in role["rules"]:
            if leases and _marks_pods(rule, leases):
                continue
            for group in rule.get("apiGroups", [""]):
                for resource in rule.get("resources", ["*"]):
                    beyond = set(rule["verbs"]) - ALLOWED.get((role["kind"], group, resource), set())
                    if beyond:
                        yield f"{name(role)} allows {', '.join(sorted(beyond))} on {group}/{resource}"


def _marks_pods(rule: Mapping[str, Any], leases: set[str]) -> bool:
    what = rule["apiGroups"], rule["resources"], rule["verbs"], rule.get("resourceNames", [])
    return what in (([""], ["pods"], ["patch"], []), (["coordination.k8s.io"], ["leases"], ["get", "patch"], [*leases]))


def bindings_name_what_is_there(release: Release) -> Iterator[str]:
    """A binding gives a role of the release to an account of the release, but for what metrics APIs need."""
    roles = {(role["kind"], role["metadata"]["name"]) for role in release.of("Role", "ClusterRole")}
    accounts = {account["metadata"]["name"] for account in release.of("ServiceAccount")}
    for binding in release.of("RoleBinding", "ClusterRoleBinding"):
        role = binding["roleRef"]
        if (role["kind"], role["name"]) not in roles and role["name"] not in FOREIGN_ROLES:
            yield f"{name(binding)}: no {role['kind']} {role['name']}"
        for subject in binding["subjects"]:
            ours = subject["kind"] == "ServiceAccount" and subject["name"] in accounts
            if not ours and subject["name"] != "horizontal-pod-autoscaler":
                yield f"{name(binding)}: {subject['kind']} {subject['name']} is not of the release"


def secrets_stay_in_secrets(release: Release) -> Iterator[str]:
    """No variable, argument or ConfigMap holds one."""
    for pod in pods(release):
        for container in pod.all_containers:
            for problem in _plain(container):
                yield f"{pod.name}: {container['name']} {problem}"
    for manifest in release.of("ConfigMap"):
        for key, text in manifest.get("data", {}).items():
            if PASSWORD_IN_URL.search(text):
                yield f"{name(manifest)}: {key} holds a password"


def _plain(container: Mapping[str, Any]) -> Iterator[str]:
    for variable in container.get("env", []):
        text = variable.get("value", "")
        secret = SECRET_NAME.search(variable["name"]) and not NOT_THE_SECRET.search(variable["name"])
        if (secret and text) or PASSWORD_IN_URL.search(text):
            yield f"has the plain value of {variable['name']}"
    for argument in [*container.get("command", []), *container.get("args", [])]:
        if PASSWORD_IN_URL.search(argument) or re.match(r"--(api-key|redis-url|.*password)\b", argument):
            yield f"has a secret among its arguments: {argument.partition('=')[0]}"
        if re.search(r"\$\([A-Z_]*(PASSWORD|TOKEN|API_KEY)\)", argument):
            yield "shows a secret in its list of processes"


def generated_secrets_are_no_constants(release: Release) -> Iterator[str]:
    """What the chart makes itself is long, and not in its values."""
    for secret in release.of("Secret"):
        if secret.get("stringData"):
            yield f"{name(secret)} holds what was written down in values"
        for key, text in secret.get("data", {}).items():
            if len(text) < 20:
                yield f"{name(secret)}: {key} is short"
