"""Runs Helm's library and kubernetes-validate for the tests, in the environment that has them: a line of JSON comes in,
one goes out. Knows nothing of the tests.
"""

import asyncio
import functools
import json
import os
import sys
from typing import Any

import kubernetes_validate
import kubernetes_validate.utils
from helm_sdkpy import Configuration, HelmError, Install, Lint, Package, ReleaseTest, Uninstall, Upgrade

Call = dict[str, Any]


async def install(call: Call) -> Any:
    """A release, with its manifest, hooks and notes."""
    return await Install(_configuration(call)).run(
        call["release"], call["chart"], call["values"], wait=False, timeout=30, server_side_apply=True
    )


async def upgrade(call: Call) -> Any:
    """The release's next revision."""
    return await Upgrade(_configuration(call)).run(
        call["release"], call["chart"], call["values"], wait=False, timeout=30, server_side_apply=True
    )


async def uninstall(call: Call) -> Any:
    """Takes the release away."""
    return await Uninstall(_configuration(call)).run(call["release"], wait=False, timeout=30)


async def test(call: Call) -> Any:
    """Runs the release's test hooks; fails where one of them does."""
    return await ReleaseTest(_configuration(call)).run(call["release"])


async def package(call: Call) -> str:
    """The path of the chart's archive, made in a folder."""
    return await Package(_configuration(call)).run(call["chart"], dest_dir=call["folder"])


async def lint(call: Call) -> Any:
    """What ``helm lint`` finds in the chart without values: messages, whose texts the library leaves out."""
    return await Lint(_configuration(call)).run(call["chart"])


async def validate(call: Call) -> list[str | None]:
    """For each manifest why it is not valid for that version of Kubernetes, or null; "unknown" for an unknown kind."""
    return [_problem(manifest, call["version"]) for manifest in call["manifests"]]


OPERATIONS = {action.__name__: action for action in (install, upgrade, uninstall, test, package, lint, validate)}


def _configuration(call: Call) -> Configuration:
    return Configuration(namespace=call["namespace"], kubeconfig=call["kubeconfig"])


def _problem(manifest: dict[str, Any], version: str) -> str | None:
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError:
        return "unknown"
    return None


def answer(call: Call) -> Call:
    """What the call returned, or why it failed."""
    try:
        return {"result": asyncio.run(OPERATIONS[call["operation"]](call))}
    except HelmError as error:
        return {"error": str(error)}


def main() -> None:
    """Answers calls until there are no more."""
    # What the library prints must not end up among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # The schemas' files are read again and again otherwise.
    utils = kubernetes_validate.utils
    utils.schema_contents = functools.cache(utils.schema_contents)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
