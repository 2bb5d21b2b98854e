"""Each policy finds what it is there for: a release that obeys them all, with one thing spoilt, breaks it."""

import copy

import pytest

from tests.kube.breaches import BREACHES, Spoil
from tests.kube.conftest import Examples
from tests.kube.helm import Release
from tests.kube.policies import POLICIES, Policy
from tests.kube.values import EXAMPLES


def test_every_policy_can_be_broken() -> None:
    assert {policy for policy, _ in BREACHES} == set(POLICIES)


@pytest.mark.parametrize(("policy", "spoil"), BREACHES, ids=[policy.__name__ for policy, _ in BREACHES])
def test_a_breach_is_found(example: Examples, policy: Policy, spoil: Spoil) -> None:
    release = spoilt(example, spoil)
    assert list(policy(release))


def spoilt(example: Examples, spoil: Spoil) -> Release:
    """The first example that has what is to be spoilt, with that spoilt."""
    for values in EXAMPLES:
        release = copy.deepcopy(example(values, "1.37"))
        try:
            spoil(release)
        except LookupError:
            continue
        return release
    raise AssertionError("no example has anything to spoil")
