"""Search patterns: marked prompts, every encoding in which memory may hold text or numbers, and rows that a model computes.

A needle is two or more pieces at fixed distances. One piece suffices for contiguous bytes; a Python list of consecutively
allocated integers needs a piece for each, a chunk apart.
"""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from cloister.backends.base import LOGITS, ForwardBatch, Program
from cloister.text import Tokenizer

if TYPE_CHECKING:
    from cloister.backends.native.program import NativeProgram

SHORTEST: Final = 16
"""Minimum length of a needle in bytes: shorter ones are found by chance."""
RUN: Final = 4
"""Number of consecutive token ids that identify a prompt."""
_PACKED_RUN: Final = 6
_INT_CHUNKS: Final = (32, 48)
"""Distance of two consecutively allocated CPython integers below 2^30: from its own pools, and from malloc."""
KV_KIND: Final = "K/V rows"
LOGITS_KIND: Final = "logits"
_SLICE_BYTES: Final = 32
_NUM_SLICES: Final = 6
_FEWEST_VALUES: Final = 12
"""Minimum number of distinct bytes in a slice: zeros and repetitions are found everywhere."""


@dataclass(frozen=True, slots=True)
class Needle:
    """A pattern to search for.

    Attributes:
        kind: the encoding, such as "utf-8".
        owner: number of its origin, such as a request.
        pieces: (distance from the start, bytes), the first at 0 and of at least 8 bytes.
    """

    kind: str
    owner: int
    pieces: tuple[tuple[int, bytes], ...]

    @property
    def reach(self) -> int:
        """Bytes from the start to the end of the last piece."""
        return max(distance + len(piece) for distance, piece in self.pieces)


def of_bytes(kind: str, owner: int, data: bytes) -> Needle:
    """Returns a needle for contiguous bytes.

    Raises:
        ValueError: they are fewer than `SHORTEST`, and would be found by chance.
    """
    if len(data) < SHORTEST:
        raise ValueError(f"a needle of {len(data)} bytes is found by chance; give at least {SHORTEST}")
    return Needle(kind, owner, ((0, data),))


def of_text(text: str, owner: int, prefix: str = "") -> Iterator[Needle]:
    """Yields the distinct encodings of a text of at least 16 characters.

    CPython stores a text with any wide character in UTF-16 or UTF-32 (PEP 393).
    """
    utf8 = text.encode()
    forms = {
        "utf-8": utf8,
        "utf-16": text.encode("utf-16-le"),
        "utf-32": text.encode("utf-32-le"),
        "json": json.dumps(text)[1:-1].encode(),
        "hex": utf8.hex().encode(),
        **{f"base64+{shift}": _base64(utf8, shift) for shift in range(3)},
    }
    if all(ord(letter) < 256 for letter in text):
        forms["latin-1"] = text.encode("latin-1")
    seen: set[bytes] = set()
    for kind, data in forms.items():
        if data not in seen:
            seen.add(data)
            yield of_bytes(prefix + kind, owner, data)


def of_token_ids(token_ids: Sequence[int], owner: int, prefix: str = "") -> Iterator[Needle]:
    """Yields needles for every fourth run of four ids: arrays, lists of Python integers, msgpack, decimals with commas.

    Ids of at most two decimal digits give needles that are found by chance; use others.
    """
    for start in range(0, len(token_ids) - RUN + 1, RUN):
        run = token_ids[start : start + RUN]
        yield of_bytes(f"{prefix}int32", owner, struct.pack(f"<{RUN}i", *run))
        yield of_bytes(f"{prefix}int64", owner, struct.pack(f"<{RUN}q", *run))
        for way, ids in (("", run), (" backwards", run[::-1])):
            for chunk in _INT_CHUNKS:
                pieces = tuple((place * chunk, struct.pack("<Ii", 0, token_id)) for place, token_id in enumerate(ids))
                yield Needle(f"{prefix}python ints {chunk} apart{way}", owner, pieces)
    for start in range(0, len(token_ids) - _PACKED_RUN + 1, _PACKED_RUN):
        run = token_ids[start : start + _PACKED_RUN]
        yield of_bytes(f"{prefix}msgpack", owner, b"".join(map(_msgpack, run)))
        yield of_bytes(f"{prefix}decimals", owner, ",".join(map(str, run)).encode())
        yield of_bytes(f"{prefix}decimals", owner, ", ".join(map(str, run)).encode())


def _base64(data: bytes, shift: int) -> bytes:
    """Returns the part of base64 that does not depend on the bytes around `data`, with `shift` bytes before it."""
    coded = base64.b64encode(bytes(shift) + data)
    first = (0, 2, 3)[shift]
    whole = (shift + len(data)) // 3 * 4
    return coded[first:whole]


