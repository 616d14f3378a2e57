"""The subset of CBOR (RFC 8949) that attestation documents use. Pure.

The input is untrusted: it is parsed before a signature is checked. So there are no tags, floats, indefinite lengths or repeated
keys, lengths must be in their shortest form, and trailing bytes are an error: every byte string has one meaning.
"""

from __future__ import annotations

from typing import Final

from cloister.trust.attestation.evidence import EvidenceError

Item = int | bytes | str | bool | None | list["Item"] | dict["Item", "Item"]
"""A decoded CBOR item; keys of maps are numbers, byte strings and texts."""

MAX_DEPTH: Final = 8
_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)  # major types, section 3.1
_SIMPLE_VALUES: Final = {20: False, 21: True, 22: None}
_LENGTHS: Final = {24: 1, 25: 2, 26: 4, 27: 8}


def read_cbor(data: bytes) -> Item:
    """Reads one item.

    Raises:
        EvidenceError: malformed, more than one item, or an unsupported type of item.
    """
    item, end = _read(data, 0, MAX_DEPTH)
    if end != len(data):
        raise EvidenceError("there is more behind the end of a CBOR item")
    return item


def encode_bytes(value: bytes) -> bytes:
    """Returns a byte string as CBOR."""
    return _encode_head(_BYTES, len(value)) + value


def encode_text(value: str) -> bytes:
    """Returns a text as CBOR."""
    encoded = value.encode()
    return _encode_head(_TEXT, len(encoded)) + encoded


def encode_array(items: list[bytes]) -> bytes:
    """Returns an array of encoded items."""
    return _encode_head(_ARRAY, len(items)) + b"".join(items)


def _encode_head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes((major << 5 | argument,))
    code, length = next((code, length) for code, length in _LENGTHS.items() if argument < 1 << 8 * length)
    return bytes((major << 5 | code,)) + argument.to_bytes(length, "big")


def _read(data: bytes, at: int, depth: int) -> tuple[Item, int]:
    major, argument, at = _read_head(data, at)
    if major == _UNSIGNED:
        return argument, at
    if major == _NEGATIVE:
        return -1 - argument, at
    if major == _SIMPLE and argument in _SIMPLE_VALUES:
        return _SIMPLE_VALUES[argument], at
    if major in (_TAG, _SIMPLE):
        raise EvidenceError("a CBOR item has a tag, a float or a value that is not read here")
    if argument > len(data) - at:  # every byte and every item takes one byte at least
        raise EvidenceError("a CBOR item ends too early")
    if major in (_BYTES, _TEXT):
        content = data[at : at + argument]
        return (content if major == _BYTES else _decode(content)), at + argument
    if depth == 0:
        raise EvidenceError(f"a CBOR item is nested deeper than {MAX_DEPTH}")
    return _read_array(data, at, argument, depth - 1) if major == _ARRAY else _read_map(data, at, argument, depth - 1)


def _read_head(data: bytes, at: int) -> tuple[int, int, int]:
    if at >= len(data):
        raise EvidenceError("a CBOR item ends too early")
    major, code = data[at] >> 5, data[at] & 31
    at += 1
    if code < 24:
        return major, code, at
    length = _LENGTHS.get(code, 0)
    argument = int.from_bytes(data[at : at + length], "big")
    if not length or at + length > len(data):
        raise EvidenceError("a CBOR item ends too early, or has a length that is not read here")
    if major == _SIMPLE or len(_encode_head(major, argument)) != 1 + length:
        raise EvidenceError("a CBOR item is not in its shortest form, or of a kind that is not read here")
    return major, argument, at + length


def _read_array(data: bytes, at: int, count: int, depth: int) -> tuple[Item, int]:
    items: list[Item] = []
    for _ in range(count):
        item, at = _read(data, at, depth)
        items.append(item)
    return items, at


def _read_map(data: bytes, at: int, count: int, depth: int) -> tuple[Item, int]:
    items: dict[Item, Item] = {}
    for _ in range(count):
        key, at = _read(data, at, depth)
        if not isinstance(key, int | str | bytes) or isinstance(key, bool) or key in items:
            raise EvidenceError("a CBOR map has a key twice, or one that is not read here")
        items[key], at = _read(data, at, depth)
    return items, at


def _decode(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise EvidenceError("a CBOR text is not UTF-8") from None
