"""Key configurations, keys that are replaced and destroyed, the replay cache, and buckets of lengths."""

from __future__ import annotations

import contextlib
import sys

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from cloister.trust.sealing import (
    CHUNKED,
    GATEWAY_KEY_LIFE_S,
    LARGEST_BUCKET_BYTES,
    NODE_KEY_LIFE_S,
    ChunkOpener,
    Header,
    KemPrivateKey,
    KeyConfiguration,
    KeyConfigurationError,
    KeyRing,
    Receiver,
    ReplayCache,
    ReplayCacheFullError,
    RequestHead,
    Suite,
    UnsealError,
    bucket_bytes,
    encode_keys,
    encode_request,
    header_bytes,
    parse_configuration,
    parse_keys,
    seal_chunked_request,
)
from cloister.trust.sealing import HttpRequest as HttpRequest
from cloister.trust.sealing.keys import KEYS_MEDIA_TYPE, RECEIPT_GRACE_S
from cloister.types.errors import ConfigError, RequestTooLargeError

PUBLIC = X25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw()
P256 = bytes.fromhex("05 0010") + b"\4" * 65 + bytes.fromhex("0004 0001 0001")


def test_unknown_algorithms_in_a_list_of_keys_are_passed_over() -> None:
    ours = KeyConfiguration(3, PUBLIC, (Suite(1, 3),)).encode()
    ours = ours[:-6] + bytes.fromhex("0008 0009 0009") + ours[-4:]
    listed = len(P256).to_bytes(2, "big") + P256 + len(ours).to_bytes(2, "big") + ours
    assert parse_keys(listed) == (KeyConfiguration(3, PUBLIC, (Suite(1, 3),)),)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"\0\x05abc",
        len(P256).to_bytes(2, "big") + P256,
        encode_keys([KeyConfiguration(3, PUBLIC)])[:-1],
        encode_keys([KeyConfiguration(3, PUBLIC)]) + b"\0",
        encode_keys([KeyConfiguration(3, PUBLIC, ())]),
    ],
    ids=["nothing", "half a length", "too short", "another KEM only", "cut off", "more behind", "no suites"],
)
def test_a_list_of_keys_that_is_no_use_is_refused(data: bytes) -> None:
    with pytest.raises(KeyConfigurationError):
        parse_keys(data)


@given(st.binary(max_size=120))
def test_noise_is_no_list_of_keys_and_never_more_than_refused(noise: bytes) -> None:
    with contextlib.suppress(KeyConfigurationError):
        assert encode_keys(parse_keys(noise))


def test_a_client_takes_the_first_suite_that_both_have_whatever_the_order_of_the_list() -> None:
    assert KeyConfiguration(1, PUBLIC, (Suite(1, 3), Suite(1, 1))).choose_suite() == Suite(1, 1)
    with pytest.raises(KeyConfigurationError):
        KeyConfiguration(1, PUBLIC, ()).choose_suite()
    assert KEYS_MEDIA_TYPE == "application/ohttp-keys"
    assert parse_configuration(KeyConfiguration(1, PUBLIC).encode()).key_id == 1


def open_with(receiver: Receiver, sealed: bytes, now_s: float) -> bytes:
    exchange = receiver.begin(Header.parse(sealed), CHUNKED, now_s)
    opener = ChunkOpener(exchange.context)
    opened = b"".join(opener.feed(sealed[header_bytes(sealed) :])) + opener.close()
    receiver.accept(exchange.header, now_s)
    return opened


def test_an_old_key_opens_requests_for_the_overlap_and_not_a_moment_longer() -> None:
    ring = KeyRing(0.0, life_s=3600, overlap_s=900)
    receiver, old = Receiver(ring, ReplayCache(3600.0)), ring.current.configuration
    early, late, too_late = (seal_chunked_request(old, b"hello")[0] for _ in range(3))
    assert open_with(receiver, early, 2699.0) == b"hello"
    assert ring.current.configuration == old
    assert open_with(receiver, late, 3599.9) == b"hello"
    assert ring.current.configuration != old, "clients that ask now are given the next key"
    assert ring.num_keys == 2
    with pytest.raises(UnsealError):
        open_with(receiver, too_late, 3600.0)
    assert ring.num_keys == 1


def num_other_holders(private_key: KemPrivateKey) -> int:
    return sys.getrefcount(private_key) - 3  # the caller's, this function's and getrefcount's own


def test_nobody_holds_a_key_whose_time_is_over() -> None:
    ring = KeyRing(0.0, life_s=100, overlap_s=10)
    receiver = Receiver(ring, ReplayCache(100))
    ids = set()
    for turn in range(1, 8):
        old, configuration = ring.current.private_key, ring.current.configuration
        ids.add(configuration.key_id)
        open_with(receiver, seal_chunked_request(configuration, b"hello")[0], 90.0 * turn - 1)
        assert not ring.rotate(90.0 * turn - 0.1)
        assert ring.rotate(90.0 * turn)
        assert ring.next_change_s == 90.0 * turn + 10
        assert num_other_holders(old) == 1
        ring.rotate(90.0 * turn + 10)
        assert num_other_holders(old) == 0, "OpenSSL overwrites it when the last holder lets go"
    assert len(ids) == 7, "neighbours never have the same number"


