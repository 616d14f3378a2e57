"""The epoch file: one form only, and only now."""

from __future__ import annotations

import json

import pytest
from msgspec import UNSET

from cloister.trust.transparency.epoch import (
    EPOCH_PREFIX,
    MAX_EPOCH_BYTES,
    Epoch,
    GatewayEntry,
    IssuerEntry,
    NodeEntry,
    build_epoch,
    check_times,
    encode_epoch,
    epoch_leaf,
    parse_epoch,
)
from cloister.trust.transparency.refusal import Reason, TransparencyError

START = 1_790_000_000


def make_epoch(num_nodes: int = 2, **changes: object) -> Epoch:
    fields: dict[str, object] = {
        "number": 7,
        "not_before": START,
        "not_after": START + 3600,
        "gateway": GatewayEntry("https://gateway.example", b"gateway keys"),
        "issuers": [IssuerEntry("https://issuer.example", b"b", 0), IssuerEntry("https://issuer.example", b"a", 0)],
        "nodes": [NodeEntry(f"{n:064x}", n + 1, b"node keys" * 5, f"{n:064x}") for n in reversed(range(num_nodes))],
        "release": "ab" * 32,
        "profile": "private",
        "witnesses": ["w2+key", "w1+key"],
    }
    return build_epoch(**{**fields, **changes})  # type: ignore[arg-type]


def refuse(data: bytes) -> Reason:
    with pytest.raises(TransparencyError) as caught:
        parse_epoch(data)
    return caught.value.reason


def test_one_epoch_is_one_string_of_bytes_in_whatever_order_it_was_given() -> None:
    epoch = make_epoch()
    again = make_epoch(nodes=list(epoch.nodes), issuers=list(epoch.issuers), witnesses=["w1+key", "w2+key"])
    assert encode_epoch(again) == encode_epoch(epoch)
    assert parse_epoch(encode_epoch(epoch)) == epoch
    assert encode_epoch(epoch) == json.dumps(json.loads(encode_epoch(epoch)), sort_keys=True, separators=(",", ":")).encode()
    assert epoch_leaf(epoch) == EPOCH_PREFIX + encode_epoch(epoch)
    assert epoch.capacity == 3


def test_an_epoch_older_than_budgets_keeps_its_bytes_and_a_budget_has_its_range() -> None:
    older = encode_epoch(make_epoch())
    assert b"budget" not in older
    assert parse_epoch(older).issuers[0].budget is UNSET
    issuers = [IssuerEntry("https://issuer.example", b"a", 0, budget=512)]
    named = encode_epoch(make_epoch(issuers=issuers))
    assert parse_epoch(named).issuers[0].budget == 512
    for out_of_range in (b"0", b"-1", b"1000000000"):
        assert refuse(named.replace(b"512", out_of_range)) is Reason.MALFORMED


def rewrite(**changes: object) -> bytes:
    fields = {**json.loads(encode_epoch(make_epoch())), **changes}
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (rewrite().replace(b":7,", b": 7,"), Reason.NOT_CANONICAL),
        (rewrite().replace(b'"epoch":7', b'"epoch":6,"epoch":7'), Reason.NOT_CANONICAL),
        (rewrite().replace(b"Z2F0", b"Z2F\\u0030"), Reason.NOT_CANONICAL),
        (
            json.dumps(json.loads(rewrite()), sort_keys=False, separators=(",", ":")).encode()[:-1] + b',"epoch":7}',
            Reason.NOT_CANONICAL,
        ),
        (rewrite(nodes=json.loads(rewrite())["nodes"][::-1]), Reason.NOT_CANONICAL),
        (rewrite(nodes=json.loads(rewrite())["nodes"][:1] * 2), Reason.NOT_CANONICAL),
        (rewrite(issuers=json.loads(rewrite())["issuers"][:1] * 2), Reason.NOT_CANONICAL),
        (rewrite(witnesses=["b", "a"]), Reason.NOT_CANONICAL),
        (rewrite(extra=1), Reason.MALFORMED),
        (rewrite(nodes=[]), Reason.MALFORMED),
        (rewrite(nodes=[{**json.loads(rewrite())["nodes"][0], "capacity": 0}]), Reason.MALFORMED),
        (rewrite(nodes=[{**json.loads(rewrite())["nodes"][0], "node_id": "AB" * 32}]), Reason.MALFORMED),
        (rewrite(release="ab" * 32 + "\n"), Reason.MALFORMED),
        (rewrite(not_after=START + 3601), Reason.MALFORMED),
        (rewrite(not_after=START), Reason.MALFORMED),
        (rewrite(epoch=-1), Reason.MALFORMED),
        (rewrite(profile="../private"), Reason.MALFORMED),
        (b"[" * 60_000, Reason.MALFORMED),
        (b"\xff", Reason.MALFORMED),
        (b" " * (MAX_EPOCH_BYTES + 1), Reason.TOO_LARGE),
    ],
)
def test_any_other_way_to_write_an_epoch_is_refused(data: bytes, reason: Reason) -> None:
    assert refuse(data) == reason


def test_an_epoch_with_more_nodes_than_an_entry_can_hold_is_refused() -> None:
    assert len(make_epoch(240).nodes) == 240
    with pytest.raises(TransparencyError, match="most"):
        make_epoch(300)


def test_an_epoch_holds_from_its_beginning_to_its_end_and_no_longer() -> None:
    epoch = make_epoch()
    for now in (START - 300, START, START + 3599.9):
        check_times(epoch, now)
    for now, reason in ((START - 300.1, Reason.NOT_YET_VALID), (START + 3600, Reason.EXPIRED)):
        with pytest.raises(TransparencyError) as caught:
            check_times(epoch, now)
        assert caught.value.reason == reason