def _msgpack(value: int) -> bytes:
    if value < 0x80:
        return struct.pack("B", value)
    if value < 0x100:
        return b"\xcc" + struct.pack("B", value)
    if value < 0x10000:
        return b"\xcd" + struct.pack(">H", value)
    return b"\xce" + struct.pack(">I", value)


# Marked prompts: word sequences unique enough that a match identifies the prompt. Pure.
#
# The words are single tokens of the model, so that a mark is known both as text and as token ids.


NUM_WORDS: Final = 12
_FEWEST_WORDS: Final = 200
_LEAST_ID: Final = 300
_ACCENTED: Final = "ü"


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark.

    Attributes:
        owner: number of its request.
        text: begins with a space; one of its words is between letters that JSON escapes.
        token_ids: runs of consecutive ids of its words: those before the accented letter and those after it.
    """

    owner: int
    words: tuple[str, ...]
    runs: tuple[tuple[int, ...], ...]

    @property
    def text(self) -> str:
        half = NUM_WORDS // 2
        return "".join(self.words[:half]) + f" {_ACCENTED}" + "".join(self.words[half:])

    def needles(self) -> Iterator[Needle]:
        """Yields needles for at least a third of the mark, in every encoding."""
        half = NUM_WORDS // 2
        for start in range(0, NUM_WORDS, RUN):
            part = self.words[start : start + RUN]
            if not start < half < start + RUN:
                yield from of_text("".join(part), self.owner)
        around = "".join(self.words[half - 2 : half]) + f" {_ACCENTED}" + "".join(self.words[half : half + 2])
        yield from of_text(around, self.owner)
        for run in self.runs:
            yield from of_token_ids(run, self.owner)


class MarkMaker:
    """Creates marks whose words are single tokens of a model's tokenizer.

    Args:
        seed: makes the marks reproducible; None draws them.

    Raises:
        ValueError: the tokenizer has too few whole words.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int | None = None) -> None:
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._words = tuple(_whole_words(tokenizer))
        if len(self._words) < _FEWEST_WORDS:
            raise ValueError(f"the tokenizer has {len(self._words)} whole words; marks need {_FEWEST_WORDS}")

    def make(self, owner: int) -> Mark:
        """Returns a new mark."""
        chosen: Sequence[tuple[str, int]] = [self._random.choice(self._words) for _ in range(NUM_WORDS)]
        ids = tuple(token_id for _, token_id in chosen)
        half = NUM_WORDS // 2
        return Mark(owner, tuple(word for word, _ in chosen), (ids[:half], ids[half:]))


def _whole_words(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Yields words with a leading space that are one token, alone and after another word."""
    for token_id in range(_LEAST_ID, tokenizer.vocab_size):
        data = tokenizer.read_bytes(token_id)
        if not (data.startswith(b" ") and len(data) >= 5 and data[1:].isalpha() and data.isascii()):
            continue
        word = data.decode()
        if tokenizer.encode(word) == [token_id] and tokenizer.encode(word * 2) == [token_id] * 2:
            yield word, token_id


# Values that a model computes from a prompt, as byte patterns: K and V rows as stored in blocks, and logits.
# A row has the same bits in any batch (batch invariance), so a copy of the model in another process computes what the node
# computed, if its number formats, kernels and block size are the same. A search during a request shows whether they are.
def rows_of(program: Program, blocks: NativeProgram, token_ids: Sequence[int], block_size: int, owner: int) -> Iterator[Needle]:
    """Computes a prompt and yields needles of its first whole block in the first and the last layer, and of its last logits."""
    length = len(token_ids)
    num_blocks = -(-length // block_size)
    batch = ForwardBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.arange(length, dtype=np.int32),
        query_starts=np.array([0, length], np.int32),
        context_lens=np.array([length], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        logit_rows=np.array([length - 1], np.int32),
    )
    program.wipe_blocks(range(num_blocks))
    logits = program.step(batch, LOGITS).logits
    for layer in sorted({0, blocks.num_layers - 1}):
        for part in _slices(blocks.read_block(layer, 0)):
            yield of_bytes(KV_KIND, owner, part)
    for part in _slices(np.ascontiguousarray(logits[-1], np.float32).tobytes()):
        yield of_bytes(LOGITS_KIND, owner, part)


def _slices(data: bytes) -> Iterator[bytes]:
    """Yields slices at multiples of their size, distributed over the data and unique."""
    starts = range(0, len(data) - _SLICE_BYTES + 1, _SLICE_BYTES)
    full = [start for start in starts if len(set(data[start : start + _SLICE_BYTES])) >= _FEWEST_VALUES]
    step = max(1, len(full) // _NUM_SLICES)
    for start in full[::step][:_NUM_SLICES]:
        yield data[start : start + _SLICE_BYTES]