def test_a_ring_that_slept_comes_back_with_one_fresh_key() -> None:
    ring = KeyRing(0.0, life_s=100, overlap_s=10)
    old = ring.current.configuration
    assert ring.find(old.key_id, 1e6) is None
    assert ring.rotate(1e6)
    assert (ring.num_keys, ring.current.created_s) == (1, 1e6)
    assert parse_keys(ring.publish()) == ring.configurations


def test_nodes_keys_live_an_hour_and_gateways_a_day() -> None:
    assert (NODE_KEY_LIFE_S, GATEWAY_KEY_LIFE_S) == (3600, 24 * 3600)
    ring = KeyRing(0.0)
    assert ring.current.expires_s - ring.current.created_s <= 3600
    with pytest.raises(ConfigError):
        KeyRing(0.0, life_s=10, overlap_s=10)


def test_the_private_key_is_in_no_text() -> None:
    key = KeyRing(0.0).current
    assert repr(key) == f"SealingKey({key.configuration.key_id})"


def test_the_replay_cache_refuses_rather_than_forgets() -> None:
    cache = ReplayCache(window_s=60, capacity=3)
    for number in range(3):
        cache.remember(bytes([number]), number)
    with pytest.raises(ReplayCacheFullError):
        cache.remember(b"new", 60)
    assert cache.has_seen(b"\0", 60)
    with pytest.raises(UnsealError):
        cache.remember(b"\0", 60)
    cache.remember(b"new", 60.5)
    assert len(cache) == 3
    assert not cache.has_seen(b"\0", 60.5), "its window is over, and so is the time in which it could be accepted"


def test_a_receiver_that_could_not_remember_a_request_opens_none() -> None:
    receiver = Receiver(KeyRing(0.0), ReplayCache(3600.0, capacity=1))
    first, second = (seal_chunked_request(receiver.ring.current.configuration, b"hello")[0] for _ in range(2))
    assert open_with(receiver, first, 0.0) == b"hello"
    with pytest.raises(ReplayCacheFullError):
        open_with(receiver, second, 1.0)


def test_noise_does_not_fill_the_replay_cache() -> None:
    replays = ReplayCache(3600.0, capacity=1)
    receiver = Receiver(KeyRing(0.0), replays)
    sealed, _ = seal_chunked_request(receiver.ring.current.configuration, b"hello")
    for number in range(5):
        with pytest.raises(UnsealError):
            open_with(receiver, sealed[:7] + bytes([number + 1]) * 32 + sealed[39:], 0.0)
    assert len(replays) == 0
    assert open_with(receiver, sealed, 0.0) == b"hello"


@given(st.integers(1, LARGEST_BUCKET_BYTES))
def test_a_bucket_is_the_smallest_power_of_four_kib_that_holds_a_message(num_bytes: int) -> None:
    bucket = bucket_bytes(num_bytes)
    assert bucket in {1024 * 4**n for n in range(8)}
    assert num_bytes <= bucket
    assert bucket == 1024 or bucket < 4 * num_bytes


def test_requests_of_one_bucket_have_one_sealed_length() -> None:
    configuration = KeyConfiguration(1, PUBLIC)
    lengths = set()
    for num_bytes in (1, 500, 900):
        request = HttpRequest(RequestHead("POST", "https", "", "/v1/chat/completions"), b"x" * num_bytes)
        plain = encode_request(request)
        sealed, _ = seal_chunked_request(configuration, encode_request(request, padded_to=bucket_bytes(len(plain))))
        lengths.add(len(sealed))
    assert lengths == {39 + 1 + 1024 + 16}


def test_what_fits_no_bucket_is_refused() -> None:
    with pytest.raises(RequestTooLargeError, match="16 MiB"):
        bucket_bytes(LARGEST_BUCKET_BYTES + 1)


def test_receipts_are_signed_for_an_answer_that_outlasts_its_key_and_for_none_later() -> None:
    ring = KeyRing(0.0)
    key_id, public = ring.current.configuration.key_id, ring.publish_receipt_key()
    ring.rotate(NODE_KEY_LIFE_S)
    assert ring.find(key_id, NODE_KEY_LIFE_S) is None
    assert ring.publish_receipt_key() != public
    late = ring.find_receipt_key(key_id, NODE_KEY_LIFE_S + RECEIPT_GRACE_S - 1)
    assert late is not None
    assert late.public_key().public_bytes_raw() == public
    assert ring.find_receipt_key(key_id, NODE_KEY_LIFE_S + RECEIPT_GRACE_S) is None


def test_a_receipt_key_whose_time_is_over_is_destroyed_though_nobody_asks() -> None:
    ring = KeyRing(0.0)
    key_id = ring.current.configuration.key_id
    steps = 0
    while (now_s := ring.next_change_s) < NODE_KEY_LIFE_S + RECEIPT_GRACE_S:
        ring.rotate(now_s)
        steps += 1
        assert steps < 10
    assert now_s == NODE_KEY_LIFE_S + RECEIPT_GRACE_S
    ring.rotate(now_s)
    key = ring._receipt_keys.get(key_id)
    assert key is None
