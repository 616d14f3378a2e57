"""CBOR: what RFC 8949 says for the items that are read, and an error for everything else."""

from __future__ import annotations

import pytest

from cloister.trust.attestation import EvidenceError
from cloister.trust.attestation.cbor import encode_array, encode_bytes, encode_text, read_cbor

RFC_8949_APPENDIX_A: dict[str, object] = {
    "00": 0,
    "17": 23,
    "1818": 24,
    "1903e8": 1000,
    "1a000f4240": 1000000,
    "1bffffffffffffffff": 18446744073709551615,
    "20": -1,
    "3903e7": -1000,
    "f4": False,
    "f5": True,
    "f6": None,
    "40": b"",
    "4401020304": b"\x01\x02\x03\x04",
    "60": "",
    "6449455446": "IETF",
    "62c3bc": "ü",
    "80": [],
    "8301820203820405": [1, [2, 3], [4, 5]],
    "a0": {},
    "a201020304": {1: 2, 3: 4},
    "a26161016162820203": {"a": 1, "b": [2, 3]},
}


@pytest.mark.parametrize("encoded", RFC_8949_APPENDIX_A)
def test_an_item_is_read_as_the_rfc_says(encoded: str):
    assert read_cbor(bytes.fromhex(encoded)) == RFC_8949_APPENDIX_A[encoded]


REFUSED = {
    "nothing": "",
    "a second item": "0000",
    "a tag": "c11a514b67b0",
    "a half float": "f93c00",
    "a double": "fb3ff199999999999a",
    "undefined": "f7",
    "a simple value": "f8ff",
    "an indefinite byte string": "5f42010243030405ff",
    "an indefinite text": "7f657374726561646d696e67ff",
    "an indefinite array": "9f01ff",
    "an indefinite map": "bf6161019f0203ffff",
    "a longer form than needed": "1817",
    "a length in a longer form than needed": "580101",
    "a byte string that ends early": "4401",
    "a head that ends early": "1903",
    "an array of more items than there are bytes": "9bffffffffffffffff",
    "a map of more items than there are bytes": "bbffffffffffffffff",
    "a key that is there twice": "a2010101 02".replace(" ", ""),
    "a key that is a list": "a18001",
    "a key that is true": "a1f501",
    "text that is not UTF-8": "61ff",
    "a reserved length": "1c",
}


@pytest.mark.parametrize("case", REFUSED)
def test_anything_else_is_refused(case: str):
    with pytest.raises(EvidenceError):
        read_cbor(bytes.fromhex(REFUSED[case]))


def test_a_deeply_nested_item_is_refused_before_the_stack_ends():
    assert read_cbor(b"\x81" * 8 + b"\x01") == [[[[[[[[1]]]]]]]]
    with pytest.raises(EvidenceError, match="nested"):
        read_cbor(b"\x81" * 100_000 + b"\x01")


@pytest.mark.parametrize("length", [0, 23, 24, 255, 256, 65_535, 65_536])
def test_what_is_encoded_is_read_again(length: int):
    encoded = encode_array([encode_bytes(b"x" * length), encode_text("y" * length)])
    assert read_cbor(encoded) == [b"x" * length, "y" * length]
