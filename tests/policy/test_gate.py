"""The credential alone fixes who may share state with whom; what a client says changes nothing a profile does not let it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.kv import BlockPool, PrefixCache, PrefixKeys
from cloister.policy import Admission, Credentials, Gate, Policy, Profile
from cloister.types.errors import AuthenticationError, ConfigError, PolicyError
from cloister.types.scope import LOCAL_SCOPE, Scope, ScopeKind

PROFILES = st.sampled_from(Profile)
SHARING = (Profile.OPEN, Profile.TEAM)
STRICT = (Profile.PRIVATE, Profile.PARANOID)


@dataclass(frozen=True)
class Lab:
    """Two tenants; `lab` has two keys."""

    credentials: Credentials
    ann: str
    bob: str
    cy: str

    def gate(self, profile: str, *, loopback: bool = True) -> Gate:
        return Gate(Policy(profile), self.credentials, loopback=loopback)


def make_lab() -> Lab:
    credentials, ann = Credentials.empty().add("ann", tenant="lab", priority=-1)
    credentials, bob = credentials.add("bob", tenant="lab", priority=3)
    credentials, cy = credentials.add("cy", tenant="shop")
    return Lab(credentials, ann, bob, cy)


LAB = make_lab()


def hits(first: Scope, second: Scope) -> int:
    """Blocks that a prompt in `second` finds after the same prompt ran in `first`, on the real pool and tree."""
    pool, keys = BlockPool(8, 4), PrefixKeys("model", 4)
    tree = PrefixCache(pool)
    tokens = list(range(12))
    chains: list[list[bytes]] = []
    for scope in (first, second):
        chain: list[bytes] = []
        keys.extend(chain, keys.root(scope), tokens, 3)
        chains.append(chain)
    blocks = pool.allocate(3)
    tree.insert(chains[0], blocks, 0)
    pool.release(blocks)
    return tree.match_length(chains[1])


@pytest.mark.parametrize("profile", SHARING)
def test_two_keys_of_one_tenant_hit(profile: Profile) -> None:
    gate = LAB.gate(profile)
    assert gate.admit(LAB.ann).scope.kind is ScopeKind.TENANT
    assert hits(gate.admit(LAB.ann).scope, gate.admit(LAB.bob).scope) == 3


@pytest.mark.parametrize("profile", Profile)
def test_another_tenant_misses(profile: Profile) -> None:
    gate = LAB.gate(profile)
    assert hits(gate.admit(LAB.ann).scope, gate.admit(LAB.cy).scope) == 0


@pytest.mark.parametrize("profile", STRICT)
def test_a_strict_profile_lets_not_even_one_key_hit_twice(profile: Profile) -> None:
    gate = LAB.gate(profile)
    assert gate.admit(LAB.ann).scope.kind is ScopeKind.REQUEST
    assert hits(gate.admit(LAB.ann).scope, gate.admit(LAB.ann).scope) == 0


def test_loopback_without_keys_is_one_scope_and_hits() -> None:
    gate = Gate(Policy("open"), None, loopback=True)
    assert gate.admit(None).scope == LOCAL_SCOPE
    assert hits(gate.admit(None).scope, gate.admit("any key at all").scope) == 3
    assert gate.notice() is None


@pytest.mark.parametrize(
    ("profile", "loopback"),
    [(p, False) for p in Profile] + [(Profile.TEAM, True), (Profile.PRIVATE, True), (Profile.PARANOID, True)],
)
def test_who_cannot_be_told_apart_misses_and_the_server_says_so(profile: Profile, loopback: bool) -> None:
    gate = Gate(Policy(profile), None, loopback=loopback)
    assert hits(gate.admit(None).scope, gate.admit(None).scope) == 0
    notice = gate.notice()
    assert notice is not None
    assert f"T6.prefix-cache.keyless-bind.{profile}" in notice
    assert "cloister keys add" in notice
    assert ("share inside a tenant" in notice) == (profile is not Profile.PARANOID)


def test_a_tenant_of_the_same_name_on_another_server_is_another_scope() -> None:
    assert LAB.gate("team").admit(LAB.ann).scope != make_lab_scope()


def make_lab_scope() -> Scope:
    other = make_lab()
    return other.gate("team").admit(other.ann).scope


@given(profile=PROFILES, loopback=st.booleans(), key=st.none() | st.text(max_size=60))
def test_no_stranger_is_let_in(profile: Profile, loopback: bool, key: str | None) -> None:
    with pytest.raises(AuthenticationError) as refusal:
        LAB.gate(profile, loopback=loopback).admit(key)
    assert refusal.value.status == 401
    assert not key or len(key) < 8 or key not in refusal.value.message


@given(profile=PROFILES, loopback=st.booleans(), keyed=st.booleans())
def test_no_scope_is_wider_than_the_profile_allows(profile: Profile, loopback: bool, keyed: bool) -> None:
    order = list(ScopeKind)
    gate = LAB.gate(profile, loopback=loopback) if keyed else Gate(Policy(profile), None, loopback=loopback)
    scope = gate.admit(LAB.ann).scope
    assert order.index(scope.kind) <= order.index(gate.policy.widest_scope)
    assert scope.kind is ScopeKind.REQUEST or loopback or keyed


def test_a_fresh_scope_takes_32_bytes_from_the_random_source() -> None:
    drawn: list[int] = []

    def draw(num_bytes: int) -> bytes:
        drawn.append(num_bytes)
        return os.urandom(num_bytes)

    gate = Gate(Policy("private"), None, loopback=True, random=draw)
    salts = {gate.admit(None).scope.salt for _ in range(5)}
    assert drawn == [32] * 5
    assert len(salts) == 5


def test_tenant_and_class_come_from_the_credential() -> None:
    admission = LAB.gate("team").admit(LAB.ann)
    assert (admission.tenant, admission.priority) == ("lab", -1)


@pytest.mark.parametrize("profile", STRICT)
def test_a_strict_profile_shows_the_engine_a_class_and_no_tenant(profile: Profile) -> None:
    gate = LAB.gate(profile)
    assert {gate.admit(key).tenant for key in (LAB.ann, LAB.bob, LAB.cy)} == {"class -1", "class 3", "class 0"}


def test_open_honours_a_clients_own_priority() -> None:
    gate = Gate(Policy("open"), None, loopback=True)
    assert gate.with_request_options(gate.admit(None), priority=-7).priority == -7


@pytest.mark.parametrize("profile", ["team", "private", "paranoid"])
@pytest.mark.parametrize("priority", [-5, 0, 5])
def test_other_profiles_refuse_a_clients_own_priority(profile: str, priority: int) -> None:
    gate = LAB.gate(profile)
    admission = gate.admit(LAB.bob)
    with pytest.raises(PolicyError, match=rf"T6\.priority\.client-field\.{profile}.*leave the field `priority` out"):
        gate.with_request_options(admission, priority=priority)
    assert gate.with_request_options(admission, priority=None).priority == 3


def test_paranoid_refuses_a_stream_of_the_tokens_own_shape() -> None:
    gate = LAB.gate("paranoid")
    with pytest.raises(PolicyError, match=r"T6\.speculation\.plain-stream\.paranoid.*`stream` false"):
        gate.with_request_options(gate.admit(LAB.ann), stream=True)
    assert gate.with_request_options(gate.admit(LAB.ann), stream=False).priority == -1


@pytest.mark.parametrize("profile", Profile)
def test_a_sealed_node_streams_under_every_profile(profile: Profile) -> None:
    gate = Gate(Policy(profile), None, loopback=False, sealed=True)
    admission = gate.admit(None)
    assert gate.with_request_options(admission, stream=True) == admission


@pytest.mark.parametrize("profile", ["open", "team", "private"])
def test_other_profiles_stream(profile: str) -> None:
    gate = LAB.gate(profile)
    admission = gate.admit(LAB.ann)
    assert gate.with_request_options(admission, stream=True) == admission


def test_keys_that_are_asked_for_must_exist() -> None:
    with pytest.raises(ConfigError, match="cloister keys add"):
        Gate(Policy("team"), Credentials.empty(), loopback=False)


def test_an_admission_tells_nothing_of_who_asks() -> None:
    admission: Admission = LAB.gate("team").admit(LAB.ann)
    shown = repr(admission) + repr(admission.scope) + str(admission.scope)
    assert "lab" not in shown
    assert repr(admission.scope.salt)[2:-1] not in shown
    assert "-1" not in shown


@pytest.mark.parametrize("profile", Profile)
def test_a_prompt_cache_key_counts_inside_its_scope_and_only_where_load_may_decide(profile: Profile) -> None:
    gate = LAB.gate(profile)
    options = [("key", None), ("key", None), ("other", None), ("key", "salt"), ("", None), (None, None)]
    keys = [
        gate.with_request_options(gate.admit(holder), prompt_cache_key=key, cache_salt=salt).cache_key
        for holder in (LAB.ann, LAB.cy)
        for key, salt in options
    ]
    if profile in STRICT:
        assert set(keys) == {b""}
        return
    anns, cys = keys[: len(options)], keys[len(options) :]
    assert anns[0] == anns[1] != b""
    assert anns[4] == anns[5] == b""
    assert len({*anns, *cys}) == 7  # three each, and none


@pytest.mark.parametrize("profile", Profile)
def test_documents_are_encoded_separately_where_their_kv_may_be_used_again(profile: Profile) -> None:
    gate = LAB.gate(profile)
    admission = gate.admit(LAB.ann)
    if profile is Profile.PARANOID:
        with pytest.raises(PolicyError, match="documents"):
            gate.with_request_options(admission, documents=True)
    else:
        assert gate.with_request_options(admission, documents=True) == admission
