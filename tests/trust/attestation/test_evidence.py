"""Evidence and statements: one form only, within limits, bound by one digest."""

from __future__ import annotations

import hashlib
import json

import msgspec
import pytest

from cloister.trust.attestation import (
    Evidence,
    EvidenceError,
    Statement,
    gpu_nonce,
    read_evidence,
    read_statement,
    report_data,
)
from cloister.trust.attestation.evidence import MAX_EVIDENCE_BYTES, MAX_STATEMENT_BYTES

STATEMENT = Statement(
    release="0a" * 32,
    model="0b" * 32,
    profile="private",
    profile_digest="0c" * 32,
    configuration={"setting quant": '"none"'},
    hardening={"front.seccomp": "applied: filter on", "host": "missing: host not excluded"},
    keys=b"\x00\x04keys",
    capacity=3,
    not_before=1_700_000_000,
    not_after=1_700_003_600,
    checkpoint="cloister.test/log\n7\nAAAA\n",
)
EVIDENCE = Evidence("software", STATEMENT.encode(), b"report", {"vcek": b"\x30"})


def test_a_statement_comes_back_as_it_was():
    assert read_statement(STATEMENT.encode()) == STATEMENT


def test_evidence_comes_back_as_it_was():
    assert read_evidence(EVIDENCE.encode()) == EVIDENCE


def test_the_statement_is_json_with_sorted_keys_and_no_white_space():
    encoded = STATEMENT.encode()
    assert encoded == json.dumps(json.loads(encoded), sort_keys=True, separators=(",", ":")).encode()


def test_report_data_is_sha512_of_the_statement_and_the_gpu_nonce_its_sha256():
    assert EVIDENCE.report_data == hashlib.sha512(STATEMENT.encode()).digest() == report_data(EVIDENCE.statement)
    assert gpu_nonce(EVIDENCE.report_data) == hashlib.sha256(EVIDENCE.report_data).digest()


def test_a_node_is_named_by_its_keys():
    assert STATEMENT.node_id == hashlib.sha256(b"\x00\x04keys").hexdigest()


OTHERS = {
    "release": "1a" * 32,
    "model": "1b" * 32,
    "profile": "open",
    "profile_digest": "1c" * 32,
    "configuration": {"setting quant": '"int8"'},
    "hardening": {"front.seccomp": "missing: no filter", "host": "missing: host not excluded"},
    "keys": b"\x00\x04keyz",
    "capacity": 4,
    "not_before": 1_700_000_001,
    "not_after": 1_700_003_599,
    "checkpoint": "cloister.test/log\n8\nAAAA\n",
    "receipt_key": bytes(32),
    "unit_key": bytes(32),
    "unit_members": ("0d" * 32,),
}
BYTES_BEFORE_UNITS = "61b62b92b68fa63ba418f24d0b064efe"
"""Of the report data of `STATEMENT`, as it was before statements had fields for units."""
OTHERS_ALONG = {"unit_members": {"unit_key": bytes(32)}}


@pytest.mark.parametrize("field", [f.name for f in msgspec.structs.fields(Statement) if f.name != "type"])
def test_every_field_is_bound_by_the_report_data(field: str):
    along = OTHERS_ALONG.get(field, {})
    one = msgspec.structs.replace(STATEMENT, **along)
    other = msgspec.structs.replace(STATEMENT, **{field: OTHERS[field]}, **along)
    assert report_data(other.encode()) != report_data(one.encode())


def test_a_statement_without_a_unit_has_the_bytes_that_it_always_had():
    """Evidence that was made before there were units, or without one, is verified as before, byte for byte."""
    assert report_data(STATEMENT.encode()).hex()[:32] == BYTES_BEFORE_UNITS
    assert b"unit" not in STATEMENT.encode()
    for field in (b',"unit_key":""', b',"unit_members":[]'):
        padded = STATEMENT.encode().removesuffix(b"}") + field + b"}"
        with pytest.raises(EvidenceError, match="canonical"):
            read_statement(padded)


def test_a_statement_with_a_unit_comes_back_as_it_was():
    unit = msgspec.structs.replace(STATEMENT, unit_key=bytes(range(32)), unit_members=("0d" * 32, "0e" * 32))
    assert read_statement(unit.encode()) == unit


@pytest.mark.parametrize(
    "change",
    [
        {"unit_key": bytes(31)},
        {"unit_key": bytes(33)},
        {"unit_members": ("0d" * 32,)},
        {"unit_key": bytes(32), "unit_members": ("0e" * 32, "0d" * 32)},
        {"unit_key": bytes(32), "unit_members": ("0d" * 32, "0d" * 32)},
        {"unit_key": bytes(32), "unit_members": (hashlib.sha256(bytes(32)).hexdigest(),)},
        {"unit_key": bytes(32), "unit_members": ("short",)},
        {"unit_key": bytes(32), "unit_members": tuple(f"{number:064x}" for number in range(8))},
    ],
    ids=["short", "long", "no key", "not sorted", "twice", "itself", "no digest", "too many"],
)
def test_a_unit_that_is_none_is_neither_written_nor_read(change: dict[str, object]):
    broken = msgspec.structs.replace(STATEMENT, **change)
    with pytest.raises(EvidenceError):
        broken.encode()


@pytest.mark.parametrize(
    "change",
    [
        {"release": "0A" * 32},
        {"model": "0b" * 31},
        {"profile": "Private"},
        {"profile_digest": ""},
        {"hardening": {"no spaces": "applied: x"}},
        {"hardening": {"front.seccomp": "perhaps: x"}},
        {"keys": b""},
        {"capacity": 0},
        {"capacity": 10**7},
        {"not_after": STATEMENT.not_before},
        {"not_after": STATEMENT.not_before + 3601},
        {"checkpoint": "x" * 20_000},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_statement_out_of_range_is_neither_written_nor_read(change: dict[str, object]):
    broken = msgspec.structs.replace(STATEMENT, **change)
    with pytest.raises(EvidenceError):
        broken.encode()
    with pytest.raises(EvidenceError):
        read_statement(msgspec.json.encode(broken, order="sorted"))


def test_another_form_of_the_same_statement_is_refused():
    with pytest.raises(EvidenceError, match="canonical"):
        read_statement(STATEMENT.encode() + b" ")
    unsorted = json.dumps(dict(reversed(json.loads(STATEMENT.encode()).items())), separators=(",", ":")).encode()
    with pytest.raises(EvidenceError, match="canonical"):
        read_statement(unsorted)


def test_unknown_fields_are_refused():
    more = json.loads(STATEMENT.encode()) | {"zeal": 1}
    with pytest.raises(EvidenceError, match="cannot be read"):
        read_statement(json.dumps(more, sort_keys=True, separators=(",", ":")).encode())


def test_what_is_too_long_is_not_even_parsed():
    with pytest.raises(EvidenceError, match="at most"):
        read_statement(b"{" * (MAX_STATEMENT_BYTES + 1))
    with pytest.raises(EvidenceError, match="at most"):
        read_evidence(b"{" * (MAX_EVIDENCE_BYTES + 1))
    with pytest.raises(EvidenceError, match="at most"):
        Evidence("tdx", b"", b"x" * MAX_EVIDENCE_BYTES).encode()


def test_an_error_never_repeats_the_bytes():
    with pytest.raises(EvidenceError) as caught:
        read_evidence(b'{"kind":"canary-7f3a"')
    assert "canary" not in str(caught.value)
