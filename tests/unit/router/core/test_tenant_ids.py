"""Ids of tenants that follow from keys and claims, and those that they had before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_router.core.tenant_ids import former_id, ids_of, is_derived, owns

DIGITS = st.text("0123456789abcdef", min_size=32, max_size=32)


@given(st.sampled_from(["", "oidc-"]), DIGITS, DIGITS)
def test_a_tenant_owns_what_it_has_and_had_and_nothing_of_others(prefix, one, other):
    tenant, another = prefix + one, prefix + other
    assert ids_of(tenant) == (tenant, prefix + one[:12])
    assert owns(tenant, tenant)
    assert owns(tenant, former_id(tenant))
    assert owns(tenant, another) == (one == other)
    assert owns(tenant, former_id(another)) == (one[:12] == other[:12])
    assert not owns(former_id(tenant), tenant)
    assert not owns(tenant, "")


@pytest.mark.parametrize(
    "name", ["", "acme", "oidc-acme", "0123456789ab", "oidc-0123456789ab", "0" * 31, "0" * 33, "A" * 32]
)
def test_other_tenants_were_never_called_otherwise(name):
    assert former_id(name) == ""
    assert owns(name, name)


@pytest.mark.parametrize(
    ("name", "derived"), [("0" * 12, True), ("0" * 32, True), ("oidc-" + "a" * 32, True), ("a" * 20, False)]
)
def test_names_of_files_are_no_such_ids(name, derived):
    assert is_derived(name) is derived
