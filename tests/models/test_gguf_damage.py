"""Damaged and hostile GGUF files end in one line that says what to do: no crash, no hang, no great allocation."""

from __future__ import annotations

import resource
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.models import load
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.errors import CloisterError, MemoryBudgetError, ModelError
from cloister.types.gguf import read_gguf
from tests.gguf_factory import make_gguf
from tests.thinning import examples

HEAD = b"GGUF" + struct.pack("<I", 3)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("good") / "tiny", "llama", "Q4_K")


def open_wholly(path: Path) -> None:
    """Everything that a server does with a file before the first token."""
    model = load(path)
    for _ in model.weights:
        pass
    tokenizer = Tokenizer(path)
    tokenizer.encode("the cat", parse_special=False)
    ChatTemplate.load(path)


def complaint(path: Path) -> str:
    try:
        open_wholly(path)
    except CloisterError as error:
        return error.message
    return ""


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def counts(num_tensors: int, num_entries: int) -> bytes:
    return HEAD + struct.pack("<QQ", num_tensors, num_entries)


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "another format": b"PK\x03\x04" + bytes(60),
    "only the magic bytes": b"GGUF",
    "endless tensors": counts(2**63, 0) + bytes(1000),
    "endless entries": counts(0, 2**63) + bytes(1000),
    "many entries": counts(0, 90_000) + bytes(5_000_000),
    "a key beyond the end": counts(0, 1) + struct.pack("<Q", 2**62) + bytes(100),
    "a key that is no text": counts(0, 1) + entry(b"\xff\xfe", 4, bytes(4)),
    "a value of an unknown type": counts(0, 1) + entry(b"a", 99, bytes(8)),
    "an array beyond the end": counts(0, 1) + entry(b"a", 9, struct.pack("<IQ", 10, 2**61)),
    "an array of endless empty texts": counts(0, 1) + entry(b"a", 9, struct.pack("<IQ", 8, 2**60)) + bytes(8_000_000),
    "a text in an array beyond the end": counts(0, 1) + entry(b"a", 9, struct.pack("<IQQ", 8, 1, 2**63)),
    "an array of arrays": counts(0, 1) + entry(b"a", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 9, 1) * 50),
    "a key twice": counts(0, 2) + entry(b"a", 4, bytes(4)) * 2,
    "no alignment": counts(0, 1) + entry(b"general.alignment", 4, bytes(4)),
    "an odd alignment": counts(0, 1) + entry(b"general.alignment", 4, struct.pack("<I", 33)),
    "a tensor of no dimensions": counts(1, 0) + text(b"a") + struct.pack("<I", 0) + bytes(64),
    "a tensor of many dimensions": counts(1, 0) + text(b"a") + struct.pack("<I", 2**31) + bytes(64),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_head_is_refused_at_once(name: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(HOSTILE[name])
    tracemalloc.start()
    began = time.process_time()  # a busy machine makes nobody's file worse
    with pytest.raises(ModelError, match=r"bad\.gguf is .*download or copy it again") as caught:
        read_gguf(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - began < 60  # a second, or years
    assert peak < 1 << 20
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(("version", "message"), [(1, "version 1; versions 2 and 3"), (0x03000000, "big-endian")])
def test_another_version_is_told(version: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "old.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(ModelError, match=message):
        read_gguf(tmp_path / "old.gguf")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no file"):
        read_gguf(tmp_path / "none.gguf")


def test_a_header_is_read_once_until_its_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(counts(0, 1) + entry(b"a", 4, struct.pack("<I", 1)))
    assert read_gguf(path) is read_gguf(path)
    other = tmp_path / "b.gguf"
    other.write_bytes(counts(0, 1) + entry(b"a", 4, struct.pack("<I", 2)))
    other.replace(path)
    assert read_gguf(path).get("a", int) == 2


def replace(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert content.count(old) == 1
        return content.replace(old, new)

    return change


def number(key: bytes, value: int) -> bytes:
    return entry(key, 4, struct.pack("<I", value))


def grow_heads(content: bytes) -> bytes:
    for key in (b"llama.attention.key_length", b"llama.attention.value_length"):
        content = replace(number(key, 64), number(key, 2**32 - 4))(content)
    return content


CHANGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "endless layers": (replace(number(b"llama.block_count", 2), number(b"llama.block_count", 2**32 - 1)), "block_count"),
    "no layers": (replace(number(b"llama.block_count", 2), number(b"llama.block_count", 0)), "must be positive"),
    "huge heads": (grow_heads, "even size up to"),
    "wide rows": (
        replace(number(b"llama.feed_forward_length", 512), number(b"llama.feed_forward_length", 2**30)),
        "has the shape",
    ),
    "a tensor beyond the end": (lambda content: content[:-5000], "cut short at the tensor"),
    "a tensor renamed": (replace(b"blk.1.attn_q.weight", b"blk.9.attn_q.weight"), "lacks the tensor 'blk.1.attn_q.weight'"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_and_tensors_that_do_not_fit_are_told(name: str, good: Path, tmp_path: Path) -> None:
    change, message = CHANGES[name]
    file = tmp_path / "bad.gguf"
    file.write_bytes(change(good.read_bytes()))
    with pytest.raises(ModelError, match=message):
        load(file)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_any_damage_to_the_head_is_harmless(good: Path, data: st.DataObject) -> None:
    """Flipped bytes, wild numbers and cuts: either it is refused, or it is a model all the same."""
    content = bytearray(good.read_bytes())
    head = content.index(b"output_norm.weight") + 60
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, head - 8))
        value = data.draw(st.binary(min_size=1, max_size=8))
        content[place : place + len(value)] = value
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    file = good.parent / "damaged.gguf"
    file.write_bytes(content)
    assert "\n" not in complaint(file)


def test_a_file_that_memory_cannot_map_is_not_called_damaged(tmp_path: Path) -> None:
    file = tmp_path / "whole.gguf"
    with file.open("wb") as written:
        written.write(HEAD)
        written.truncate(1 << 30)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + (16 << 20), hard))
    try:
        with pytest.raises(MemoryBudgetError, match=r"whole\.gguf cannot be read: the system refuses this process more memory"):
            read_gguf(file)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
