"""Two machines of a unit prove to each other that they hold the keys of their statements. An attacker between them who changes,
repeats or sends back what they say gets nothing, and so does one who has their evidence without their keys."""

from __future__ import annotations

import contextlib
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.private.unit.pairing import (
    Agreed,
    LeaderHandshake,
    MemberHandshake,
    SealedRecords,
    UnitKey,
    UnitRefusedError,
    digest_of,
    encode_refusal,
)
from cloister.trust.sealing import KEMS, X25519, XWING
from tests.thinning import examples

LEADERS, MEMBERS = b"the leader's evidence", b"the member's evidence"


def pair(
    leader_key: UnitKey, member_key: UnitKey, change: object = lambda number, message: message, known: UnitKey | None = None
) -> tuple[Agreed, Agreed]:
    """Pairs two nodes, while `change(number, message)` is done to each message on its way.

    Args:
        known: whose key the member's evidence names, as the leader verified it; default: the member's.
    """
    leader, member = LeaderHandshake(leader_key), MemberHandshake(member_key, MEMBERS)
    offer = member.offer(change(0, leader.hello))  # type: ignore[operator]
    leader.read_offer(change(1, offer))  # type: ignore[operator]
    leader.check_offer((known or member_key).public)
    claim = leader.claim((known or member_key).public, 3, LEADERS)
    index, evidence = member.read_claim(change(2, claim))  # type: ignore[operator]
    answer, of_member = member.accept(leader_key.public)
    of_leader = leader.finish(change(3, answer))  # type: ignore[operator]
    assert (index, evidence) == (3, LEADERS)
    return of_leader, of_member


@cache
def known_keys() -> tuple[UnitKey, UnitKey]:
    return UnitKey(), UnitKey()


@pytest.fixture
def keys() -> tuple[UnitKey, UnitKey]:
    return UnitKey(), UnitKey()


def test_both_sides_have_the_same_secret_and_another_one_each_time(keys: tuple[UnitKey, UnitKey]):
    of_leader, of_member = pair(*keys)
    assert of_leader == of_member
    assert len(of_leader.secret) == 32
    assert len(of_leader.id) == 16
    again, _ = pair(*keys)
    assert not {again.secret, again.id, again.of_leader, again.of_member} & {
        of_leader.secret, of_leader.id, of_leader.of_leader, of_leader.of_member
    }  # fmt: skip
    assert of_leader.secret.hex() not in repr(of_leader)


def test_a_key_is_named_by_its_digest_and_wiped_at_the_end():
    key = UnitKey()
    assert key.digest == digest_of(key.public)
    assert UnitKey().public != key.public
    key.close()
    with pytest.raises(UnitRefusedError, match="ends"):
        key.agree(UnitKey().public)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("where", [0, 1, 16, 20, 40, 60, 100, -1])
def test_one_byte_changed_on_the_way_ends_the_pairing(keys: tuple[UnitKey, UnitKey], number: int, where: int):
    """Public keys, the encapsulated secret, the member's number, proofs, and both documents."""

    def change(at: int, message: bytes) -> bytes:
        if at != number:
            return message
        changed = bytearray(message)
        changed[min(where, len(message) - 1)] ^= 1
        return bytes(changed)

    with pytest.raises(UnitRefusedError) as refused:
        pair(*keys, change)
    assert refused.value.reason in ("handshake", "refused")


@pytest.mark.parametrize("number", range(4))
def test_a_message_that_is_cut_or_empty_ends_the_pairing(keys: tuple[UnitKey, UnitKey], number: int):
    for length in (0, 1, 32):
        with pytest.raises(UnitRefusedError):
            pair(*keys, lambda at, message, length=length: message[:length] if at == number else message)


