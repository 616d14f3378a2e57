"""Sessions: a secret that the client draws says whose requests may share KV, and can only narrow."""

from __future__ import annotations

import secrets

import pytest

from cloister.policy import Gate, Policy
from cloister.types.errors import InvalidRequestError, PolicyError
from cloister.types.scope import SESSION_LIFETIME_S, Scope, ScopeKind
from tests.policy.test_gate import LAB, hits

ONE, OTHER = secrets.token_hex(32), secrets.token_hex(32)


def scope_of(gate: Gate, session: str | None, key: str | None = None) -> Scope:
    return gate.with_session(gate.admit(key), session).scope


@pytest.mark.parametrize("profile", ["open", "team", "private"])
def test_the_same_secret_hits_and_another_one_or_none_misses(profile: str) -> None:
    gate = LAB.gate(profile)
    one = scope_of(gate, ONE, LAB.ann)
    assert one.kind is ScopeKind.SESSION
    assert one.lifetime_s == SESSION_LIFETIME_S <= 300
    assert hits(one, scope_of(gate, ONE, LAB.ann)) == 3
    assert hits(one, scope_of(gate, ONE.upper(), LAB.ann)) == 3
    assert hits(one, scope_of(gate, OTHER, LAB.ann)) == 0
    assert hits(one, scope_of(gate, None, LAB.ann)) == 0


@pytest.mark.parametrize("profile", ["open", "team"])
def test_a_stolen_secret_opens_nothing_in_another_tenant(profile: str) -> None:
    gate = LAB.gate(profile)
    assert hits(scope_of(gate, ONE, LAB.ann), scope_of(gate, ONE, LAB.bob)) == 3
    assert hits(scope_of(gate, ONE, LAB.ann), scope_of(gate, ONE, LAB.cy)) == 0


def test_a_session_is_no_scope_that_exists_without_one() -> None:
    """Whatever bits are sent, they never become a tenant's or the machine's own scope."""
    gate = Gate(Policy("open"), None, loopback=True)
    local = gate.admit(None).scope
    for bits in ("00" * 32, local.seed.hex(), local.salt.ljust(32, b"\0").hex()):
        assert hits(local, scope_of(gate, bits)) == 0


def test_paranoid_has_none() -> None:
    with pytest.raises(PolicyError, match=r"T6\.prefix-cache\.session\.paranoid"):
        scope_of(LAB.gate("paranoid"), ONE, LAB.ann)


@pytest.mark.parametrize(
    "bits",
    ["", "ab", ONE[:-2], ONE + "00", "z" * 64, f"{ONE},{OTHER}"],
    ids=["empty", "short", "a byte less", "a byte more", "no hex", "two"],
)
def test_what_is_no_secret_is_refused_and_not_repeated(bits: str) -> None:
    with pytest.raises(InvalidRequestError, match="64 hexadecimal digits") as refusal:
        scope_of(LAB.gate("private"), bits, LAB.ann)
    assert not bits or bits not in refusal.value.message


def test_a_session_where_nothing_is_reused_is_refused() -> None:
    gate = Gate(Policy("private"), None, loopback=True, reuses_prefixes=False)
    with pytest.raises(InvalidRequestError, match="leave the header"):
        scope_of(gate, ONE)