@pytest.mark.parametrize("number", range(4))
def test_messages_of_an_earlier_pairing_are_not_believed(keys: tuple[UnitKey, UnitKey], number: int):
    recorded: dict[int, bytes] = {}
    pair(*keys, lambda at, message: recorded.setdefault(at, message))
    with pytest.raises(UnitRefusedError, match=r"prove|public key"):
        pair(*keys, lambda at, message: recorded[at] if at == number else message)


def test_a_leaders_proof_that_is_sent_back_proves_nothing(keys: tuple[UnitKey, UnitKey]):
    leader, member = LeaderHandshake(keys[0]), MemberHandshake(keys[1], MEMBERS)
    leader.read_offer(member.offer(leader.hello))
    claim = leader.claim(keys[1].public, 1, LEADERS)
    with pytest.raises(UnitRefusedError, match="does not prove"):
        leader.finish(b"+" + claim[1:33])


def test_a_leader_is_not_paired_with_itself(keys: tuple[UnitKey, UnitKey]):
    with pytest.raises(UnitRefusedError, match="own key"):
        pair(keys[0], keys[0])


def test_who_shows_a_members_evidence_without_its_key_is_refused(keys: tuple[UnitKey, UnitKey]):
    """Old evidence, taken from a client's copy: it is public."""
    with pytest.raises(UnitRefusedError, match=r"leader does not prove|member does not prove"):
        pair(keys[0], UnitKey(), known=keys[1])


def test_who_shows_a_leaders_evidence_without_its_key_is_refused(keys: tuple[UnitKey, UnitKey]):
    thief = LeaderHandshake(UnitKey())
    member = MemberHandshake(keys[1], MEMBERS)
    thief.read_offer(member.offer(thief.hello))
    member.read_claim(thief.claim(keys[1].public, 1, LEADERS))
    with pytest.raises(UnitRefusedError, match="does not prove"):
        member.accept(keys[0].public)


def test_a_thief_of_one_key_is_not_believed_to_be_the_other_side(keys: tuple[UnitKey, UnitKey]):
    """Who has taken a member's key can be that member, and nobody else to it."""
    stolen = keys[1]
    pretended = LeaderHandshake(stolen)  # has the member's key, and claims to be the leader
    member = MemberHandshake(stolen, MEMBERS)
    pretended.read_offer(member.offer(pretended.hello))
    other = UnitKey()
    member.read_claim(pretended.claim(other.public, 1, LEADERS))
    with pytest.raises(UnitRefusedError, match="does not prove"):
        member.accept(keys[0].public)


def test_a_leader_believes_no_offer_of_somebody_who_has_a_members_evidence_only(keys: tuple[UnitKey, UnitKey]):
    """So it lists none: else a machine that is not there any more would stand in its statement for an hour."""
    leader, member = LeaderHandshake(keys[0]), MemberHandshake(keys[1], MEMBERS)
    offer = member.offer(leader.hello)
    leader.read_offer(offer)
    leader.check_offer(keys[1].public)
    later = LeaderHandshake(keys[0])
    later.read_offer(offer)
    with pytest.raises(UnitRefusedError, match="does not prove"):
        later.check_offer(keys[1].public)
    leader.read_offer(MemberHandshake(UnitKey(), MEMBERS).offer(leader.hello))
    with pytest.raises(UnitRefusedError, match="does not prove"):
        leader.check_offer(keys[1].public)
    leader.read_offer(offer.replace(MEMBERS, b"older " + MEMBERS))
    with pytest.raises(UnitRefusedError, match="does not prove"):
        leader.check_offer(keys[1].public)


@pytest.mark.parametrize("public", [bytes(32), b"\x01" + bytes(31)])
def test_a_key_of_low_order_is_refused(keys: tuple[UnitKey, UnitKey], public: bytes):
    with pytest.raises(UnitRefusedError, match="nobody can have drawn"):
        keys[0].agree(public)
    leader = LeaderHandshake(keys[0])
    offer = bytearray(MemberHandshake(keys[1], MEMBERS).offer(leader.hello))
    offer[1:33] = public
    leader.read_offer(bytes(offer))
    with pytest.raises(UnitRefusedError, match="nobody can have drawn"):
        leader.claim(keys[1].public, 1, LEADERS)


def test_the_other_side_hears_why_it_is_refused_and_its_words_are_kept_short(keys: tuple[UnitKey, UnitKey]):
    leader = LeaderHandshake(keys[0])
    with pytest.raises(UnitRefusedError, match="the member refuses: another release") as refused:
        leader.read_offer(encode_refusal("another release"))
    assert refused.value.reason == "refused"
    with pytest.raises(UnitRefusedError) as long:
        leader.read_offer(b"-" + b"\x1b[2J\n" + b"x" * 100_000)
    assert len(long.value.message) < 700
    assert long.value.message.isprintable()


@pytest.mark.skipif(KEMS[0] is not XWING, reason="this OpenSSL has no ML-KEM")
def test_a_pairing_is_sealed_against_quantum_computers_and_cannot_be_talked_down(keys: tuple[UnitKey, UnitKey]):
    leader, member = LeaderHandshake(keys[0]), MemberHandshake(keys[1], MEMBERS)
    assert len(leader.hello) > XWING.public_key_bytes
    member.offer(leader.hello)
    older = LeaderHandshake(keys[0], (X25519,))
    only_new = MemberHandshake(keys[1], MEMBERS, (XWING,))
    with pytest.raises(UnitRefusedError, match="different key exchanges"):
        only_new.offer(older.hello)


@pytest.mark.hypothesis
@settings(max_examples=examples(200), deadline=None)
@given(noise=st.binary(max_size=1500), where=st.integers(0, 3000))
def test_bytes_of_anybody_are_refused_and_break_nothing(noise: bytes, where: int):
    """Noise alone, and noise somewhere in what the other side would say."""
    keys = known_keys()
    leader, member = LeaderHandshake(keys[0]), MemberHandshake(keys[1], MEMBERS)
    hello = leader.hello
    for sent in (noise, b"cloister unit v1" + noise, hello[:where] + noise + hello[where + len(noise) :]):
        if sent != hello:
            with contextlib.suppress(UnitRefusedError):
                member.offer(sent)
    offer = member.offer(hello)
    for sent in (noise, b"+" + noise, offer[:where] + noise + offer[where + len(noise) :]):
        if sent != offer:
            with pytest.raises(UnitRefusedError):
                take_offer(leader, keys[1], sent)
    for sent in (noise, b"\x01" + noise):
        with pytest.raises(UnitRefusedError):
            take_claim(member, keys[0], sent)


def take_offer(leader: LeaderHandshake, member_key: UnitKey, offer: bytes) -> None:
    leader.read_offer(offer)
    leader.check_offer(member_key.public)


def take_claim(member: MemberHandshake, leader_key: UnitKey, claim: bytes) -> None:
    member.read_claim(claim)
    member.accept(leader_key.public)


def test_records_are_opened_once_in_order_and_by_the_other_side(keys: tuple[UnitKey, UnitKey]):
    of_leader, of_member = pair(*keys)
    near = SealedRecords(keys[0].memory, of_leader, is_leader=True)
    far = SealedRecords(keys[1].memory, of_member, is_leader=False)
    first, second = near.seal(b"one"), near.seal(b"two")
    assert b"one" not in first
    with pytest.raises(UnitRefusedError):
        far.open(second)  # before the first
    with pytest.raises(UnitRefusedError):
        near.open(first)  # sent back
    assert far.open(first) == b"one"
    with pytest.raises(UnitRefusedError):
        far.open(first)  # again
    with pytest.raises(UnitRefusedError):
        far.open(second[:-1] + bytes([second[-1] ^ 1]))
    assert far.open(second) == b"two"
    assert near.open(far.seal(b"three")) == b"three"
    near.close()
    with pytest.raises(UnitRefusedError, match="ends"):
        near.seal(b"four")
